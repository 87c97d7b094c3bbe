"""One weight sync, from the driver's side: it joins the engines' control plane and the trainer's sending ranks.

connect (once per membership of the fleet) -> prepare: pause, begin -> send beside receive -> finish -> release, in `finally`.
A version is given to an engine only after all of its bytes are there. The caller hands in two handles that start work and
return futures, so the same code drives Ray actors and, in tests, plain threads.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rltool.engines.dialect import Medium
from rltool.engines.types import Bucket, TensorMeta
from rltool.engines.wire import bucket_bytes, plan_buckets
from rltool.errors import EngineError
from rltool.weights.control import GROUP, Failures
from rltool.weights.disk import bucket_file, version_directory
from rltool.weights.sender import Connection, SendReport, Target


class WeightSyncFailed(EngineError):
    """No engine, or not every engine, holds the new weights. Names each engine and its reason."""


class Future(Protocol):
    def result(self, timeout: float | None = None) -> Any: ...


class ControlHandle(Protocol):
    """WeightControl behind a process boundary: same names, each returns a Future."""

    def targets(self) -> Future: ...
    def epoch(self) -> Future: ...
    def connect(self, connections: Sequence[Connection], medium: Medium) -> Future: ...
    def prepare(self) -> Future: ...
    def receive(self, version: str, buckets: Sequence[Bucket], medium: Medium, paths: Sequence[Path]) -> Future: ...
    def finish(self, version: str, failed: Failures) -> Future: ...
    def release(self) -> Future: ...


class SenderHandle(Protocol):
    """The trainer's ranks: host and join concern rank 0 alone, send is a collective of all."""

    def weight_metadata(self) -> list[TensorMeta]: ...
    def host(self, targets: Sequence[Target], group: str) -> list[Connection]: ...
    def join(self) -> Future: ...
    def send(self, buckets: Sequence[Bucket], skip: Collection[str]) -> Future: ...
    def write(self, buckets: Sequence[Bucket], directory: Path) -> Future: ...


@dataclass(frozen=True)
class SyncReport:
    """bytes: of one copy of the weights; seconds by phase: connect, pause, transfer, finish, resume."""

    version: str
    bytes: int
    seconds: float
    phases: dict[str, float] = field(default_factory=dict)
    engines_ok: int = 0
    engines_total: int = 0
    rebuilt: bool = False
    """The transfer group is new: values must be checked, because a new group is where silent failures live."""

    def line(self) -> str:
        """One line for the log."""
        phases = " ".join(f"{name} {seconds:.3f}" for name, seconds in self.phases.items())
        return f"weights {self.version}: {self.bytes / 1e6:.1f} MB to {self.engines_ok}/{self.engines_total} engines in {self.seconds:.3f} s ({self.bytes / 1e9 / max(self.seconds, 1e-9):.2f} GB/s; {phases})"


class WeightSync:
    """The driver's end. `timeout`: seconds for each step; the deadline of a step is also kept by those who execute it."""

    def __init__(self, control: ControlHandle, trainer: SenderHandle, *, medium: Medium, limit_bytes: int, timeout: float, disk_root: Path | None = None) -> None:
        if medium not in ("gloo", "disk"):
            raise EngineError(f"weight transport {medium!r} is not built yet; use gloo or disk")
        self.control = control
        self.trainer = trainer
        self.medium = medium
        self.timeout = timeout
        self.disk_root = disk_root
        self.buckets = plan_buckets(trainer.weight_metadata(), limit_bytes)
        self._epoch: int | None = None

    def sync(self, version: str) -> SyncReport:
        """Bring every engine to `version`. Raises WeightSyncFailed, with the engines resumed, if one of them is left behind."""
        started = time.perf_counter()
        phases: dict[str, float] = {}
        failures: Failures = {}
        rebuilt = False
        if self.control.epoch().result(self.timeout) != self._epoch:
            with _timed(phases, "connect"):
                failures.update(self._connect())
            rebuilt = True
        total = len(self.control.targets().result(self.timeout))
        try:
            with _timed(phases, "pause"):
                failures.update(self.control.prepare().result(2 * self.timeout))
            with _timed(phases, "transfer"):
                failures.update(self._transfer(version, failures))
            with _timed(phases, "finish"):
                failures.update(self.control.finish(version, failures).result(2 * self.timeout))
        finally:
            with _timed(phases, "resume"):
                failures.update(self.control.release().result(2 * self.timeout))
        if failures or not total:
            self._epoch = None
            raise WeightSyncFailed(self._explain(version, failures, total))
        return SyncReport(version, sum(map(bucket_bytes, self.buckets)), time.perf_counter() - started, phases, total, total, rebuilt)

    def _connect(self) -> Failures:
        targets = self.control.targets().result(self.timeout)
        if self.medium == "disk":
            connections = [Connection(target, "", 0, GROUP) for target in targets]
            failures = self.control.connect(connections, self.medium).result(2 * self.timeout)
        else:
            connections = self.trainer.host(targets, GROUP)
            joining = self.trainer.join()
            answered = self.control.connect(connections, self.medium).result(3 * self.timeout)
            # What the engine says of its failure is nearer to the cause than our waiting for it in vain.
            failures = {**joining.result(2 * self.timeout), **answered}
        if failures:
            raise WeightSyncFailed(self._explain("(connecting)", failures, len(targets)))
        self._epoch = self.control.epoch().result(self.timeout)
        return failures

    def _transfer(self, version: str, failed: Failures) -> Failures:
        if self.medium == "disk":
            assert self.disk_root is not None
            directory = version_directory(self.disk_root, version)
            self.trainer.write(self.buckets, directory).result(self.timeout)
            paths = [bucket_file(directory, i, len(self.buckets)) for i in range(len(self.buckets))]
            return self.control.receive(version, self.buckets, self.medium, paths).result(3 * self.timeout)
        receiving = self.control.receive(version, self.buckets, self.medium, [])
        sent: SendReport = self.trainer.send(self.buckets, list(failed)).result(3 * self.timeout)
        return {**sent.failures, **receiving.result(3 * self.timeout)}

    @staticmethod
    def _explain(version: str, failures: Failures, total: int) -> str:
        if not failures:
            return f"weights {version}: no engine is there to receive them"
        lines = "\n".join(f"  {url}: {reason}" for url, reason in failures.items())
        return f"weights {version} did not reach {len(failures)} of {total} engines:\n{lines}\nIf an engine has died, its log tells why (`rltool logs`); `rltool engines resume` frees engines that stayed paused."


class _timed:
    def __init__(self, phases: dict[str, float], name: str) -> None:
        self.phases, self.name = phases, name

    def __enter__(self) -> None:
        self.started = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        self.phases[self.name] = time.perf_counter() - self.started
