"""What prompts a run reads, and how rows become prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from rltool.config.base import Config, OwnFunction

Modality = Literal["image", "video", "audio"]
Layout = Literal["auto", "columns", "gsm8k", "deepscaler", "verl"]


def _text(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


DataSet = Annotated[str, BeforeValidator(_text)]
"""A file, directory, hub name or reasoning-gym task, with a slice behind it or none; rltool.rollout.data.spec reads
it."""


def _has_a_place(template: str | None) -> str | None:
    if template is not None and "{prompt}" not in template:
        raise ValueError("the template has no {prompt}, so every prompt would be the same text")
    return template


class DataConfig(Config):
    """Prompts: rows with `prompt` (text) or `messages` (chat), optional `label`, `response`, `metadata`, `tools`."""

    train: tuple[DataSet, ...] = ()
    """Each a file (.jsonl, .json, .parquet), a directory that `datasets` saved, a Hugging Face hub name with options
    (`openai/gsm8k?config=main&split=train`), or a generated task (`reasoning-gym:chain_sum?size=5000&seed=3`); a slice
    of its rows may follow (`rows.jsonl[100:200]`)."""
    weights: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """Shares of the sets of data.train among the prompts that are drawn, each with epochs of its own; empty: all rows
    alike, one epoch over all."""
    source: OwnFunction | None = None
    """In place of data.train: f(config: DataConfig, seed: int) -> an object that gives rows (docs/extending.md)."""
    layout: Layout = "auto"
    """Whose columns the rows have. auto: those of gsm8k (question, answer with ####), deepscaler (problem, answer,
    solution) and verl (prompt, reward_model.ground_truth; dapo-math-17k) are recognised by the first row of each set;
    columns: never."""
    prompt_key: str = "prompt"
    """Column of the prompt; `messages` is looked for where it is missing. A dot leads into a column: `task.prompt`."""
    label_key: str = "label"
    """Column that rewards compare with: text or a number."""
    response_key: str = "response"
    """Column of the target of supervised training; without it the label is the target."""
    tools_key: str = "tools"
    """Column of the tools that the chat template gets: a list in OpenAI's form, or that as JSON text."""
    metadata_keys: tuple[str, ...] = ()
    """Further columns that are copied into the sample's metadata, under their own names."""
    multimodal_keys: dict[Modality, str] = {"image": "images", "video": "videos", "audio": "audios"}
    """Kind of input -> its column: a list of paths, URLs or base64 text. Kept in the sample's multimodal_inputs, as is
    what stands in the parts of messages; {}: no column holds any."""
    media_root: Path | None = None
    """Directory that paths of images are relative to, and outside of which none is read; None: the working
    directory."""
    prompt_template: Annotated[str | None, AfterValidator(_has_a_place)] = None
    """Text around each prompt that is text, `{prompt}` where it stands: an instruction, for example."""
    apply_chat_template: bool | None = None
    """None: for `messages` yes, for `prompt` no."""
    chat_template: Path | None = None
    """Jinja file in place of the chat template that comes with the model."""
    chat_template_arguments: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the chat template, such as enable_thinking."""
    shuffle: bool = True
    """In an order that depends on the seed and the epoch alone; false: as in the files."""

    @model_validator(mode="after")
    def _consistent(self) -> DataConfig:
        if self.weights and len(self.weights) != len(self.train):
            raise ValueError(
                f"weights has {len(self.weights)} numbers for {len(self.train)} sets in train: give one for each"
            )
        if self.source is not None and (self.train or self.weights):
            raise ValueError("source takes the place of train and weights: give one or the other")
        return self
