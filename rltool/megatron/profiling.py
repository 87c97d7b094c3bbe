"""One rank's profiler trace and memory snapshot, each started and ended from outside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

MAX_EVENTS = 1_000_000
"""Allocations and frees that a memory snapshot remembers."""


class Recorder:
    """At most one profile and one memory recording at a time. Start and stop come from the thread that trains."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._profiler: Any = None

    def start_profile(self) -> None:
        """CPU operators, and CUDA kernels where CUDA is."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities, record_shapes=True)
        self._profiler.start()

    def stop_profile(self, directory: Path, name: str) -> Path:
        """Writes a trace for chrome://tracing or Perfetto. Returns its path."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{name}_rank{self._rank}.json.gz"
        profiler.export_chrome_trace(str(path))
        return path

    def start_memory(self) -> None:
        torch.cuda.memory._record_memory_history(max_entries=MAX_EVENTS)

    def stop_memory(self, directory: Path, name: str) -> Path:
        """Writes a snapshot for pytorch.org/memory_viz, a pickle of torch's that nothing of ours reads; its path."""
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{name}_rank{self._rank}.pickle"
        torch.cuda.memory._dump_snapshot(str(path))
        torch.cuda.memory._record_memory_history(enabled=None)
        return path
