"""The checkpoints of a run as the loop sees them: started at steps, settled at step boundaries, thinned out, and one at
the end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rltool.checkpoints import directory as directories
from rltool.checkpoints import manifest as manifests
from rltool.checkpoints.retention import Kept, MeasuredLater, expendable
from rltool.config.sections import CheckpointConfig
from rltool.errors import RltoolError, RunFault, SaveFailed
from rltool.terminal import Console

if TYPE_CHECKING:
    from rltool.training.loop import Progress


class SavingTrainer(Protocol):
    """What is asked of the trainer's ranks: rltool/checkpoints/saving.py on each of them."""

    def save_checkpoint(
        self, directory: Path, extra: dict[str, Any], metrics: dict[str, float], files: Any
    ) -> None: ...

    def saved(self, *, wait: bool) -> Any: ...


class Checkpointer:
    """Saves of one run, at most one in flight.

    describe(progress): what a resume needs beside the trainer's state, as JSON, and further files of the checkpoint
    (SourceState.files).
    """

    def __init__(
        self,
        config: CheckpointConfig,
        trainer: SavingTrainer,
        directory: Path,
        describe: Callable[[Progress], tuple[dict[str, Any], Any]],
        console: Console,
        *,
        resumed_from: int | None = None,
    ) -> None:
        self._config = config
        self._trainer = trainer
        self._directory = directory
        self._describe = describe
        self._console = console
        self._complete = resumed_from
        self._in_flight: int | None = None
        self._awaited: int | None = None
        self._later = MeasuredLater(directory, config.best_metric)
        self._metrics: dict[str, float] = {}

    def path(self, step: int) -> Path:
        return self._directory / f"step_{step}"

    def save(self, progress: Progress) -> None:
        """A checkpoint of this state: complete on return, or on its way with checkpoint.async_save.

        An earlier one is waited for first. Failures of either are handled by checkpoint.on_save_failure:
        SaveFailed, or a warning that is counted.
        """
        started = time.perf_counter()
        self._settle(wait=True)
        try:
            self._start(progress)
        except SaveFailed as failure:
            self._failed(failure)
        else:
            self._settle(wait=not self._config.async_save)
        self._metrics["checkpoint/blocked_seconds"] = time.perf_counter() - started

    def check(self) -> dict[str, float]:
        """At a step boundary: what has come of the save in flight. Returns checkpoint/* metrics of what happened since
        the last call."""
        self._settle(wait=False)
        metrics, self._metrics = self._metrics, {}
        return metrics

    def holds(self, step: int, *, wait: bool) -> bool:
        """Whether there is a complete checkpoint of this step; without `wait`, or one is on its way. Failures are
        handled as in `save`."""
        if wait:
            self._settle(wait=True)
        return step in (self._complete, self._in_flight)

    def finish(self, progress: Progress) -> None:
        """At the end of the run: on return there is a complete checkpoint of this state. SaveFailed
        regardless of on_save_failure."""
        try:
            self._settle(wait=True)
        except SaveFailed as failure:
            if progress.step == self._complete:
                self._warn(failure)
        if self._complete != progress.step:
            self._start(progress)
            self._settle(wait=True, final=True)

    def wait(self) -> None:
        """At an end that leaves no state worth saving: lets the save in flight come to its own."""
        self._settle(wait=True)

    def awaits(self, step: int) -> None:
        """The weights after `step` training steps are being evaluated: where that ranks checkpoints, theirs is
        not deleted before `measured`."""
        self._awaited = step if self._config.best_metric is not None else None

    def measured(self, step: int, metrics: Mapping[str, float]) -> None:
        """What that has come to, beside what a checkpoint of that step has in its manifest."""
        self._awaited = None
        if step == self._in_flight:
            self._settle(wait=True)
        try:
            kept = manifests.is_checkpoint(self.path(step)) and self._later.add(step, metrics)
        except OSError as error:
            self._warn(SaveFailed(f"what checkpoint {self.path(step)} has come to cannot be kept: {error}"))
            return
        if kept:
            self._thin_out()

    def _start(self, progress: Progress) -> None:
        final = self.path(progress.step)
        try:
            if final.exists():
                # The run was resumed from an earlier step: this one is damaged, or a trainer that was killed completed
                # it as it died.
                directories.remove(final)
            self._later.forget(progress.step)
        except OSError as error:
            raise SaveFailed(f"checkpoint {final} cannot be replaced: {error}") from error
        measured = {name: value for name, value in progress.metrics.items() if math.isfinite(value)}
        extra, files = self._described(progress)
        self._trainer.save_checkpoint(final, extra, measured, files)
        self._in_flight = progress.step

    def _described(self, progress: Progress) -> tuple[dict[str, Any], dict[str, bytes]]:
        """SaveFailed for what no checkpoint can hold, such as metadata of a sample that is no JSON. A manager that died
        or hangs is no matter of this checkpoint alone."""
        try:
            return self._describe(progress)
        except (RunFault, SaveFailed):
            raise
        except RltoolError as error:
            raise SaveFailed(
                f"checkpoint {self.path(progress.step)} was not written: {error}. The checkpoints before it are "
                "untouched"
            ) from error

    def _settle(self, *, wait: bool, final: bool = False) -> None:
        if self._in_flight is None:
            return
        try:
            saved = self._trainer.saved(wait=wait)
        except SaveFailed as failure:
            self._in_flight = None
            if final:
                raise
            self._failed(failure)
            return
        if saved is None:
            return
        self._complete, self._in_flight = self._in_flight, None
        self._metrics |= {"checkpoint/write_seconds": saved.seconds, "checkpoint/bytes": float(saved.bytes)}
        self._console.print(f"checkpoint: {saved.directory}")
        if saved.warning:
            self._console.print(f"warning: {saved.warning}", style="yellow")
        self._thin_out()

    def _failed(self, failure: SaveFailed) -> None:
        if self._config.on_save_failure == "stop":
            raise failure
        self._warn(failure)

    def _warn(self, failure: SaveFailed) -> None:
        self._metrics["checkpoint/failures"] = self._metrics.get("checkpoint/failures", 0.0) + 1
        self._console.print(f"warning: {failure}", style="yellow")

    def _thin_out(self) -> None:
        config = self._config
        if config.keep_last == 0:
            return
        complete = []
        for path in directories.list_checkpoints(self._directory):
            try:
                complete.append(Kept(directories.step_of(path), self._value(path)))
            except (RltoolError, OSError) as error:  # it is just being moved away
                self._console.print(f"warning: checkpoint {path} is not looked at: {error}", style="yellow")
        pointed = directories.pointed_at(self._directory)
        protected = {directories.step_of(pointed)} if pointed is not None else set()
        if self._awaited is not None:
            protected.add(self._awaited)
        going = expendable(
            complete,
            keep_last=config.keep_last,
            keep_best=config.keep_best,
            higher_is_better=config.best_is == "highest",
            protected=protected,
        )
        for step in going:
            try:
                directories.remove_unread(self.path(step))
            except OSError as error:
                self._warn(SaveFailed(f"checkpoint {self.path(step)} cannot be deleted: {error}"))

    def _value(self, path: Path) -> float | None:
        if self._config.best_metric is None:
            return None
        later = self._later.value(directories.step_of(path))
        return later if later is not None else manifests.read(path).metrics.get(self._config.best_metric)
