"""What a run's directory holds, read for the report: metrics, configuration, facts of its start, samples."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rltool.errors import RltoolError
from rltool.masking import masked
from rltool.report.charts import Point
from rltool.report.samples import StepSamples, read_samples, recorded_steps

Metrics = dict[str, list[Point]]
"""name -> (step as on the console, where the first is 1 and 0 is before it; value), ascending, finite values only."""

SAMPLED_STEPS = 4
"""Steps of which the report shows samples: the first, the last, and others evenly between."""


@dataclass(frozen=True)
class RunFiles:
    """One run. config: dotted key -> value; origins: dotted key -> where it was set; facts: of the run's start, by
    name."""

    name: str
    metrics: Metrics
    config: Mapping[str, Any] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    samples: tuple[StepSamples, ...] = ()

    @property
    def evaluations(self) -> dict[str, list[Point]]:
        """Set -> its accuracy."""
        return {
            key.removeprefix("eval/").removesuffix("/accuracy"): points
            for key, points in self.metrics.items()
            if key.startswith("eval/") and key.endswith("/accuracy")
        }


def read_run(directory: Path) -> RunFiles:
    """The run may go on meanwhile. Raises RltoolError without usable metrics."""
    metrics = read_metrics(directory / "metrics.jsonl")
    document = _read_json(directory / "config.json")
    samples = directory / "samples"
    steps = evenly(recorded_steps(samples), SAMPLED_STEPS)
    return RunFiles(
        directory.name, metrics, flatten(masked(document.get("config", document))), document.get("origins", {}),
        document.get("facts", {}), tuple(read_samples(samples, step) for step in steps),
    )  # fmt: skip


def read_metrics(path: Path) -> Metrics:
    """All numbers of a metrics file by name. Of a step that was repeated after a resume, the later value counts."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise RltoolError(f"{path} does not exist: has this run taken a step?") from None
    values: dict[str, dict[float, float]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            step = float(record["step"]) + 1
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):  # the run was killed while it wrote this line
                continue
            raise RltoolError(f"{path}, line {number}: not a metrics record ({error})") from error
        for name, value in record.items():
            if name != "step" and _is_number(value):
                values.setdefault(name, {})[step] = float(value)
    if not values:
        raise RltoolError(f"{path} holds no metrics yet")
    return {name: sorted(points.items()) for name, points in values.items()}


def evenly(steps: list[int], count: int) -> list[int]:
    """At most `count` of them: the first, the last, and others evenly between."""
    if len(steps) <= count:
        return steps
    return [steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)]


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}. Empty tables stay as they are."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            flat.update(flatten(item, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = item
    return flat


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise RltoolError(f"{path} is not valid JSON: {error}") from error
    return found if isinstance(found, dict) else {}
