"""Hugging Face exports of a run: RUN/hf/step_N, of the weights after N training steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from rltool.checkpoints.directory import remove
from rltool.processes.run_directory import RunDirectory


class ExportingTrainer(Protocol):
    """What is asked of training.trainer_group."""

    def save_hf(self, directory: Path) -> None: ...


class HfExports:
    """say: a line for the console."""

    def __init__(self, trainer: ExportingTrainer, run: RunDirectory, say: Callable[[str], None]) -> None:
        self._trainer, self._run, self._say = trainer, run, say

    def save(self, step: int) -> None:
        """The present weights, which have `step` training steps."""
        target = self._run.hf_export(step)
        remove(target)  # a resumed run does steps again
        self._trainer.save_hf(target)
        self._say(f"Hugging Face export: {target}")

    def has(self, step: int) -> bool:
        """Exports appear whole or not at all."""
        return self._run.hf_export(step).exists()
