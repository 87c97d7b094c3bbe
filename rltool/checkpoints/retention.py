"""Which checkpoints of a run go and which stay. Pure: facts in, steps out; `directory.remove` does the deleting."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Kept:
    """A complete checkpoint. value: of the metric that ranks checkpoints, as measured after its step;
    None or NaN: not measured."""

    step: int
    value: float | None = None


def expendable(
    complete: Sequence[Kept],
    *,
    keep_last: int,
    keep_best: int = 0,
    higher_is_better: bool = True,
    protected: Collection[int] = (),
) -> list[int]:
    """Steps of the checkpoints that may be deleted, ascending.

    complete: all complete checkpoints, in any order. keep_last: how many of the newest stay; 0: all. keep_best: how
    many of the best stay beside those; of equal ones the newer. protected: steps that always stay: where
    `latest` points, and what is being read. The newest checkpoint always stays.
    """
    if keep_last == 0:
        return []
    by_step = sorted(complete, key=lambda entry: entry.step)
    sign = 1.0 if higher_is_better else -1.0
    measured = [entry for entry in by_step if entry.value is not None and not math.isnan(entry.value)]
    best = sorted(measured, key=lambda entry: (sign * (entry.value or 0.0), entry.step), reverse=True)[:keep_best]
    staying = {entry.step for entry in (*by_step[-keep_last:], *best)} | set(protected)
    return [entry.step for entry in by_step if entry.step not in staying]
