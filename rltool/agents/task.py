"""What an agent receives. It needs nothing of rltool: a base URL and a key for the client library that it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rltool.rollout.data import Prompt
from rltool.rollout.sample import Sample


@dataclass(frozen=True)
class AgentTask:
    """base_url: for OpenAI's clients; anthropic_base_url: for Anthropic's; api_key: of this episode's session alone;
    model: the name to ask for. row: prompt, messages, label, response, metadata, multimodal_inputs and index of the row
    of the data set. deadline: seconds from now in which the agent must end; seed: of this episode, for what is
    random in it."""

    base_url: str
    anthropic_base_url: str
    api_key: str
    model: str
    row: Mapping[str, Any]
    deadline: float
    seed: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def row_of(sample: Sample, prompt: Prompt | None) -> dict[str, Any]:
    """prompt: the row that the sample is of."""
    messages = list(prompt.messages) if prompt is not None and prompt.messages is not None else None
    return {
        "index": sample.prompt_index,
        "prompt": None if messages is not None else sample.prompt_text,
        "messages": messages,
        "label": sample.label,
        "response": prompt.response if prompt is not None else None,
        "metadata": sample.metadata,
        "multimodal_inputs": sample.multimodal_inputs,
    }
