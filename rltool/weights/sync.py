"""One weight sync, whole: a coroutine that drives the engines over HTTP and awaits the trainer's ranks.

connect (engines that are new or whose connection failed) -> pause, begin -> send beside receive -> finish -> resume, in
`finally` -> value check of new connections. Engines that can have the bytes before they load them (disk, delta, staged)
generate until they have them: send, prefetch -> pause, begin -> receive -> finish. Where a transport can, pause, begin
and receive are one request. It runs where the fleet and the HTTP client live, the one owner of the control plane.

- Once the ranks have sent everything, each engine is finished and goes on when it has taken what is its own: one that
  is near does not stand still for one that fetches from far. New requests go there when the sync has ended.
- A version is given to an engine only after all of its bytes are there, and its prefix cache is dropped.
- Each engine's failure is its own: it is a line of `SyncReport.failed`, the fleet has the engine STALE, the others go
  on. Only a sync that reaches nobody raises.
- An engine whose connection is new serves only after its values were compared: it is resumed, but PAUSED in the fleet,
  is sampled directly, and the ranks score its tokens.
- Engines that are asleep, on the trainer's own GPUs, wake up in it (weights/residency.py): their weights where others
  are paused, their caches where others are resumed. Meanwhile the ranks hold their parameters there and nothing else.
- The coroutine ends only when every rank's `send` has ended: Ray runs a rank's methods one after another, so an
  abandoned send would hold up the next training step. It is not to be cancelled; its deadlines end it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

from rltool.config.rollout import WeightsConfig
from rltool.engines import supported
from rltool.engines.dialect import PauseMode
from rltool.engines.dialects import controls
from rltool.engines.disaggregation import generate_at
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.engine_set import EngineSet
from rltool.engines.fleet import Member, State
from rltool.engines.resume import TRANSFER_GROUP as GROUP
from rltool.engines.types import Bucket, Completion, HttpRequest
from rltool.engines.weight_version import WeightVersion
from rltool.engines.wire import bucket_bytes
from rltool.errors import EngineError
from rltool.processes import garbage
from rltool.processes.tasks import beside
from rltool.weights.connections import STEP_SHARE, Connections, Trainer
from rltool.weights.engine_calls import Act, EngineCalls
from rltool.weights.liveness import CHECKS_MISSED
from rltool.weights.memory import NONE
from rltool.weights.residency import SharedGpus
from rltool.weights.sender import SendReport
from rltool.weights.sync_report import Failures, SyncReport, WeightSyncFailed, timed
from rltool.weights.transport import OneRequestControl, PausingControl, ReceiverControl, Rendezvous
from rltool.weights.verify import ValueCheck

REASON_SECONDS = 5.0
"""For an engine that the ranks have given up to say what is wrong: that is nearer to the cause than what they saw."""
WITHDRAW_SECONDS = 5.0
"""For a request that is given up to have ended here, before the engine is asked to leave its group and to resume."""


@dataclass(frozen=True)
class SyncDeadlines:
    """Seconds for each step at an engine (deadlines.sync_step), and for it to take one bucket (deadlines.bucket)."""

    step: float
    bucket: float


class WeightSync:
    """gpus: that engines and ranks use in turns, None: each has its own. withdraw: takes back the requests at engines
    that have left service, before those whose update failed go on with what they have kept."""

    def __init__(
        self,
        engines: EngineSet,
        trainer: Trainer,
        config: WeightsConfig,
        check: ValueCheck,
        deadlines: SyncDeadlines,
        *,
        gpus: SharedGpus | None = None,
        withdraw: Callable[[], None] = lambda: None,
    ) -> None:
        self.client, self.fleet, self.trainer, self.ranks = engines.client, engines.fleet, trainer, trainer.ranks
        self.config, self.check, self.bucket_deadline, self.gpus = config, check, deadlines.bucket, gpus
        self._withdraw = withdraw
        self.calls = EngineCalls(engines, deadlines.step)
        self.connections = Connections(self.calls, trainer, config, shares_gpus=gpus is not None)
        self._members: dict[str, Member] = {}  # of the fleet, when this sync began
        self._buckets: list[Bucket] = []
        self._differing: set[str] = set()  # engines whose values differed, in this sync
        self._paused_at: dict[str, float] = {}  # engines that were told to stand still in this sync, and when
        self._pauses: dict[str, float] = {}  # of these: seconds until they went on
        self._resumed: set[str] = set()  # of these: they generate again
        self._received: dict[str, float] = {}  # of these: when they had all that the ranks have sent
        self._controls: dict[str, ReceiverControl] = {}  # of these, also when their connections are lost
        self._begun: set[str] = set()  # of these: whose weights are a mixture until their update is finished
        self._asleep: set[str] = set()  # engines that this sync wakes up, until they are awake
        self._has_weights: set[str] = set()  # of these: there is room for their weights again
        self._patch_bytes: int | None = None  # of this sync
        self._memory = NONE  # of this sync, in the ranks

    async def sync(
        self, version: WeightVersion, *, check_all: bool = False, only: Collection[str] | None = None
    ) -> SyncReport:
        """Bring every engine that takes weights, and can be paused now, to `version`.

        only: these engines, which missed the version; the others go on serving. check_all: compare values of every
        engine, not of new connections alone. Raises WeightSyncFailed when no engine took the weights, and whatever a
        rank raises; every engine that was paused has been told to resume all the same, and none is PAUSED in the fleet.
        """
        with garbage.paused():
            self._asleep = {member.url for member in self.fleet.members() if member.state is State.ASLEEP}
            if self.gpus is None:
                return await self._sync(version, check_all=check_all, only=only)
            async with self.gpus.parameters():
                try:
                    return await self._sync(version, check_all=check_all, only=only)
                finally:
                    for url in self._asleep:
                        await self.gpus.end(url, "it did not wake up")

    async def _sync(self, version: WeightVersion, *, check_all: bool, only: Collection[str] | None) -> SyncReport:
        started = time.perf_counter()
        phases: dict[str, float] = {}
        self._patch_bytes, self._memory = None, NONE
        self.calls.silent, self._differing, self._has_weights = set(), set(), set()
        self._paused_at, self._pauses, self._received = {}, {}, {}
        self._controls, self._begun, self._resumed = {}, set(), set()
        self._members = {member.url: member for member in self.fleet.members()}
        urls = [url for url in self.fleet.syncable() if only is None or url in only]
        if not urls:
            raise WeightSyncFailed(self._explain(str(version), {}))
        if not self._buckets:
            self._buckets = self.ranks.plan.buckets(self.config.bucket_bytes)
        with timed(phases, "connect"):
            new, failures = await self.connections.connect(self._at(urls))
        # Requests and probes go on until the pause: an engine may have failed them while others were connected.
        there = self.fleet.syncable()
        failures |= {url: self.fleet.member(url).reason for url in urls if url not in there and url not in failures}
        paused = [url for url in urls if url not in failures]
        late = [url for url in paused if self._generates_on(url)]
        early = [url for url in paused if url not in late]
        for url in failures:
            self._lost(url, failures[url])
        try:
            try:
                for url in early:
                    self.fleet.pause(url)
                with timed(phases, "pause"):
                    failures |= await self._each(early, self._pause_and_begin)
                began = time.perf_counter()
                failures |= await self._transfer(version, [*self._paused(early), *late])
                finished = time.perf_counter()
                phases["transfer"] = max([began, *self._received.values()]) - began
                phases["finish"] = finished - began - phases["transfer"]
                if self._paused(paused):
                    self.fleet.advance(version)
            except BaseException as error:
                self._lost_all(paused, error)
                raise
            finally:
                self._withdraw()
                with timed(phases, "resume"):
                    # The first failure of an engine is the one to report.
                    failures = await self._resume([u for u in self._paused_at if u not in self._resumed]) | failures
            to_check = [url for url in self._paused(paused) if check_all or url in new]
            with timed(phases, "verify"):
                checked, difference = await self._verify(to_check)
        except BaseException as error:
            self._lost_all(paused, error)
            raise
        failures |= checked
        updated = tuple(self._paused(paused))
        for url in updated:
            self.fleet.resume(url)
        if not updated:
            raise WeightSyncFailed(
                self._explain(str(version), failures), values_differ=failures.keys() == self._differing
            )
        size = sum(map(bucket_bytes, self._buckets))
        seconds, paused = time.perf_counter() - started, max(self._pauses.values(), default=0.0)
        return SyncReport(
            str(version), size, seconds, phases, updated, failures, difference, paused, self._patch_bytes, self._memory
        )

    async def leave_engine(self, url: str) -> None:
        """One engine leaves the run: out of its transfer group. Not in the middle of a sync that it takes part in.
        Raises EngineError."""
        await self.connections.leave_engine(url)

    async def leave(self, *, ceded: Collection[str] = ()) -> Failures:
        """At the end of the run: engines resumed and out of their transfer groups. Failures are returned.

        ceded: engines that another run controls by now, whose group would be the one shut down.
        """
        return await self.connections.leave(ceded)

    # -- steps

    async def _pause_and_begin(self, endpoint: EngineEndpoint) -> None:
        url = endpoint.url
        self._paused_at[url], self._controls[url] = time.perf_counter(), self.connections[url].control
        if self._in_one_request(url) is not None:  # which `_take` sends
            self._begin(url)
            return
        await self.calls.run(endpoint, self._stop(endpoint))
        self._has_weights.add(url)
        self._require_paused(url)
        self._begin(url)
        await self.calls.run(endpoint, self._controls[url].begin())

    def _begin(self, url: str) -> None:
        self.fleet.update_began(url)
        self._begun.add(url)

    async def _transfer(self, version: WeightVersion, urls: Sequence[str]) -> Failures:
        """The ranks send, and each engine receives, bears the version and goes on at its own pace."""
        if not urls:
            return {}
        async with beside(self.ranks.send(str(version), urls)) as (sending,):
            receive = self._each(urls, lambda endpoint: self._update(endpoint, version, sending))
            async with beside(receive) as (receiving,):
                try:
                    sent = await sending
                    self._patch_bytes, self._memory = sent.patch_bytes, sent.memory
                finally:
                    received = await receiving
        for url, reason in sent.failures.items():
            if url not in received:
                self._lost(url, reason)
        return sent.failures | received

    async def _update(
        self, endpoint: EngineEndpoint, version: WeightVersion, sending: asyncio.Future[SendReport]
    ) -> None:
        url = endpoint.url
        await self._receive(endpoint, str(version), sending)
        await asyncio.wait((sending,))
        if _lost_by_the_ranks(url, sending) is not None:
            return  # what it has taken may not be the weights; the ranks' reason is reported
        self._received[url] = time.perf_counter()
        await self._finish(endpoint, version)
        is_half_of_a_pair = endpoint.role != "regular"  # the other half may still generate with older weights
        if url not in self._resumed and not is_half_of_a_pair:
            await self._resume_one(endpoint)
            self._resumed.add(url)

    async def _receive(self, endpoint: EngineEndpoint, version: str, sending: asyncio.Future[SendReport]) -> None:
        """The engine takes every bucket, in order. One that fails is aborted at the trainer, and told to leave its
        group: neither waits for the other any more, nor do the other engines."""
        url = endpoint.url
        try:
            async with beside(self._take(endpoint, version, sending), grace=WITHDRAW_SECONDS) as (taking,):
                await asyncio.wait((taking, sending), return_when=asyncio.FIRST_COMPLETED)
                if not taking.done() and (lost := _lost_by_the_ranks(url, sending)) is not None:
                    await asyncio.wait((taking,), timeout=0.0 if sending.exception() else REASON_SECONDS)
                    if not taking.done():
                        raise EngineError(lost)
                await taking
        except (EngineError, asyncio.CancelledError) as error:
            if not sending.done():
                await self.ranks.abort_transfer([url], f"the engine failed: {error}")
            if isinstance(error, EngineError):
                with suppress(EngineError):  # the first failure is the one to report
                    await self.calls.run_briefly(endpoint, self.connections[url].control.leave(GROUP))
            raise

    async def _take(self, endpoint: EngineEndpoint, version: str, sending: asyncio.Future[SendReport]) -> None:
        connection = self.connections[endpoint.url]
        rendezvous = connection.rendezvous
        if connection.control.after_send:
            await asyncio.wait((sending,))
            if _lost_by_the_ranks(endpoint.url, sending) is not None:
                return  # there is nothing to take; the ranks' reason is reported
        if self._generates_on(endpoint.url):
            rendezvous = await self._prefetch(endpoint, version)
            await asyncio.wait((sending,))  # it generates while other engines are sent theirs
            if _lost_by_the_ranks(endpoint.url, sending) is not None:
                return
            if endpoint.url not in self.fleet.syncable():
                raise EngineError(f"it cannot be paused now: {self.fleet.member(endpoint.url).reason}")
            self.fleet.pause(endpoint.url)
            await self._pause_and_begin(endpoint)
        if (control := self._in_one_request(endpoint.url)) is not None:
            request = control.update(self._buckets, rendezvous, version=version)
            await self.client.run(endpoint, [request], timeout=self._transfer_seconds() + self.calls.deadline)
            return
        taken = 0
        for request, buckets in connection.control.announce(self._buckets, rendezvous, version=version):
            await self._acknowledge(endpoint.url, version, taken)
            seconds = STEP_SHARE * self.calls.deadline + (buckets - 1) * self.bucket_deadline
            await self.client.run(endpoint, [request], timeout=seconds)
            taken += buckets
        await self._acknowledge(endpoint.url, version, taken)

    async def _acknowledge(self, url: str, version: str, taken: int) -> None:
        """Of an engine whose ranks cannot see what it has taken: they are told, and have the next bucket ready then."""
        if self.connections[url].control.acknowledged:
            await self.ranks.ready(url, version, taken, STEP_SHARE * self.calls.deadline)

    def _in_one_request(self, url: str) -> OneRequestControl | None:
        """Of an engine whose pause and update are one request, and what follows another."""
        control = self.connections[url].control
        is_apt = self._pause_mode(url) == "keep" and url not in self._asleep
        return control if is_apt and isinstance(control, OneRequestControl) else None

    def _transfer_seconds(self) -> float:
        return STEP_SHARE * self.calls.deadline + (len(self._buckets) - 1) * self.bucket_deadline

    def _generates_on(self, url: str) -> bool:
        """Whether this engine is paused only when it has all bytes."""
        control = self.connections[url].control
        return control.after_send or control.staged

    async def _prefetch(self, endpoint: EngineEndpoint, version: str) -> Rendezvous:
        """Until everything that needs no pause is ready at the engine."""
        connection, seconds = self.connections[endpoint.url], self._transfer_seconds()
        rendezvous, located = connection.rendezvous, connection.transport.located
        if located is not None:
            rendezvous = await asyncio.to_thread(located, endpoint.url, rendezvous, version, seconds)
        requests = connection.control.prefetch(self._buckets, rendezvous, version=version, seconds=seconds)
        # Longer than what the engine was told: it knows what it waits for.
        await self.client.run(endpoint, requests, timeout=seconds + self.calls.deadline)
        return rendezvous

    async def _finish(self, endpoint: EngineEndpoint, version: WeightVersion) -> None:
        url = endpoint.url
        if (control := self._in_one_request(url)) is not None:
            await self.calls.run(endpoint, [control.finish_and_resume(str(version))])
            self._resumed.add(url)
            self._pauses[url] = time.perf_counter() - self._paused_at[url]
        else:
            await self.calls.run(endpoint, self._controls[url].finish(str(version)))
        self._begun.discard(url)
        self._require_paused(url)
        self.fleet.update_finished(url, version)

    async def _resume(self, urls: Sequence[str]) -> Failures:
        """Engines that are paused, whatever became of their update: a frozen one serves nobody, not even somebody
        else."""
        failures = await self.calls.gather([member.endpoint for member in self._at(urls)], self._resume_one)
        for url in set(failures) & set(self._paused(urls)):
            self._lost(url, failures[url])
        return failures

    async def _resume_one(self, endpoint: EngineEndpoint) -> None:
        url = endpoint.url
        run = self.calls.run_briefly if url in self.calls.silent else self.calls.run
        if url in self._begun:
            with suppress(EngineError):  # it is to go on all the same
                await self.calls.run_briefly(endpoint, self._controls[url].abandon())
        try:
            await run(endpoint, self._go_on(endpoint))
            if url in self._has_weights:
                self._asleep.discard(url)
        finally:
            self._pauses[url] = time.perf_counter() - self._paused_at[url]

    def _stop(self, endpoint: EngineEndpoint) -> list[HttpRequest]:
        """Before an update: an engine that is asleep stands still already."""
        if self.gpus is not None and endpoint.url in self._asleep:
            return self.gpus.residency(self._members[endpoint.url].info).weights_back()
        if (control := self._pausing_control(endpoint.url)) is not None:
            return control.pause()
        return controls(endpoint.dialect or "").pause(self._pause_mode(endpoint.url))

    def _pause_mode(self, url: str) -> PauseMode:
        engine = self._members[url]
        return supported.pause_mode(
            self.config.pause_mode, engine.info.dialect, engine.info.engine_version, engine.endpoint.role
        )

    def _go_on(self, endpoint: EngineEndpoint) -> list[HttpRequest]:
        """After it, whatever became of the update: half awake an engine is of no use to anybody."""
        url = endpoint.url
        resume = (self._pausing_control(url) or controls(endpoint.dialect or "")).resume()
        if self.gpus is not None and url in self._asleep:
            return [*self.gpus.residency(self._members[url].info).caches_back(), *resume]
        return resume

    def _pausing_control(self, url: str) -> PausingControl | None:
        """Of an engine that does not pause by its dialect."""
        control = self._controls[url]
        is_apt = self._pause_mode(url) == "keep" and url not in self._asleep
        return control if is_apt and isinstance(control, PausingControl) else None

    async def _verify(self, urls: Sequence[str]) -> tuple[Failures, float | None]:
        """The value check: engines sample, the ranks score. An engine that differs is that engine's failure."""
        if not urls:
            return {}, None
        request = self.check.request()
        completions: dict[str, Completion] = {}

        async def sample(endpoint: EngineEndpoint) -> None:
            engine = self.fleet.member(endpoint.url)
            [completions[endpoint.url]] = await generate_at(
                self.client, self.fleet, engine, request, timeout=self.calls.deadline
            )

        failures = await self._each(urls, sample)
        if not completions:
            return failures, None
        sampled = [url for url in urls if url in completions]
        batch = self.check.batch(request, [completions[url] for url in sampled])
        infos = {url: self._members[url].info for url in sampled}
        result = self.check.compare(infos, batch, await self.ranks.logprobs(batch))
        self._differing = set(result.failed)
        for url, reason in result.failed.items():
            self._lost(url, reason)
        return failures | result.failed, result.mean

    # -- the rest

    def _at(self, urls: Sequence[str]) -> list[Member]:
        return [self._members[url] for url in urls]

    def _paused(self, urls: Sequence[str]) -> list[str]:
        """Those of `urls` that this sync still has in its hands."""
        return [member.url for member in self.fleet.members() if member.url in urls and member.state is State.PAUSED]

    def _require_paused(self, url: str) -> None:
        """Raises EngineError for an engine of which the fleet learned something else while it was asked."""
        if url not in self._paused([url]):
            reasons = [member.reason for member in self.fleet.members() if member.url == url]
            raise EngineError(f"it cannot be updated now: {reasons[0] if reasons else 'it has left the run'}")

    def _lost_all(self, urls: Sequence[str], error: BaseException) -> None:
        """Of a rank, or a bug: these engines serve on nobody's word."""
        for url in self._paused(urls):
            self._lost(url, f"the sync ended with {type(error).__name__}: {error}")

    def _lost(self, url: str, reason: str) -> None:
        """An engine that failed in this sync: STALE, and to be connected anew.

        One that fell silent is SUSPECT at once: left STALE it would be tried again, and waited for, by every sync.
        """
        self.connections.lost(url)
        if url in self._paused([url]):
            self.fleet.update_failed(url, reason)
        if url in self.calls.silent:
            self.fleet.fell_silent(url, reason, checks=CHECKS_MISSED)

    async def _each(self, urls: Sequence[str], act: Act) -> Failures:
        """`act` on all of them side by side; those that fail are out of this sync."""
        failures = await self.calls.gather([member.endpoint for member in self._at(urls)], act)
        for url, reason in failures.items():
            self._lost(url, reason)
        return failures

    def _explain(self, version: str, failures: Failures) -> str:
        if not failures:
            states = "".join(f"\n  {m.url}: {m.state.value} ({m.reason})" for m in self.fleet.members())
            return f"weights {version}: no engine is there to receive them{states}"
        lines = "\n".join(f"  {url}: {reason}" for url, reason in failures.items())
        return (
            f"weights {version} reached none of {len(failures)} engines:\n{lines}\n"
            "If an engine has died, its log tells why (`rltool logs`); "
            "`rltool engines resume` frees engines that stayed paused."
        )


def _lost_by_the_ranks(url: str, sending: asyncio.Future[SendReport]) -> str | None:
    """Why the ranks send nothing more to this engine; None: they do, or have sent all."""
    if not sending.done():
        return None
    error = sending.exception()
    return f"the trainer's ranks failed: {error}" if error else sending.result().failures.get(url)
