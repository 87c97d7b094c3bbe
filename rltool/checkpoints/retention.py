"""Which checkpoints of a run go and which stay. `directory.remove` does the deleting."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rltool.processes.files import write_json_atomic

MEASURED = "measured.json"


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
    """Steps of the checkpoints that may be deleted, ascending. Pure.

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



class MeasuredLater:
    """Values of checkpoint.best_metric that came after the checkpoint was written, from an evaluation that ran beside
    training. A checkpoint is not touched once it is complete, so they stand beside them.

    directory: of the run's checkpoints. metric: None records nothing. The file is {metric: {step: value}}; one that
    cannot be read counts as none, for all that hangs on it is which checkpoints are thinned out."""

    def __init__(self, directory: Path, metric: str | None) -> None:
        self._file, self._metric = directory / MEASURED, metric
        self._values = _read(self._file).get(metric, {}) if metric is not None else {}

    def value(self, step: int) -> float | None:
        return self._values.get(str(step))

    def add(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Whether the metric is among them."""
        value = metrics.get(self._metric) if self._metric is not None else None
        if value is None or not math.isfinite(value):
            return False
        self._values[str(step)] = float(value)
        self._write()
        return True

    def forget(self, step: int) -> None:
        """The checkpoint of this step is written anew, by a run that was resumed from an earlier one."""
        if self._values.pop(str(step), None) is not None:
            self._write()

    def _write(self) -> None:
        write_json_atomic(self._file, {self._metric: self._values})


def _read(file: Path) -> dict[str, dict[str, float]]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return {name: {step: float(value) for step, value in values.items()} for name, values in found.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
