"""How a weight sync ended."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rltool.errors import EngineError
from rltool.weights.memory import NONE, Memory

Failures = dict[str, str]
"""engine URL -> what went wrong there; empty: all is well"""


class WeightSyncFailed(EngineError):
    """No engine holds the new weights. Names each engine and its reason.

    values_differ: every engine took them and samples something else; trying again does not help.
    """

    def __init__(self, message: str, *, values_differ: bool = False) -> None:
        super().__init__(message)
        self.values_differ = values_differ


@dataclass(frozen=True)
class SyncReport:
    """bytes: of one copy of the weights; seconds by phase: connect, pause, transfer, finish, resume, verify.

    updated: engines that hold the version now; failed: engine -> reason; difference: mean |log-probability difference|
    of the value check over the engines that were checked, None where none was; paused: seconds for which the engine
    that was paused longest stood still; patch_bytes, memory: see SendReport; of the trainer rank that held most.
    sent_bytes: with weights.sharded, of each rank. wake: for which engines that were asleep took their memory back;
    offload: for which the ranks gave theirs away, beside `seconds`.
    """

    version: str
    bytes: int
    seconds: float
    phases: dict[str, float] = field(default_factory=dict)
    updated: tuple[str, ...] = ()
    failed: Failures = field(default_factory=dict)
    difference: float | None = None
    paused: float = 0.0
    patch_bytes: int | None = None
    memory: Memory = NONE
    sent_bytes: tuple[int, ...] = ()
    wake: float = 0.0
    offload: float = 0.0

    def line(self) -> str:
        """One line for the log."""
        phases = " ".join(f"{name} {seconds:.3f}" for name, seconds in self.phases.items())
        total = len(self.updated) + len(self.failed)
        text = (
            f"weights {self.version}: {self.bytes / 1e6:.1f} MB to {len(self.updated)}/{total} engines "
            f"in {self.seconds:.3f} s ({_rate(self.bytes, self.seconds)}; {phases}; "
            f"paused {self.paused:.3f}; holding {self.memory.host / 1e6:.1f} MB on the host and "
            f"{self.memory.device / 1e6:.1f} MB on the GPU)"
        )
        if self.patch_bytes is not None:
            text += f"; patches of {self.patch_bytes / 1e6:.3g} MB"
        if self.difference is not None:
            text += f"; engines agree with the trainer within {self.difference:.1e}"
        return text + "".join(f"\n  {url}: {reason}" for url, reason in self.failed.items())

    def metrics(self) -> dict[str, float]:
        """weights/* and time/sync_seconds."""
        values = {
            "weights/sync_seconds": self.seconds,
            "weights/sync_bytes": float(self.bytes),
            "time/sync_seconds": self.seconds,
        }
        values["weights/paused_seconds"] = self.paused
        values["weights/host_bytes"] = float(self.memory.host)
        values["weights/device_bytes"] = float(self.memory.device)
        values["weights/failed_engines"] = float(len(self.failed))
        if self.patch_bytes is not None:
            values["weights/patch_bytes"] = float(self.patch_bytes)
        if self.sent_bytes:
            values["weights/rank_bytes"] = float(max(self.sent_bytes))
        if self.difference is not None:
            values["weights/logprob_abs_diff_mean"] = self.difference
        return values | {f"weights/{phase}_seconds": seconds for phase, seconds in self.phases.items()}


@contextmanager
def timed(phases: dict[str, float], name: str) -> Iterator[None]:
    """Puts how long the block took into `phases`."""
    started = time.perf_counter()
    try:
        yield
    finally:
        phases[name] = time.perf_counter() - started


def _rate(num_bytes: int, seconds: float) -> str:
    """In a readable unit."""
    per_second = num_bytes / max(seconds, 1e-9)
    return f"{per_second / 1e9:.2f} GB/s" if per_second >= 1e8 else f"{per_second / 1e6:.1f} MB/s"
