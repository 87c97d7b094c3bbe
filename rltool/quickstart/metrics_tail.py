"""A training run's metrics.jsonl as it grows: each complete record once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class MetricsTail:
    """Follows a file that may not be there yet. What it holds at first belongs to an earlier training: left out."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._position = file.stat().st_size if file.exists() else 0

    def new_records(self) -> list[Record]:
        """Records whose line has been finished since the last call; a line that is no record is skipped."""
        if not self._file.exists():
            return []
        with self._file.open("rb") as file:
            file.seek(self._position)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._position += len(complete)
        return [record for line in complete.splitlines() if (record := _record(line)) is not None]


def finished_step(record: Record) -> int | None:
    """How many training steps were finished with this record; None for the evaluation before the first."""
    step = record.get("step")
    return step + 1 if isinstance(step, int) and step >= 0 and "time/step_seconds" in record else None


def numbers(record: Record) -> dict[str, float]:
    """The metrics of a record; those that were not finite, and so are null, are left out."""
    return {name: float(value) for name, value in record.items() if "/" in name and isinstance(value, int | float)}


def headline(metrics: dict[str, float]) -> str:
    """What a progress bar has room for."""
    shown = [("reward", "rollout/reward_mean", ".3f"), ("loss", "train/loss", ".4f")]
    accuracies = [name for name in metrics if name.startswith("eval/") and name.endswith("/accuracy")]
    shown += [(f"{name.split('/')[1]} accuracy", name, ".3f") for name in accuracies]
    return "  ".join(f"{label} {metrics[name]:{form}}" for label, name, form in shown if name in metrics) or "training"


def _record(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
