"""The evaluations of a run as the loop sees them: when one begins, when it has ended, and what follows from it.

With eval.blocking the loop waits for each. Without, one goes on while the loop trains, and is looked at between steps:
its metrics are a record of their own, under the step that it began after.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from rltool.config.train import TrainConfig
from rltool.training.observe.metrics import MetricsWriter, step_line


class Evaluator(Protocol):
    """What is asked of the rollout side. One evaluation at a time."""

    @property
    def weight_version(self) -> str: ...

    def start_evaluation(self, step: int) -> None:
        """Of the weights after `step` training steps, which the engines hold; returns while it runs."""

    def evaluated(self, *, wait: bool) -> dict[str, float] | None:
        """Its metrics once it has ended, else None. wait: until then. Raises what ended it."""
        ...


class Judged(Protocol):
    """What is asked of training.checkpointer."""

    def awaits(self, step: int) -> None:
        """The weights after `step` training steps are being evaluated: a checkpoint of them stays until `measured`."""

    def measured(self, step: int, metrics: dict[str, float]) -> None:
        """What that has come to."""


@dataclass(frozen=True)
class _Running:
    """step: training steps of the weights at its start."""

    step: int
    weight_version: str


class Evaluations:
    """engines: None where none takes part. first: training steps done when the loop begins. `reached` is True once the
    first set's accuracy has come to eval.stop_at."""

    def __init__(
        self, config: TrainConfig, engines: Evaluator | None, checkpoints: Judged, writer: MetricsWriter, *, first: int
    ) -> None:
        self._config, self._engines, self._first = config, engines, first
        self._checkpoints, self._writer = checkpoints, writer
        self._running: _Running | None = None
        self._waited = 0.0
        self.reached = False

    def is_due(self, done: int) -> bool:
        """Before the first step, after the last, and every eval.every_steps."""
        if self._engines is None or not self._config.eval.sets or self.reached:
            return False
        return done in (self._first, self._config.steps) or is_due(self._config.eval.every_steps, done)

    def begins(self, done: int) -> bool:
        """Whether `begin` will start one after `done` steps: one is due, and none runs any more. Call it before the
        engines get the weights of that step: it is where one that has ended is recorded, and the last one is waited
        for."""
        self._end(wait=done == self._config.steps)
        return self.is_due(done) and self._running is None

    def begin(self, done: int) -> dict[str, float]:
        """Start what is due after `done` steps; the engines hold these weights. Returns metrics for the record of this
        step: those of an evaluation that was waited for, or that one was skipped because the one before still runs."""
        if not self.is_due(done) or self._engines is None:
            return {}
        if self._running is not None:
            self._writer.log(
                f"the evaluation after step {done} is skipped: that of step {self._running.step} still runs"
            )
            return {"eval/skipped": 1.0}
        started = time.perf_counter()
        self._engines.start_evaluation(done)
        self._waited += time.perf_counter() - started
        self._running = _Running(done, self._engines.weight_version)
        self._checkpoints.awaits(done)
        if not self._config.eval.blocking and done != self._config.steps:
            return {}
        metrics = self._take(wait=True) or {}
        waited, self._waited = self._waited, 0.0
        return {**metrics, "time/eval_seconds": waited}

    # -- the rest is private

    def _end(self, *, wait: bool) -> None:
        """Record the one that runs, if it has ended."""
        running = self._running
        if running is None or (metrics := self._take(wait=wait)) is None:
            return
        self._writer.write(running.step - 1, running.weight_version, metrics)
        self._writer.log("evaluation of " + step_line(running.step - 1, self._config.steps, metrics))

    def _take(self, *, wait: bool) -> dict[str, float] | None:
        assert self._engines is not None and self._running is not None
        started = time.perf_counter()
        metrics = self._engines.evaluated(wait=wait)
        self._waited += time.perf_counter() - started
        if metrics is not None:
            self._checkpoints.measured(self._running.step, metrics)
            if self._running.step != self._first:  # a goal that is reached before the first step would train nothing
                self._judge(metrics)
            self._running = None
        return metrics

    def _judge(self, metrics: dict[str, float]) -> None:
        goal = self._config.eval.stop_at
        if goal is None:
            return
        name = f"eval/{next(iter(self._config.eval.sets))}/accuracy"
        if metrics[name] < goal:
            return
        self.reached = True
        self._writer.log(f"{name} has reached eval.stop_at = {goal:g}: the run ends here")


def is_due(every: int, done: int) -> bool:
    return every > 0 and done % every == 0
