"""monitor.profile_steps and monitor.memory_snapshot: which steps are recorded, on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from rltool.config.sections import MonitorConfig
from rltool.config.train import TrainConfig
from rltool.errors import UsageError


class RecordedTrainer(Protocol):
    """What is asked of the trainer's ranks; each writes a file of its own."""

    def start_profile(self) -> None: ...

    def stop_profile(self, directory: Path, name: str) -> list[Path]: ...

    def start_memory(self) -> None: ...

    def stop_memory(self, directory: Path, name: str) -> list[Path]: ...


def check_recording(config: TrainConfig, device: str, first_step: int) -> None:
    """UsageError for steps that this run will not make, and for a memory snapshot without CUDA."""
    monitor, steps = config.monitor, config.steps
    if monitor.memory_snapshot is not None and device != "cuda":
        raise UsageError(
            "monitor.memory_snapshot (--memory-snapshot) records CUDA's allocator, and the trainer runs on the CPU; "
            "use --profile-steps there"
        )
    asked = {"monitor.profile_steps (--profile-steps)": monitor.profiled}
    if monitor.memory_snapshot is not None:
        asked["monitor.memory_snapshot (--memory-snapshot)"] = range(
            monitor.memory_snapshot, monitor.memory_snapshot + 1
        )
    for setting, wanted in asked.items():
        if wanted and (wanted.start < first_step or wanted.stop > steps):
            raise UsageError(
                f"{setting}: steps {wanted.start} to {wanted.stop - 1} are not all among those that this run makes, "
                f"{first_step} to {steps - 1} (the first of a run is 0)"
            )


class StepRecording:
    """Starts and ends the recordings around the steps that were asked for."""

    def __init__(
        self, config: MonitorConfig, trainer: RecordedTrainer, directory: Path, log: Callable[[str], None]
    ) -> None:
        self._config = config
        self._trainer = trainer
        self._directory = directory
        self._log = log
        self._profiling = False
        self._last = 0

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """One step. A step that fails ends its recordings, and their files are written."""
        profiled, snapshot = self._config.profiled, step == self._config.memory_snapshot
        if profiled and step == profiled.start:
            self._trainer.start_profile()
            self._profiling = True
        if snapshot:
            self._trainer.start_memory()
        good = False
        try:
            yield
            good = True
        finally:
            if snapshot:
                self._told("memory snapshot", self._trainer.stop_memory(self._directory, f"memory_step_{step}"))
            self._last = step
            if not good or step == profiled.stop - 1:
                self.close()

    def close(self) -> None:
        """Writes the profile of a run that ended before its last profiled step."""
        if self._profiling:
            self._profiling = False
            name = f"steps_{self._config.profiled.start}_to_{self._last}"
            self._told("profile", self._trainer.stop_profile(self._directory, name))

    def _told(self, what: str, paths: list[Path]) -> None:
        self._log(f"{what}: {', '.join(map(str, paths))}")
