"""Rewards of benchmarks that both sides of a comparison compute; they import nothing."""

from __future__ import annotations

from typing import Any


def share_of_letters(text: str, tokens: int) -> float:
    """Letters in `text` for each of the answer's `tokens`: 0 to 1, also where tokens decode to nothing."""
    return sum(map(str.isalpha, text)) / max(tokens, 1)


def letter_share(sample: Any, text: str) -> float:
    """share_of_letters as a reward function of rltool."""
    return share_of_letters(text, len(sample.response_ids))
