"""Hugging Face exports of a run: RUN/hf/step_N, of the weights after N training steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from rltool.checkpoints.directory import remove
from rltool.errors import ExportFailed
from rltool.processes.run_directory import RunDirectory


class ExportingTrainer(Protocol):
    """What is asked of training.trainer_group."""

    def save_hf(self, directory: Path) -> None: ...


class HfExports:
    """log: a line for the console. stops: whether one that fails ends the run (checkpoint.on_save_failure)."""

    def __init__(
        self, trainer: ExportingTrainer, run: RunDirectory, log: Callable[[str], None], *, stops: bool = True
    ) -> None:
        self._trainer, self._run, self._log, self._stops = trainer, run, log, stops

    def save(self, step: int, *, final: bool = False) -> None:
        """The present weights, which have `step` training steps. One that cannot be written is ExportFailed, or a
        warning; final: the former whatever is configured."""
        target = self._run.hf_export(step)
        try:
            try:
                remove(target)  # a resumed run does steps again
            except OSError as error:
                raise ExportFailed(f"{target} cannot be replaced: {error.strerror or error}") from error
            self._trainer.save_hf(target)
        except ExportFailed as failure:
            if final or self._stops:
                raise
            self._log(f"warning: {failure}")
        else:
            self._log(f"Hugging Face export: {target}")

    def has(self, step: int) -> bool:
        """Exports appear whole or not at all."""
        return self._run.hf_export(step).exists()
