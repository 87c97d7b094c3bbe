"""One engine in one weight sync, from top to bottom: open -> receive -> finish -> resume. One that fails at any of
these is aborted, and still resumed.

Engines that can have the bytes before they load them (disk, delta, staged) generate until they have them, and are
opened then. Where a transport can, pause, begin and receive are one request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal

from rltool.engines.dialects import supported
from rltool.engines.dialects.protocol import PauseMode
from rltool.engines.dialects.table import controls
from rltool.engines.fleet.disaggregation import generate_at
from rltool.engines.fleet.fleet import Fleet, Member, State
from rltool.engines.fleet.resume import TRANSFER_GROUP as GROUP
from rltool.engines.types import Bucket, Completion, GenerateRequest, HttpRequest
from rltool.engines.weight_version import WeightVersion
from rltool.errors import EngineError
from rltool.processes.tasks import beside
from rltool.weights.connections import STEP_SHARE, Connection, Connections, Ranks
from rltool.weights.engine_calls import EngineCalls, named_deadline
from rltool.weights.liveness import CHECKS_MISSED, EngineSilent, while_alive
from rltool.weights.send.sender import SendReport
from rltool.weights.sleep import SharedGpus
from rltool.weights.transport import OneRequestControl, PausingControl, ReceiverControl, Rendezvous

REASON_SECONDS = 5.0
"""For an engine that the ranks have aborted to report what is wrong: that is nearer to the cause than what they
saw."""
WITHDRAW_SECONDS = 5.0
"""For a cancelled request to have ended here, before the engine leaves its group and resumes."""

Sending = asyncio.Future[SendReport]


PUT_OFF = 10.0
"""An engine that fails slowly is left out of syncs for so many times the seconds that it took: it costs a run a tenth
of its time at most."""


@dataclass(frozen=True)
class SyncPlan:
    """What the updates of one sync have in common. pause_mode: weights.pause_mode; bucket_deadline: seconds for an
    engine to take one bucket; gpus: see WeightSync."""

    version: WeightVersion
    buckets: Sequence[Bucket]
    pause_mode: PauseMode | Literal["auto"]
    bucket_deadline: float
    calls: EngineCalls
    connections: Connections
    ranks: Ranks
    gpus: SharedGpus | None

    @property
    def transfer_seconds(self) -> float:
        """For an engine to take all buckets."""
        return STEP_SHARE * self.calls.deadline + (len(self.buckets) - 1) * self.bucket_deadline


class EngineUpdate:
    """engine: as the fleet had it when the sync began. The fleet may lose it at any await: what is asked of the engine
    goes to its endpoint of then."""

    def __init__(self, engine: Member, plan: SyncPlan) -> None:
        self.engine, self.url, self.endpoint, self.plan = engine, engine.url, engine.endpoint, plan
        self.took = 0.0
        """Seconds that were waited for it: in its steps, but where it waited for the ranks, which may be held up by
        another engine."""
        self.failure: str | None = None
        """The first one."""
        self.is_silent = False
        """It failed by answering nothing any more."""
        self.differs = False
        """It failed the value check."""
        self.is_asleep = engine.state is State.ASLEEP
        """Until this sync has woken it up."""
        self.paused_at: float | None = None
        """When it was to stand still; None: it has not been asked."""
        self.paused_seconds = 0.0
        """From then until it went on."""
        self.wake_seconds = 0.0
        """For which it took its memory back."""
        self.received_at: float | None = None
        """When it had all that the ranks have sent."""
        self.goes_on = False
        """It was resumed, and generates."""
        self.completion: Completion | None = None
        """Of the value check."""
        self._connection: Connection | None = None
        self._has_room = False  # for its weights, where it was asleep
        self._is_mixture = False  # its weights are neither the old nor the new ones until its update is finished

    # -- what the sync awaits

    async def attempt(self, step: Awaitable[None]) -> None:
        """One of the steps below. Its failure is this engine's alone, and so is silence: an engine that answers no
        health check meanwhile is aborted at once."""
        try:
            with self._waiting(1):
                await while_alive(self._calls.client, self.endpoint, step)
        except EngineError as error:
            self.failed(named_deadline(error))

    def connected(self, connection: Connection) -> None:
        self._connection = connection

    async def open(self) -> None:
        """It stands still, and its weights may change. PAUSED in the fleet before."""
        self.paused_at = time.perf_counter()
        if self._in_one_request is not None:  # which `_take` sends
            self._begin()
            return
        with self._waking():
            await self._calls.run(self.endpoint, self._stop())
        self._has_room = True
        self._require_paused()
        self._begin()
        await self._calls.run(self.endpoint, self._control.begin())

    async def update(self, sending: Sending) -> None:
        """It takes the weights beside the sending, has the version and goes on, at its own pace."""
        await self._receive(sending)
        await self._sent(sending)
        if self._given_up(sending) is not None:
            return  # what it has taken may not be the weights; the ranks' reason is reported
        self.received_at = time.perf_counter()
        await self._finish()
        is_half_of_a_pair = self.endpoint.role != "regular"  # the other half may still generate with older weights
        if not self.goes_on and not is_half_of_a_pair:
            await self.resume()

    async def resume(self) -> None:
        """It goes on, however its update ended: a paused engine serves no one, not even another run."""
        run = self._calls.run_briefly if self.is_silent else self._calls.run
        if self._is_mixture:
            with suppress(EngineError):  # it is to go on all the same
                await self._calls.run_briefly(self.endpoint, self._control.abandon())
        try:
            with self._waking():
                await run(self.endpoint, self._go_on())
            self.is_asleep = self.is_asleep and not self._has_room
        finally:
            self._stood_still()
        self.goes_on = True

    async def sample(self, request: GenerateRequest) -> None:
        """For the value check."""
        engine = self._fleet.find(self.url) or self.engine
        [self.completion] = await generate_at(
            self._calls.client, self._fleet, engine, request, timeout=self._calls.deadline
        )

    def failed(self, error: EngineError) -> None:
        """By its own fault."""
        self.is_silent = self.is_silent or isinstance(error, EngineSilent)
        self.fail(str(error), own=True)

    def fail(self, reason: str, *, own: bool = False) -> None:
        """Given up in this sync: STALE, and to be connected anew. The first reason is the one to report.

        One that fell silent is SUSPECT at once: left STALE it would be tried again, and waited for, by every sync. So
        would one behind a slow link: it is left out of the next ones, unless engines share the trainer's GPUs, where a
        sync alone wakes them. own: it is the engine's failure, or its link's.
        """
        if self.failure is not None:
            return
        can_be_left_out = own and not self.is_silent and self.plan.gpus is None
        if is_slow := can_be_left_out and self.took > self.plan.bucket_deadline:
            reason += (
                f" (left out of syncs for {PUT_OFF * self.took:.0f} s, as this one waited {self.took:.0f} s for it)"
            )
        self.failure = reason
        self.plan.connections.lost(self.url)
        if self.is_paused:
            self._fleet.update_failed(self.url, reason)
        self._fleet.not_reached(self.url, reason)
        if is_slow:
            self._fleet.put_off(self.url, PUT_OFF * self.took)
        if self.is_silent:
            self._fleet.fell_silent(self.url, reason, checks=CHECKS_MISSED)

    @property
    def is_paused(self) -> bool:
        """Whether this sync still has it in its hands."""
        engine = self._fleet.find(self.url)
        return engine is not None and engine.state is State.PAUSED

    @property
    def generates_on(self) -> bool:
        """Whether it is paused only when it has all bytes."""
        return self._control.after_send or self._control.staged

    # -- receive

    async def _receive(self, sending: Sending) -> None:
        """The engine takes every bucket, in order. One that fails is aborted at the trainer, and leaves its
        group: no side waits for the other any more, and no other engine does."""
        try:
            async with beside(self._take(sending), grace=WITHDRAW_SECONDS) as (taking,):
                await asyncio.wait((taking, sending), return_when=asyncio.FIRST_COMPLETED)
                if not taking.done() and (why := self._given_up(sending)) is not None:
                    await asyncio.wait((taking,), timeout=0.0 if sending.exception() else REASON_SECONDS)
                    if not taking.done():
                        raise EngineError(why)
                await taking
        except (EngineError, asyncio.CancelledError) as error:
            if not sending.done():
                await self.plan.ranks.abort_transfer([self.url], f"the engine failed: {error}")
            if isinstance(error, EngineError):
                with suppress(EngineError):  # the first failure is the one to report
                    await self._calls.run_briefly(self.endpoint, self._control.leave(GROUP))
            raise

    async def _take(self, sending: Sending) -> None:
        plan, control, client = self.plan, self._control, self._calls.client
        rendezvous, version = self._connected.rendezvous, str(plan.version)
        if control.after_send:
            await self._sent(sending)
            if self._given_up(sending) is not None:
                return  # there is nothing to take; the ranks' reason is reported
        if self.generates_on:
            rendezvous = await self._prefetch()
            await self._sent(sending)  # it generates while other engines are sent theirs
            if self._given_up(sending) is not None:
                return
            self._pause()
            await self.open()
        if (one := self._in_one_request) is not None:
            request = one.update(plan.buckets, rendezvous, version=version)
            await client.run(self.endpoint, [request], timeout=plan.transfer_seconds + self._calls.deadline)
            return
        taken = 0
        for request, buckets in control.announce(plan.buckets, rendezvous, version=version):
            await self._acknowledge(taken)
            seconds = STEP_SHARE * self._calls.deadline + (buckets - 1) * plan.bucket_deadline
            await client.run(self.endpoint, [request], timeout=seconds)
            taken += buckets
        await self._acknowledge(taken)

    async def _prefetch(self) -> Rendezvous:
        """Until everything that needs no pause is ready at the engine."""
        plan, connection, seconds = self.plan, self._connected, self.plan.transfer_seconds
        rendezvous, located, version = connection.rendezvous, connection.transport.located, str(plan.version)
        if located is not None:
            rendezvous = await asyncio.to_thread(located, self.url, rendezvous, version, seconds)
        requests = connection.control.prefetch(plan.buckets, rendezvous, version=version, seconds=seconds)
        # Longer than what the engine was given: it knows what it waits for.
        await self._calls.client.run(self.endpoint, requests, timeout=seconds + self._calls.deadline)
        return rendezvous

    async def _acknowledge(self, taken: int) -> None:
        """Of an engine whose ranks cannot see what it has taken: they learn it, and have the next bucket ready then."""
        if self._control.acknowledged:
            seconds = STEP_SHARE * self._calls.deadline
            await self.plan.ranks.ready(self.url, str(self.plan.version), taken, seconds)

    def _given_up(self, sending: Sending) -> str | None:
        """Why the ranks send nothing more to this engine; None: they do, or have sent all."""
        if not sending.done():
            return None
        error = sending.exception()
        return f"the trainer's ranks failed: {error}" if error else sending.result().failures.get(self.url)

    # -- finish

    async def _finish(self) -> None:
        """All bytes are there: the version is named last."""
        version = str(self.plan.version)
        if (one := self._in_one_request) is not None:
            await self._calls.run(self.endpoint, [one.finish_and_resume(version)])
            self.goes_on = True
            self._stood_still()
        else:
            await self._calls.run(self.endpoint, self._control.finish(version))
        self._is_mixture = False
        self._require_paused()
        self._fleet.update_finished(self.url, self.plan.version)

    # -- the rest is private

    async def _sent(self, sending: Sending) -> None:
        with self._waiting(-1):
            await asyncio.wait((sending,))

    @contextmanager
    def _waiting(self, sign: int) -> Iterator[None]:
        """Counts what is awaited in the block, or takes it off again."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.took += sign * (time.perf_counter() - began)

    @property
    def _calls(self) -> EngineCalls:
        return self.plan.calls

    @property
    def _fleet(self) -> Fleet:
        return self.plan.calls.fleet

    @property
    def _connected(self) -> Connection:
        assert self._connection is not None, "connected comes first"
        return self._connection

    @property
    def _control(self) -> ReceiverControl:
        return self._connected.control

    @property
    def _in_one_request(self) -> OneRequestControl | None:
        """Of an engine whose pause and update are one request, and what follows another."""
        control = self._control
        return control if self._keeps_requests and isinstance(control, OneRequestControl) else None

    @property
    def _pausing(self) -> PausingControl | None:
        """Of an engine that does not pause by its dialect."""
        control = self._control
        return control if self._keeps_requests and isinstance(control, PausingControl) else None

    @property
    def _keeps_requests(self) -> bool:
        return self._pause_mode == "keep" and not self.is_asleep

    @property
    def _pause_mode(self) -> PauseMode:
        info = self.engine.info
        return supported.pause_mode(self.plan.pause_mode, info.dialect, info.engine_version, self.endpoint.role)

    def _pause(self) -> None:
        if not self._fleet.can_be_paused(self.url):
            engine = self._fleet.find(self.url)
            raise EngineError(f"it cannot be paused now: {engine.reason if engine else 'it has left the run'}")
        self._fleet.pause(self.url)

    def _begin(self) -> None:
        self._fleet.update_began(self.url)
        self._is_mixture = True

    def _require_paused(self) -> None:
        """Raises EngineError for an engine of which the fleet learned something else while it was asked."""
        if not self.is_paused:
            engine = self._fleet.find(self.url)
            raise EngineError(f"it cannot be updated now: {engine.reason if engine else 'it has left the run'}")

    def _stop(self) -> list[HttpRequest]:
        """Before an update: an engine that is asleep stands still already."""
        if self.plan.gpus is not None and self.is_asleep:
            return self.plan.gpus.sleep_of(self.engine.info).wake_weights()
        if self._pausing is not None:
            return self._pausing.pause()
        return controls(self.endpoint.dialect or "").pause(self._pause_mode)

    def _go_on(self) -> list[HttpRequest]:
        """After it, however the update ended: a half-awake engine is of no use."""
        resume = (self._pausing or controls(self.endpoint.dialect or "")).resume()
        if self.plan.gpus is not None and self.is_asleep:
            return [*self.plan.gpus.sleep_of(self.engine.info).wake_caches(), *resume]
        return resume

    @contextmanager
    def _waking(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            if self.is_asleep:
                self.wake_seconds += time.perf_counter() - started

    def _stood_still(self) -> None:
        if self.paused_at is not None:
            self.paused_seconds = time.perf_counter() - self.paused_at
