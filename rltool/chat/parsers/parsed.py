"""What a parser finds in a model's text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


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
    def __call__(self, text: str, *, tools: bool, reasoning_open: bool) -> Parsed: ...


def plain(text: str, *, tools: bool, reasoning_open: bool) -> Parsed:
    """For models without a format: all is text."""
    return Parsed(text)
