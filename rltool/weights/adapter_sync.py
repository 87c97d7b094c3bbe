"""A sync of adapters alone (weights.lora_sync = "adapter"): no engine is paused, and none stops serving.

connect -> the ranks send beside each engine's taking -> each engine has the adapter under the version's name -> value
check -> the fleet is at the version. Requests in flight keep the adapter that they name, so an engine holds several: it
is rid of one when no request names it any more, and has room for the next before it takes it.

A name stands for one adapter for ever (engines/adapters.py). The sync has the interface of `WeightSync`, and fails as
that one does: an engine's failure is its own, and the coroutine ends only when every rank's `send` has ended.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from rltool.config.rollout import WeightsConfig
from rltool.engines.adapters import adapter_name
from rltool.engines.dialects.table import adapts, controls
from rltool.engines.fleet.engine_set import EngineSet
from rltool.engines.fleet.fleet import Member, State
from rltool.engines.fleet.resume import TRANSFER_GROUP as GROUP
from rltool.engines.transfer.wire import bucket_bytes
from rltool.engines.types import Bucket, Completion, HttpRequest, json_list, json_object
from rltool.engines.weight_version import WeightVersion
from rltool.errors import EngineError, EngineRejected
from rltool.processes import garbage
from rltool.processes.tasks import beside
from rltool.weights.connections import STEP_SHARE, Connection, Connections, Trainer
from rltool.weights.engine_calls import EngineCalls, named_deadline
from rltool.weights.liveness import while_alive
from rltool.weights.memory import NONE
from rltool.weights.send.sender import SendReport
from rltool.weights.sleep import SharedGpus
from rltool.weights.sync import SyncDeadlines
from rltool.weights.sync_report import Failures, SyncReport, WeightSyncFailed, timed
from rltool.weights.verify.values import ValueCheck

OURS = re.compile(r"[0-9a-f]{32}-\d+-v\d{6,}")
"""Names that a run of rltool gives (`adapter_name`)."""
BUSY = 409
"""The plugin's answer for an adapter that requests are sampled with."""
ROOM_POLL_SECONDS = 0.1
Sending = asyncio.Future[SendReport]


