"""A living run's latest measurements, at the driver's endpoint for `rltool top`, and Prometheus."""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from typing import cast

from rltool.engines.metrics_text import written
from rltool.engines.run_client import History, RunStatus

KEPT_STEPS = 200
PREFIX = "rltool_"
_LABELLED = (
    (re.compile(r"eval/(?P<set>.+)/(?P<name>[^/]+)"), "eval/"),
    (re.compile(r"rollout/category/(?P<category>.+)/(?P<name>[^/]+)"), "rollout/category_"),
    (re.compile(r"rollout/(?P<name>zero_std_groups)/(?P<reward>.+)"), "rollout/"),
    (
        re.compile(
            r"served/(?P<name>waiting|queued_bytes|result_bytes|models|samples_in_flight|refused_total)/(?P<client>.+)"
        ),
        "served_",
    ),
    (re.compile(r"served/(?P<name>\w+_total)/(?P<kind>\w+)"), "served_"),
)
"""Metrics with a name of the user's own in the middle: that becomes a label, as Prometheus wants it."""


class LiveMetrics:
    """A MetricLogger: written by the loop's thread, read by the endpoint's."""

    def __init__(self, run: str) -> None:
        self.run = run
        self._lock = threading.Lock()
        self._records: deque[tuple[int, dict[str, float]]] = deque(maxlen=KEPT_STEPS)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """An evaluation that ran beside training comes later than the rest of its step, and joins it."""
        with self._lock:
            for place, (recorded, found) in enumerate(self._records):
                if recorded == step:
                    self._records[place] = step, {**found, **metrics}  # a new one: a reader may have the other
                    return
            self._records.append((step, dict(metrics)))

    def close(self) -> None:
        pass

    def history(self) -> History:
        """The last records, oldest first."""
        with self._lock:
            return {"run": self.run, "records": [{"step": step, "metrics": found} for step, found in self._records]}

    def exposition(self, status: RunStatus) -> str:
        """The newest value of every metric and the run's state, in Prometheus' text format. status: {} where the run
        has none."""
        newest: dict[str, float] = {}
        with self._lock:
            for _, metrics in self._records:
                newest |= metrics
        return exposition(self.run, newest, status)


def exposition(run: str, metrics: Mapping[str, float], status: RunStatus) -> str:
    """Prometheus' text format 0.0.4: samples of one metric together, behind a line with its type."""
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    for name, value in sorted(metrics.items()):
        exported, labels = exported_name(name)
        samples.setdefault(exported, []).append(({"run": run, **labels}, value))
    for name, labels, value in _of_status(status):
        samples.setdefault(PREFIX + name, []).append(({"run": run, **labels}, value))
    lines: list[str] = []
    for name, entries in samples.items():
        lines.append(f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}")
        lines += [f"{name}{{{written(labels)}}} {value!r}" for labels, value in entries]
    return "\n".join(lines) + "\n"


def exported_name(name: str) -> tuple[str, dict[str, str]]:
    """(name in Prometheus, labels) of one of our metrics: rollout/reward_mean is rltool_rollout_reward_mean, and
    eval/words/accuracy is rltool_eval_accuracy{set="words"}."""
    labels: dict[str, str] = {}
    for pattern, room in _LABELLED:
        if match := pattern.fullmatch(name):
            labels = match.groupdict()
            name = room + labels.pop("name")
            break
    return PREFIX + re.sub(r"[^a-zA-Z0-9_]", "_", name), labels


def _of_status(status: RunStatus) -> Iterator[tuple[str, dict[str, str], float]]:
    if "step" in status:
        yield "step", {}, float(status["step"])
    if "steps" in status:
        yield "steps", {}, float(status["steps"])
    if "requests_in_flight" in status:
        yield "requests_in_flight", {}, float(status["requests_in_flight"])
    groups = cast(Mapping[str, int], status.get("groups") or {})
    for state, count in groups.items():
        yield "prompt_groups", {"state": state}, float(count)
    for engine in status.get("engines") or ():
        yield "engine_state", {"engine": engine.get("url", "?"), "state": engine.get("state", "?")}, 1.0
