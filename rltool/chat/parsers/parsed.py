"""What a parser finds in a model's text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Tools = Sequence[Mapping[str, Any]]
"""What the agent has declared, in OpenAI's form (`Conversation.tools`); empty: calls are text."""


@dataclass(frozen=True)
class Call:
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Parsed:
    text: str
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


class Parser(Protocol):
    """One format. Of texts with all special tokens but the final stop token."""

    def parse(self, text: str, *, tools: Tools, reasoning_open: bool) -> Parsed:
        """reasoning_open: the prompt has begun the reasoning itself."""
        ...

    def certain(self, text: str, *, tools: Tools, reasoning_open: bool) -> str:
        """The beginning of a text that is still being written, as much of it as what follows cannot change: what
        `parse` finds in it is the beginning of what it will find in the whole."""
        ...

    def opens_reasoning(self, prompt: str) -> bool:
        """Whether a prompt, as the chat template wrote it, ends within the model's reasoning."""
        ...


class Plain:
    """For models without a format: all is text."""

    def parse(self, text: str, *, tools: Tools, reasoning_open: bool) -> Parsed:
        return Parsed(text)

    def certain(self, text: str, *, tools: Tools, reasoning_open: bool) -> str:
        return text

    def opens_reasoning(self, prompt: str) -> bool:
        return False


def without_begun(text: str, marks: Sequence[str], start: int = 0) -> str:
    """`text` without an end, behind `start`, that may be the beginning of one of `marks`."""
    longest = max(map(len, marks), default=1)
    for at in range(max(start, len(text) - longest + 1), len(text)):
        if any(mark.startswith(text[at:]) for mark in marks):
            return text[:at]
    return text
