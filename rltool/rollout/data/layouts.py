"""Data sets as their authors published them: which columns they have, and the plain row that each row means. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rltool.config.data import DataConfig

Row = dict[str, Any]


@dataclass(frozen=True)
class PublishedLayout:
    """columns: those by which it is recognised; plain: a row with `prompt`, `label`, `response` and `metadata`, which
    raises ValueError where a column does not hold what it should."""

    columns: frozenset[str]
    plain: Callable[[Row], Row]


def gsm8k(row: Row) -> Row:
    """GSM8K (Cobbe et al. 2021, arXiv 2110.14168): `question`, and `answer`, a solution whose last line is
    `#### NUMBER`."""
    _, marker, final = str(row["answer"]).rpartition("####")
    if not marker:
        raise ValueError("'answer' has no final answer behind ####, which the gsm8k layout expects")
    return {"prompt": row["question"], "label": final.strip(), "response": row["answer"]}


def deepscaler(row: Row) -> Row:
    """DeepScaleR-Preview-Dataset: `problem`, `answer`, and `solution`, which some rows leave empty."""
    return {"prompt": row["problem"], "label": row["answer"], "response": row["solution"] or None}


def verl(row: Row) -> Row:
    """The rows of verl's preprocessing, in which DAPO-Math-17k was published (Yu et al. 2025, arXiv 2503.14476):
    `prompt` (messages), `reward_model.ground_truth`."""
    reward_model = row["reward_model"]
    if not isinstance(reward_model, Mapping) or "ground_truth" not in reward_model:
        raise ValueError("'reward_model' has no ground_truth, which the verl layout expects")
    kept = ("data_source", "ability", "extra_info")
    metadata = {name: row[name] for name in kept if row.get(name) is not None}
    return {"prompt": row["prompt"], "label": reward_model["ground_truth"], "metadata": metadata}


LAYOUTS: dict[str, PublishedLayout] = {
    "gsm8k": PublishedLayout(frozenset({"question", "answer"}), gsm8k),
    "deepscaler": PublishedLayout(frozenset({"problem", "answer", "solution"}), deepscaler),
    "verl": PublishedLayout(frozenset({"prompt", "reward_model"}), verl),
}


def recognise(row: Any, config: DataConfig) -> str | None:
    """Name of the layout that the rows of a set have, detected from one of them; None: the columns that are configured.

    A column that the configuration names, or `messages`, goes before every layout but verl, whose prompts are in
    `prompt` too: that one is known by the lack of a label.
    """
    if config.layout == "columns" or not isinstance(row, dict):
        return None
    if config.layout != "auto":
        return config.layout
    if config.label_key in row or "messages" in row:
        return None
    if config.prompt_key in row:
        return "verl" if config.prompt_key == "prompt" and isinstance(row.get("reward_model"), Mapping) else None
    if config.prompt_key != "prompt" or config.label_key != "label":
        return None
    return next((name for name in ("gsm8k", "deepscaler") if LAYOUTS[name].columns <= row.keys()), None)
