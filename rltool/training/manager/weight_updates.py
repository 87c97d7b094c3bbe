"""When the engines get weights: as the driver asks after each step, and, for engines that have missed a sync, while it
waits for a batch and the ranks are idle. One sync at a time. Then, too, engines and ranks are compared."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial

from rltool.engines.fleet.engine_set import EngineSet
from rltool.engines.fleet.fleet import Member, State
from rltool.errors import EngineError, RltoolError
from rltool.processes.tasks import Background
from rltool.rollout.collector import CollectionInterrupted
from rltool.rollout.serving.guard import EngineGuard
from rltool.rollout.serving.lease import EngineLeases
from rltool.rollout.serving.monitor import FleetMonitor
from rltool.rollout.serving.versions import VersionBook
from rltool.weights.adapter_sync import AdapterSync
from rltool.weights.sync import WeightSync
from rltool.weights.sync_report import Failures, SyncReport, WeightSyncFailed
from rltool.weights.verify.comparison import Comparison
from rltool.weights.verify.verdict import Verdict

RESYNC_SECONDS = 0.5
"""How often a manager whose trainer waits for a batch looks for engines that a sync has left STALE."""


@dataclass(frozen=True)
class Oversight:
    """What watches over the engines of one model: their health, whose they are, whether enough of them are left."""

    monitor: FleetMonitor
    leases: EngineLeases
    guard: EngineGuard


class WeightUpdates:
    """check_all: values of every engine are compared at each sync of the driver's. is_stopping: asked while no engine
    is there to sync."""

    def __init__(
        self, engines: EngineSet, oversight: Oversight, sync: WeightSync | AdapterSync, comparison: Comparison,
        book: VersionBook, *, check_all: bool, is_stopping: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._fleet, self._log, self.trainer, self._lock = engines.fleet, engines.log, sync.trainer, sync.trainer.lock
        self._monitor, self._leases, self._guard = oversight.monitor, oversight.leases, oversight.guard
        self._sync, self._comparison, self._book = sync, comparison, book
        self._check_all, self._is_stopping = check_all, is_stopping
        self._asked: list[_Asked] = []
        self._wake = asyncio.Event()
        self._differed = False
        """The values of all engines, in the attempt before."""

    async def update(self, step: int) -> SyncReport:
        """Bring the engines to the weights after `step` training steps. While there is none that takes them, it is
        tried again: GenerationLost when that has lasted too long, CollectionInterrupted when the run is stopping.

        WeightSyncFailed where all engines sample something else than the trainer twice in a row; once may be an engine
        that was started again between its update and the comparison.
        """
        while (report := await self.attempt(step)) is None:
            # All have just died, or one is being started again.
            await asyncio.sleep(self._fleet.policy.probe_seconds)
            self._guard.check()
            if self._is_stopping():
                raise CollectionInterrupted(f"the sync of step {step} found no engine, and the run is stopping")
        for url, reason in report.failed.items():
            self._log(f"weights {report.version} did not reach {url}: {reason}")
        return report

    async def attempt(self, step: int) -> SyncReport | None:
        """`update`, once: None when no engine took the weights, for reasons that may pass."""
        may_differ, self._differed = not self._differed, False
        async with self._lock:
            version = self._book.begin(step)
            try:
                report = await self._leases.synced(partial(self._sync.sync, version, check_all=self._check_all))
            except WeightSyncFailed as error:
                if error.values_differ and not may_differ:
                    raise
                self._differed = error.values_differ
                self._log(str(error))
                return None
            finally:
                await self._monitor.carry_out()
            self._book.publish(step)
            return report

    async def resync(self) -> bool:
        """Engines that are STALE take the weights that were published last, which the ranks have to hold. Returns
        whether all did; raises what a rank raises."""
        stale = {url for url in self._fleet.syncable() if self._fleet.member(url).state is State.STALE}
        if not stale or self._book.published is None:
            return True
        async with self._lock:
            version = self._book.lineage.version(self._book.published)
            try:
                report = await self._leases.synced(partial(self._sync.sync, version, only=stale))
            except EngineError as error:
                self._log(str(error))
                return False
            finally:
                await self._monitor.carry_out()
        self._log(report.line())
        return not report.failed

    @asynccontextmanager
    async def stale_engines_meanwhile(self) -> AsyncIterator[None]:
        """Inside the block the ranks are idle: engines that are STALE take the present weights, and comparisons that
        were asked for are made. When it ends, none of these runs any more."""
        background = Background(lambda failure: self._log(str(failure)))
        background.keep(self._resync_stale(), "engines that are STALE are synced no more")
        try:
            yield
        finally:
            async with self._lock:  # a sync of its own is never cancelled half-way
                await background.close()
                await self._compare_as_asked()  # where batches are always ready there is no other moment

    async def compare(self, urls: Sequence[str]) -> dict[str, Verdict]:
        """Do these engines hold the present weights? Answered when the ranks are idle next, while the driver waits for
        a batch. One that does not serve holds others, or unknown ones."""
        asked = _Asked(urls, asyncio.get_running_loop().create_future())
        self._asked.append(asked)
        self._wake.set()
        return await asked.answer

    async def leave_engine(self, url: str) -> None:
        """One engine leaves the run, and its transfer group."""
        try:
            await self._sync.leave_engine(url)
        finally:
            await self._leases.release(url)

    async def leave(self) -> Failures:
        """At the end of the run, see WeightSync.leave."""
        for asked in self._asked:
            asked.settle(RltoolError("the run ended before its trainer was idle, so no weights were compared"))
        async with self._lock:
            return await self._sync.leave(lost=self._leases.lost)

    # -- the rest is private

    async def _resync_stale(self) -> None:
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), RESYNC_SECONDS)
            async with self._lock:
                await self._compare_as_asked()
            try:
                reached = await self.resync()
            except Exception as error:  # of a rank: the driver meets it by itself
                self._log(str(error) if isinstance(error, RltoolError) else f"{type(error).__name__}: {error}")
                reached = False
            if not reached:
                await asyncio.sleep(self._fleet.policy.probe_seconds)

    async def _compare_as_asked(self) -> None:
        """With the lock held."""
        self._wake.clear()
        while self._asked:
            asked = self._asked.pop(0)
            there = [member for member in map(self._fleet.find, asked.urls) if member is not None]  # one may have left
            serving = [member for member in there if member.state is State.READY]
            try:
                verdicts = await self._comparison.compare(serving)
                asked.settle({member.url: verdicts.get(member.url) or _not_serving(member) for member in there})
            except Exception as error:  # of a rank: the driver meets it by itself
                asked.settle(error)


def _not_serving(member: Member) -> Verdict:
    return Verdict(False, [f"it is {member.state.value}: {member.reason}"])


@dataclass(frozen=True)
class _Asked:
    """A comparison that a caller waits for."""

    urls: Sequence[str]
    answer: asyncio.Future[dict[str, Verdict]]

    def settle(self, outcome: dict[str, Verdict] | Exception) -> None:
        if self.answer.done():  # no caller waits any more
            return
        if isinstance(outcome, Exception):
            self.answer.set_exception(outcome)
        else:
            self.answer.set_result(outcome)
