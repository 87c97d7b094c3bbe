"""Sums whose numbers grow with the run: a curriculum that no file could hold."""

from __future__ import annotations

import random
from typing import Any

from rltool.api import DataConfig

ROWS_PER_DIGIT = 1000


class GrowingSums:
    """Row number n is made from (seed, n), so its number is all that a checkpoint has to keep."""

    def __init__(self, seed: int) -> None:
        self._seed, self._number = seed, 0

    def next(self, count: int) -> list[dict[str, Any]]:
        rows = [self._row(self._number + i) for i in range(count)]
        self._number += count
        return rows

    def _row(self, number: int) -> dict[str, Any]:
        dice = random.Random(f"{self._seed}:{number}")
        digits = 1 + number // ROWS_PER_DIGIT
        a, b = (dice.randrange(10 ** (digits - 1), 10**digits) for _ in range(2))
        return {"prompt": f"{a}+{b}=", "label": str(a + b), "metadata": {"digits": digits}}

    def state_dict(self) -> dict[str, Any]:
        return {"number": self._number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._number = state["number"]


def growing_sums(config: DataConfig, seed: int) -> GrowingSums:
    """data.source = "examples.data_source:growing_sums"."""
    return GrowingSums(seed)
