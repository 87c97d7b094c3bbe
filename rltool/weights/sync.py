"""One weight sync, whole: a coroutine that drives the engines over HTTP and awaits the trainer's ranks.

connect (engines that are new or whose connection failed) -> open -> send beside `EngineUpdate.update` of each engine ->
resume, in `finally` -> value check of new connections. What happens at one engine is in engine_update.py. It runs where
the fleet and the HTTP client live, the one owner of the control plane.

- Once the ranks have sent everything, each engine is finished and goes on when it has taken what is its own: one that
  is near does not stand still for one that fetches from far. New requests go there when the sync has ended.
- A version is given to an engine only after all of its bytes are there, and its prefix cache is dropped.
- Each engine's failure is its own: it is a line of `SyncReport.failed`, the fleet has the engine STALE, the others go
  on. Only a sync that reaches no engine raises.
- An engine whose connection is new serves only after its values were compared: it is resumed, but PAUSED in the fleet,
  is sampled directly, and the ranks score its tokens.
- Engines that are asleep, on the trainer's own GPUs, wake up in it (weights/sleep.py): their weights where others
  are paused, their caches where others are resumed. Meanwhile the ranks hold their parameters there and nothing else.
- The coroutine ends only when every rank's `send` has ended: Ray runs a rank's methods one after another, so an
  abandoned send would hold up the next training step. It is not to be cancelled; its deadlines end it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from rltool.config.rollout import WeightsConfig
from rltool.engines.fleet.engine_set import EngineSet
from rltool.engines.transfer.wire import bucket_bytes
from rltool.engines.types import Bucket
from rltool.engines.weight_version import WeightVersion
from rltool.processes import garbage
from rltool.processes.tasks import beside
from rltool.weights.connections import Connections, Trainer
from rltool.weights.engine_calls import EngineCalls
from rltool.weights.engine_update import EngineUpdate, SyncPlan
from rltool.weights.send.sender import SendReport
from rltool.weights.sleep import SharedGpus
from rltool.weights.sync_report import Failures, SyncReport, WeightSyncFailed, timed
from rltool.weights.verify.values import ValueCheck


@dataclass(frozen=True)
class SyncDeadlines:
    """Seconds for each step at an engine (deadlines.sync), and for it to take one bucket (a quarter of that)."""

    step: float
    bucket: float


class WeightSync:
    """gpus: that engines and ranks use in turns, None: each has its own. withdraw: takes back the requests at engines
    that have left service, before those whose update failed go on with what they have kept."""

    def __init__(
        self, engines: EngineSet, trainer: Trainer, config: WeightsConfig, check: ValueCheck, deadlines: SyncDeadlines,
        *, gpus: SharedGpus | None = None, withdraw: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.fleet, self.trainer, self.ranks = engines.fleet, trainer, trainer.ranks
        self.config, self.check, self.gpus = config, check, gpus
        self._bucket_deadline, self._withdraw = deadlines.bucket, withdraw
        self.calls = EngineCalls(engines, deadlines.step)
        self.connections = Connections(self.calls, trainer, config, shares_gpus=gpus is not None)
        self._buckets: list[Bucket] = []
        self._updates: list[EngineUpdate] = []  # of the sync that runs

    async def sync(
        self, version: WeightVersion, *, check_all: bool = False, only: Collection[str] | None = None
    ) -> SyncReport:
        """Bring every engine that takes weights, and can be paused now, to `version`.

        only: these engines, which missed the version; the others go on serving. check_all: compare values of every
        engine, not of new connections alone. Raises WeightSyncFailed when no engine took the weights, and what a
        rank raises; every engine that was paused has been resumed, and none is PAUSED in the fleet.
        """
        with garbage.paused():
            self._updates = []
            if self.gpus is None:
                return await self._sync(version, check_all=check_all, only=only)
            async with self.gpus.in_a_sync(self.fleet, self._awake):
                report = await self._sync(version, check_all=check_all, only=only)
            return replace(report, offload=self.gpus.offload_seconds)

    def _awake(self) -> set[str]:
        return {update.url for update in self._updates if not update.is_asleep}

    async def _sync(self, version: WeightVersion, *, check_all: bool, only: Collection[str] | None) -> SyncReport:
        started, phases = time.perf_counter(), dict[str, float]()
        urls = [url for url in self.fleet.syncable() if only is None or url in only]
        if not urls:
            raise WeightSyncFailed(self._explain(version, {}))
        if not self._buckets:
            self._buckets = self.ranks.plan.buckets(self.config.bucket_bytes)
        updates = self._updates = self._plan(version, urls)
        with timed(phases, "connect"):
            new = await self._connect(updates)
        there = [update for update in updates if update.failure is None]
        sent: SendReport | None = None
        try:
            try:
                early = [update for update in there if not update.generates_on]
                for update in early:
                    self.fleet.pause(update.url)
                with timed(phases, "pause"):
                    await _side_by_side(update.attempt(update.open()) for update in early)
                began = time.perf_counter()
                sent = await self._transfer(version, [u for u in there if u.is_paused or u.generates_on])
                finished = time.perf_counter()
                received = [update.received_at for update in there if update.received_at is not None]
                phases["transfer"] = max([began, *received]) - began
                phases["finish"] = finished - began - phases["transfer"]
                if any(update.is_paused for update in there):
                    self.fleet.advance(version)
            except BaseException as error:
                _fail_all(there, error)
                raise
            finally:
                self._withdraw()
                with timed(phases, "resume"):
                    frozen = [update for update in there if update.paused_at is not None and not update.goes_on]
                    await _side_by_side(update.attempt(update.resume()) for update in frozen)
            with timed(phases, "verify"):
                to_check = [update for update in there if update.is_paused and (check_all or update.url in new)]
                difference = await self._verify(to_check)
        except BaseException as error:
            _fail_all(there, error)
            raise
        updated = [update for update in there if update.is_paused]
        for update in updated:
            self.fleet.resume(update.url)
        failed = [update for update in updates if update.failure is not None]
        failures = {update.url: update.failure for update in failed if update.failure is not None}
        if not updated:
            differ = bool(failed) and all(update.differs for update in failed)
            raise WeightSyncFailed(self._explain(version, failures), values_differ=differ)
        assert sent is not None, "what was updated was sent"
        return SyncReport(
            str(version), sum(map(bucket_bytes, self._buckets)), time.perf_counter() - started, phases,
            tuple(update.url for update in updated), failures, difference,
            max(update.paused_seconds for update in updates), sent.patch_bytes, sent.memory,
            sent.sent_bytes, wake=max(update.wake_seconds for update in updates),
        )  # fmt: skip

    async def leave_engine(self, url: str) -> None:
        """One engine leaves the run: out of its transfer group. Not in the middle of a sync that it takes part in.
        Raises EngineError."""
        await self.connections.leave_engine(url)

    async def leave(self, *, lost: Collection[str] = ()) -> Failures:
        """At the end of the run: engines resumed and out of their transfer groups. Failures are returned.

        lost: engines that another run controls by now, whose group would be the one shut down.
        """
        return await self.connections.leave(lost)

    # -- the rest is private

    def _plan(self, version: WeightVersion, urls: Sequence[str]) -> list[EngineUpdate]:
        plan = SyncPlan(
            version, self._buckets, self.config.pause_mode, self._bucket_deadline, self.calls, self.connections,
            self.ranks, self.gpus,
        )  # fmt: skip
        members = [self.fleet.find(url) for url in urls]
        return [EngineUpdate(member, plan) for member in members if member is not None]

    async def _connect(self, updates: Sequence[EngineUpdate]) -> set[str]:
        """Returns the engines whose connections are new."""
        new, errors = await self.connections.connect([update.engine for update in updates])
        # Requests and probes go on until the pause: an engine may have failed them while others were connected.
        there = set(self.fleet.syncable())
        for update in updates:
            engine = self.fleet.find(update.url)
            update.took += self.connections.seconds.get(update.url, 0.0)
            if update.url in errors:
                update.failed(errors[update.url])
            elif update.url not in there:
                update.fail(engine.reason if engine is not None else "it has left the run")
            else:
                update.connected(self.connections[update.url])
        return new

    async def _transfer(self, version: WeightVersion, updates: Sequence[EngineUpdate]) -> SendReport | None:
        """The ranks send, and each engine receives, has the version and goes on at its own pace."""
        if not updates:
            return None
        urls = [update.url for update in updates]
        async with beside(self.ranks.send(str(version), urls)) as (sending,):
            receive = _side_by_side(update.attempt(update.update(sending)) for update in updates)
            async with beside(receive) as (receiving,):
                try:
                    sent = await sending
                finally:
                    await receiving
        for update in updates:
            if update.url in sent.failures:  # its own reason comes first
                update.fail(sent.failures[update.url], own=True)
        return sent

    async def _verify(self, updates: Sequence[EngineUpdate]) -> float | None:
        """The value check: engines sample, the ranks score. An engine that differs is that engine's failure."""
        if not updates:
            return None
        request = self.check.request()
        await _side_by_side(update.attempt(update.sample(request)) for update in updates)
        sampled = {update: update.completion for update in updates}
        completions = {update: found for update, found in sampled.items() if found is not None}
        if not completions:
            return None
        batch = self.check.batch(request, list(completions.values()))
        infos = {update.url: update.engine.info for update in completions}
        result = self.check.compare(infos, batch, await self.ranks.logprobs(batch))
        for update in completions:
            if update.url in result.failed:
                update.differs = True
                update.fail(result.failed[update.url])
        return result.mean

    def _explain(self, version: WeightVersion, failures: Failures) -> str:
        if not failures:
            states = "".join(f"\n  {m.url}: {m.state.value} ({m.reason})" for m in self.fleet.members())
            return f"weights {version}: no engine is there to receive them{states}"
        lines = "\n".join(f"  {url}: {reason}" for url, reason in failures.items())
        return (
            f"weights {version} reached none of {len(failures)} engines:\n{lines}\n"
            "If an engine has died, see its log (`rltool logs`); "
            "`rltool engines resume` frees engines that stayed paused."
        )


async def _side_by_side(steps: Iterable[Awaitable[None]]) -> None:
    """All of them to their end; then what one has raised, which is a bug of ours and no engine's failure."""
    for result in await asyncio.gather(*steps, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


def _fail_all(updates: Sequence[EngineUpdate], error: BaseException) -> None:
    """Of a rank, or a bug: nothing vouches for what these engines hold."""
    for update in updates:
        if update.is_paused:
            update.fail(f"the sync ended with {type(error).__name__}: {error}")
