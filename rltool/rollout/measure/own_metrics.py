"""Metrics of the user's own, by import path (monitor.metrics)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rltool.config.import_path import load_callable
from rltool.config.sections import MonitorConfig
from rltool.rollout.rewards.worker import describe, finite
from rltool.rollout.sample import Sample

PREFIX = "own/"


class OwnMetrics:
    """A failure is logged once and measures nothing for that batch: no run ends for a chart."""

    def __init__(self, config: MonitorConfig, *, log: Callable[[str], None]) -> None:
        self._function, self._log, self._said = load_metrics(config), log, False

    def of(self, samples: list[Sample]) -> dict[str, float]:
        """own/NAME of one batch; called in a thread."""
        try:
            return checked_metrics(self._function(samples))
        except Exception as error:  # a user's code may raise anything
            if not self._said:
                self._log(f"monitor.metrics failed, and its numbers are missing: {describe(error)}")
            self._said = True
            return {}


def checked_metrics(found: Any) -> dict[str, float]:
    """With the prefix. ValueError for anything but a table of names and finite numbers."""
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        raise ValueError(f"returned {type(found).__name__}, expected a dict of names and numbers")
    return {PREFIX + name: finite(value) for name, value in found.items()}


def load_metrics(config: MonitorConfig) -> Callable[[list[Sample]], Any]:
    """monitor.metrics as a function; UsageError for what is none."""
    assert config.metrics is not None
    return load_callable(config.metrics, setting="monitor.metrics", takes=("samples",))