class AdapterSync:
    """in_use: whether a request in flight names this adapter. The deadlines are those of `WeightSync`. gpus: where
    engines sit on the trainer's: they keep their weights while they sleep, and wake up in a sync."""

    def __init__(
        self, engines: EngineSet, trainer: Trainer, config: WeightsConfig, check: ValueCheck,
        deadlines: SyncDeadlines, *, in_use: Callable[[str], bool], gpus: SharedGpus | None = None,
    ) -> None:  # fmt: skip
        self.fleet, self.trainer, self.ranks = engines.fleet, trainer, trainer.ranks
        self.config, self.check = config, check
        self._bucket_deadline = deadlines.bucket
        self._in_use, self.gpus = in_use, gpus
        self.calls = EngineCalls(engines, deadlines.step)
        self.connections = Connections(self.calls, trainer, config, shares_gpus=gpus is not None)
        self._held: dict[str, dict[str, None]] = {}
        """Of each engine the names that it has, the oldest first."""
        self._woken: dict[str, float] = {}
        """Engines that were asleep before this sync, and the seconds for which they took their memory back."""

    async def sync(
        self, version: WeightVersion, *, check_all: bool = False, only: Collection[str] | None = None
    ) -> SyncReport:
        """See WeightSync.sync."""
        with garbage.paused():
            self._woken = {}
            if self.gpus is None:
                return await self._sync(version, check_all=check_all, only=only)
            async with self.gpus.in_a_sync(self.fleet, lambda: self._woken):
                report = await self._sync(version, check_all=check_all, only=only)
            return replace(report, offload=self.gpus.offload_seconds, wake=max(self._woken.values(), default=0.0))

    async def leave_engine(self, url: str) -> None:
        """See WeightSync.leave_engine. Its adapters stay, for the requests that it has still."""
        self._held.pop(url, None)
        await self.connections.leave_engine(url)

    async def leave(self, *, lost: Collection[str] = ()) -> Failures:
        """See WeightSync.leave. Engines are left without the run's adapters."""
        ours = [member for member in self.fleet.members() if member.url in self._held and member.url not in lost]
        await asyncio.gather(*(self._unload(member, list(self._held[member.url])) for member in ours))
        return await self.connections.leave(lost)

    # -- the rest is private

    async def _sync(self, version: WeightVersion, *, check_all: bool, only: Collection[str] | None) -> SyncReport:
        started, phases = time.perf_counter(), dict[str, float]()
        members = [self.fleet.member(url) for url in self.fleet.syncable() if only is None or url in only]
        failures: Failures = {}
        if not members:
            raise WeightSyncFailed(self._explain(version, failures))

        async def attempt(member: Member, step: Awaitable[None]) -> None:
            try:
                await while_alive(self.calls.client, member.endpoint, step)
            except EngineError as error:
                failures.setdefault(member.url, str(named_deadline(error)))

        def left() -> list[Member]:
            return [member for member in members if member.url not in failures]

        sent: SendReport | None = None
        difference: float | None = None
        differing: Failures = {}
        try:
            with timed(phases, "connect"):
                new, errors = await self.connections.connect(members)
                failures |= {url: str(error) for url, error in errors.items()}
                await _side_by_side(attempt(member, self._look(member)) for member in left() if member.url in new)
            name = adapter_name(version)
            await _side_by_side(attempt(m, self._wake(m)) for m in left() if m.state is State.ASLEEP)
            with timed(phases, "room"):
                await _side_by_side(attempt(member, self._make_room(member, name)) for member in left())
            with timed(phases, "transfer"):
                # The others have it, of this very process: the same name, the same bytes.
                takers = [member for member in left() if name not in self._held.get(member.url, ())]
                if takers:
                    async with beside(self.ranks.send(str(version), [m.url for m in takers])) as (sending,):
                        taking = _side_by_side(attempt(m, self._update(m, version, sending)) for m in takers)
                        async with beside(taking) as (all_taken,):
                            try:
                                sent = await sending
                            finally:
                                await all_taken
                    for url, reason in sent.failures.items():
                        failures[url] = reason
            with timed(phases, "verify"):
                to_check = [member for member in left() if check_all or member.url in new]
                differing, difference = await self._verify(to_check, version, attempt)
                failures |= differing
        finally:
            for url in failures:
                self.connections.lost(url)
                if url in self._woken and (now := self.fleet.find(url)) is not None and now.state is State.ASLEEP:
                    self.fleet.pause(url)
                    self.fleet.update_failed(url, failures[url])
        updated = self._commit(version, left(), failures)
        if not updated:
            only_values = bool(failures) and set(failures) == set(differing)
            raise WeightSyncFailed(self._explain(version, failures), values_differ=only_values)
        return SyncReport(
            str(version), sum(map(bucket_bytes, self._buckets)), time.perf_counter() - started, phases,
            tuple(updated), failures, difference, memory=NONE if sent is None else sent.memory,
        )  # fmt: skip

    @property
    def _buckets(self) -> list[Bucket]:
        return self.ranks.plan.buckets(self.config.bucket_bytes)

    async def _look(self, member: Member) -> None:
        """Which of a run's adapters it has: none, or what a trainer has left there that died."""
        listed = HttpRequest("GET", "/v1/models")
        [reply] = await self.calls.client.run(member.endpoint, [listed], timeout=self.calls.deadline)
        names = [str(json_object(model).get("id")) for model in json_list(json_object(reply).get("data")) or ()]
        self._held[member.url] = dict.fromkeys(name for name in names if OURS.fullmatch(name))

    async def _wake(self, member: Member) -> None:
        """One on the trainer's GPUs, which has kept its model and its adapters on the host, goes on."""
        assert self.gpus is not None, "no other engine sleeps"
        sleep, resume = self.gpus.sleep_of(member.info), controls(member.endpoint.dialect or "").resume()
        started = time.perf_counter()
        await self.calls.run(member.endpoint, [*sleep.wake_weights(), *sleep.wake_caches(), *resume])
        self._woken[member.url] = time.perf_counter() - started

    async def _update(self, member: Member, version: WeightVersion, sending: Sending) -> None:
        """It takes the adapter beside the sending. One that fails is aborted at the trainer, and leaves its group."""
        try:
            await self._take(member, version, sending)
        except (EngineError, asyncio.CancelledError) as error:
            if not sending.done():
                await self.ranks.abort_transfer([member.url], f"the engine failed: {error}")
            if isinstance(error, EngineError):
                control = self.connections[member.url].control
                with suppress(EngineError):  # the first failure is the one to report
                    await self.calls.run_briefly(member.endpoint, control.leave(GROUP))
            raise

    async def _take(self, member: Member, version: WeightVersion, sending: Sending) -> None:
        connection, endpoint = self.connections[member.url], member.endpoint
        control = connection.control
        if control.after_send:
            await asyncio.wait((sending,))
            self._raise_given_up(member, sending)
        seconds = STEP_SHARE * self.calls.deadline + (len(self._buckets) - 1) * self._bucket_deadline
        fetching = control.prefetch(self._buckets, connection.rendezvous, version=str(version), seconds=seconds)
        # The plugin puts it in its place at once: what is published then is the name.
        peft = self.ranks.plan.peft
        requests = [replace(each, body={**(json_object(each.body) or {}), "peft": peft}) for each in fetching]
        async with beside(self.calls.client.run(endpoint, requests, timeout=seconds + self.calls.deadline)) as (come,):
            await asyncio.wait((come, sending), return_when=asyncio.FIRST_COMPLETED)
            if not come.done():
                self._raise_given_up(member, sending)
            await come
        await asyncio.wait((sending,))
        self._raise_given_up(member, sending)
        await self.calls.run(endpoint, [self._publish(connection, version)])
        self._held[member.url][adapter_name(version)] = None

    def _publish(self, connection: Connection, version: WeightVersion) -> HttpRequest:
        rendezvous = connection.rendezvous
        if rendezvous.transport == "adapters":
            [(request, _)] = connection.control.announce(self._buckets, rendezvous, version=str(version))
            return request
        body = {"name": adapter_name(version), "version": str(version)}
        return HttpRequest("POST", "/rltool/publish_adapter", body)

    async def _make_room(self, member: Member, name: str) -> None:
        """For the adapter of this name. What no request names any more goes; but not the newest, which requests name
        until this sync has ended. Where that leaves no room, the requests of the oldest are waited for."""
        slots, held = member.info.lora_slots, self._held.setdefault(member.url, {})
        until = time.monotonic() + self.calls.deadline
        if name in held:
            return
        while True:
            await self._unload(member, [name for name in list(held)[:-1] if not self._in_use(name)])
            if slots is None or len(held) < slots:
                return
            if time.monotonic() > until:
                raise EngineError(
                    f"it holds {slots} adapters at a time, and requests name all of them still after "
                    f"deadlines.sync = {self.calls.deadline:g} s: start it with more --lora-slots"
                )
            await asyncio.sleep(ROOM_POLL_SECONDS)

    async def _unload(self, member: Member, names: Sequence[str]) -> None:
        """Those that it is rid of are held no more; a failure leaves the others for the next sync."""
        held, endpoint = self._held[member.url], member.endpoint
        for name in names:
            if endpoint.plugin:
                request = HttpRequest("POST", "/rltool/drop_adapter", {"name": name})
            else:
                request = adapts(endpoint.dialect or "").unload_adapter(name)
            try:
                await self.calls.run(endpoint, [request])
                held.pop(name, None)
            except EngineRejected as error:
                if error.status != BUSY:  # such as of a gateway's request, which this process does not see
                    return
            except EngineError:
                return

    def _raise_given_up(self, member: Member, sending: Sending) -> None:
        if not sending.done():
            return
        error = sending.exception()
        why = f"the trainer's ranks failed: {error}" if error else sending.result().failures.get(member.url)
        if why is not None:
            raise EngineError(why)

    async def _verify(
        self, members: Sequence[Member], version: WeightVersion,
        attempt: Callable[[Member, Awaitable[None]], Awaitable[None]],
    ) -> tuple[Failures, float | None]:  # fmt: skip
        """Engines sample under the new name, the ranks score."""
        request = replace(self.check.request(), adapter=adapter_name(version))
        found: dict[str, Completion] = {}

        async def sample(member: Member) -> None:
            again = request.again()
            [found[member.url]] = await self.calls.client.generate(
                member.endpoint, again, timeout=self.calls.deadline
            )

        await _side_by_side(attempt(member, sample(member)) for member in members)
        infos = {member.url: member.info for member in members if member.url in found}
        if not infos:
            return {}, None
        batch = self.check.batch(request, [found[url] for url in infos])
        result = self.check.compare(infos, batch, await self.ranks.logprobs(batch))
        return dict(result.failed), result.mean

    def _commit(self, version: WeightVersion, members: Sequence[Member], failures: Failures) -> list[str]:
        """At once for all of them, with no await between: they were READY before, and are READY after."""
        there = self.fleet.syncable()
        updated = [member.url for member in members if member.url in there]
        failures |= {m.url: "it failed, or left, while it was updated" for m in members if m.url not in there}
        for url in updated:
            self.fleet.pause(url)
            self.fleet.update_began(url)
            self.fleet.update_finished(url, version)
        if updated:
            self.fleet.advance(version)
        for url in updated:
            self.fleet.resume(url)
        return updated

    def _explain(self, version: WeightVersion, failures: Failures) -> str:
        if not failures:
            states = "".join(f"\n  {m.url}: {m.state.value} ({m.reason})" for m in self.fleet.members())
            return f"adapter {version}: no engine is there to take it{states}"
        lines = "\n".join(f"  {url}: {reason}" for url, reason in failures.items())
        return f"adapter {version} reached none of {len(failures)} engines:\n{lines}"


async def _side_by_side(steps: Iterable[Awaitable[None]]) -> None:
    for result in await asyncio.gather(*steps, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
