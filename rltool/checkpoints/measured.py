"""Values of checkpoint.best_metric that came after the checkpoint was written, from an evaluation that ran beside
training. A checkpoint is not touched once it is complete, so they stand beside them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from rltool.processes.files import write_json_atomic

FILE = "measured.json"


class MeasuredLater:
    """directory: of the run's checkpoints. metric: None records nothing. The file is {metric: {step: value}}; one that
    cannot be read counts as none, for all that hangs on it is which checkpoints are thinned out."""

    def __init__(self, directory: Path, metric: str | None) -> None:
        self._file, self._metric = directory / FILE, metric
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
