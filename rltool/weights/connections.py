"""Which engines the trainer is connected with, and over which transport: kept from one sync to the next."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from torch import Tensor

from rltool.algorithms.batch import TrainBatch
from rltool.config.rollout import WeightsConfig
from rltool.engines.dialects.checksums import ParameterLayout
from rltool.engines.dialects.table import controls
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet.fleet import Member, State
from rltool.engines.fleet.resume import TRANSFER_GROUP as GROUP
from rltool.engines.types import HttpRequest
from rltool.errors import EngineError, UsageError
from rltool.megatron.export_plan import ExportPlan
from rltool.megatron.offload import Part
from rltool.processes.tasks import beside
from rltool.weights.engine_calls import Act, EngineCalls
from rltool.weights.send.sender import SendReport
from rltool.weights.sync_report import Failures
from rltool.weights.transport import (
    PausingControl,
    Receiver,
    ReceiverControl,
    Rendezvous,
    Transport,
    choose_for,
    transport,
)

NO_RANK = 'no rank of the trainer is on one of its GPUs, and weights.transport "ipc" needs one on each: use "gloo"'
Run = Callable[[EngineEndpoint, Sequence[HttpRequest]], Awaitable[None]]
STEP_SHARE = 2
"""Engines wait this many step deadlines where they share a step with the trainer: one that hangs costs the others
one."""


class Ranks(Protocol):
    """The trainer's ranks, awaited: all of them (send/sender.py). plan: what they send; every rank has the same, and
    cuts it into the same buckets (weights.bucket_bytes)."""

    plan: ExportPlan

    async def host(self, receivers: Sequence[Receiver], group: str, directory: Path) -> dict[str, Rendezvous]: ...
    async def join(self) -> Failures: ...
    async def send(self, version: str, urls: Collection[str]) -> SendReport: ...

    async def ready(self, url: str, version: str, number: int, seconds: float) -> None:
        """Beside `send`, of the ranks that send to this engine: see SenderTransport.ready. Raises EngineError."""
        ...

    async def abort_transfer(self, urls: Sequence[str], reason: str) -> None:
        """Beside `join` and `send`: what is in flight to these engines ends."""
        ...

    async def leave_transfer(self, urls: Sequence[str] | None = None) -> None: ...
    async def logprobs(self, batch: TrainBatch) -> Tensor: ...

    async def offload(self, parts: Sequence[Part]) -> None:
        """Off the devices, see megatron.offload. Of all ranks; parts that are away stay so."""
        ...

    async def onload(self, parts: Sequence[Part]) -> None: ...

    async def weight_checksums(self, layout: ParameterLayout) -> dict[str, tuple[str, ...]]:
        """See implied_checksums."""
        ...


@dataclass(frozen=True)
class Trainer:
    """What sends the weights. device: cpu or cuda; directory: of this run alone, for transports that leave files;
    vocab_size: of its model; lock: held while a weight sync runs, for the ranks take part in one at a time."""

    ranks: Ranks
    device: str
    directory: Path
    vocab_size: int
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(frozen=True)
class Connection:
    """boot_id: of the engine's process that joined."""

    boot_id: str | None
    transport: Transport
    rendezvous: Rendezvous

    @property
    def control(self) -> ReceiverControl:
        return self.transport.control


@dataclass(frozen=True)
class _Chosen:
    """An engine that is about to join, and how."""

    engine: Member
    receiver: Receiver
    transport: Transport


class Connections:
    """shares_gpus: engines and ranks are on the same ones."""

    def __init__(
        self, calls: EngineCalls, trainer: Trainer, config: WeightsConfig, *, shares_gpus: bool = False
    ) -> None:
        self._calls, self._fleet, self._ranks, self._config = calls, calls.fleet, trainer.ranks, config
        self._trainer, self._shares_gpus = trainer, shares_gpus
        self._connected: dict[str, Connection] = {}
        self._left: set[str] = set()  # engines whose groups the ranks have not left yet
        self.seconds: dict[str, float] = {}
        """Of the last `connect`, by URL: what was waited for that engine, and not for others beside it."""

    def __getitem__(self, url: str) -> Connection:
        return self._connected[url]

    def lost(self, url: str) -> None:
        """It is to be connected anew."""
        self._connected.pop(url, None)

    async def connect(self, engines: Sequence[Member]) -> tuple[set[str], dict[str, EngineError]]:
        """Engines without a connection to this process of theirs join one each. Returns those, and the errors by
        URL."""
        if self._left:
            left, self._left = sorted(self._left), set()
            await self._ranks.leave_transfer(left)
        new = [engine for engine in engines if not self._is_connected(engine)]
        # The ranks wait for every engine that they host, as long as joining may take: no absent one is hosted.
        self.seconds = {}
        errors = await self._calls.gather([engine.endpoint for engine in new], self._timed(self._calls.answers))
        chosen, refused = self._choose([engine for engine in new if engine.url not in errors])
        errors |= refused
        if not chosen:
            return set(), errors
        meeting = await self._ranks.host([each.receiver for each in chosen.values()], GROUP, self._trainer.directory)
        began = time.perf_counter()
        async with beside(self._ranks.join()) as (joining,):
            try:
                hosted = [chosen[url].engine.endpoint for url in meeting]
                answered = await self._calls.gather(hosted, self._timed(self._join(chosen, meeting, joining)))
            finally:
                joined = await joining
        for url in joined.keys() - answered.keys():  # its ranks waited for it
            self.seconds[url] = time.perf_counter() - began
        # The engine's own error is nearer to the cause than our timeout.
        errors |= {url: EngineError(reason) for url, reason in joined.items()} | answered
        errors |= {url: EngineError(NO_RANK) for url in chosen if url not in meeting and url not in errors}
        self._connected |= {
            url: Connection(each.engine.boot_id, each.transport, meeting[url])
            for url, each in chosen.items()
            if url not in errors
        }
        return set(chosen), errors

    async def leave_engine(self, url: str) -> None:
        """One engine leaves the run. The ranks, which may be in a training step now, leave its group at the next sync.
        Raises EngineError."""
        self._left.add(url)
        connection, engine = self._connected.pop(url, None), self._fleet.find(url)
        if connection is not None and engine is not None:
            await _leave(self._calls.run_briefly, engine.endpoint, connection.control)

    async def leave(self, lost: Collection[str]) -> Failures:
        """At the end of the run: engines out of their groups, and resumed. Failures are returned."""
        calls, ours = self._calls, [m for m in self._fleet.members() if m.url not in lost]

        async def leave(endpoint: EngineEndpoint) -> None:
            await _leave(calls.run, endpoint, self._connected[endpoint.url].control)

        async def resume(endpoint: EngineEndpoint) -> None:
            await calls.run(endpoint, controls(endpoint.dialect or "").resume())

        errors = await calls.gather([m.endpoint for m in ours if m.url in self._connected], leave)
        gone = (State.DEAD, State.STARTING, State.ASLEEP)
        members = [m for m in self._fleet.members() if m.takes_weights and m.state not in gone]
        errors = await calls.gather([m.endpoint for m in members if m.url not in lost], resume) | errors
        self._connected = {}
        await self._ranks.leave_transfer()
        return {url: str(error) for url, error in errors.items()}

    # -- the rest is private

    def _is_connected(self, engine: Member) -> bool:
        """Whether its group is with this process of it. One whose weights are not known to be ours may be another
        process: its owner may have started it again with the same boot id, or it reports none."""
        connection = self._connected.get(engine.url)
        return connection is not None and connection.boot_id == engine.boot_id and engine.version is not None

    def _choose(self, engines: Sequence[Member]) -> tuple[dict[str, _Chosen], dict[str, EngineError]]:
        """How weights reach each; an engine that was started again may be another one than was checked at first."""
        chosen, refused = dict[str, _Chosen](), dict[str, EngineError]()
        for engine in engines:
            url, info, endpoint = engine.url, engine.info, engine.endpoint
            try:
                backend = choose_for(endpoint, info, self._config, self._trainer.device, shares_gpus=self._shares_gpus)
            except UsageError as error:
                refused[url] = EngineError(str(error))
                continue
            kind = transport(info.dialect, backend)
            if self._config.lora_sync == "adapter":
                kind = replace(kind, control=kind.adapters or kind.staged or kind.control)
            elif self._config.of(url, endpoint.group).staged and kind.staged is not None:  # None: with "auto" alone
                kind = replace(kind, control=kind.staged)
            receiver = Receiver(url, info.dialect, backend, info.world_size, endpoint.gpu_uuids)
            chosen[url] = _Chosen(engine, receiver, kind)
        return chosen, refused

    def _timed(self, act: Act) -> Act:
        async def timed(endpoint: EngineEndpoint) -> None:
            began = time.perf_counter()
            try:
                await act(endpoint)
            finally:
                self.seconds[endpoint.url] = self.seconds.get(endpoint.url, 0.0) + time.perf_counter() - began

        return timed

    def _join(
        self, chosen: Mapping[str, _Chosen], meeting: Mapping[str, Rendezvous], joining: asyncio.Future[Failures]
    ) -> Act:
        async def join(endpoint: EngineEndpoint) -> None:
            url = endpoint.url
            control = chosen[url].transport.control
            # A trainer that died may have left a group behind; one that cannot be left fails now.
            with suppress(EngineError):
                await _leave(self._calls.run, endpoint, control)
            if joining.done() and url in joining.result():  # there are engines that wait half an hour for a trainer
                raise EngineError(joining.result()[url])
            seconds = STEP_SHARE * self._calls.deadline
            try:
                await self._calls.run(endpoint, control.init(meeting[url], rank_offset=1, timeout_seconds=seconds))
            except (EngineError, asyncio.CancelledError) as error:
                await self._ranks.abort_transfer([url], f"the engine did not join: {error}")
                raise

        return join


async def _leave(run: Run, endpoint: EngineEndpoint, control: ReceiverControl) -> None:
    """Of an engine that generates, or may: it goes on, however its leaving ended. Raises EngineError."""
    if not isinstance(control, PausingControl):
        await run(endpoint, control.leave(GROUP))
        return
    try:
        await run(endpoint, [*control.pause(), *control.leave(GROUP)])
    except BaseException:
        with suppress(EngineError):  # the first failure is the one to report
            await run(endpoint, control.resume())
        raise
    await run(endpoint, control.resume())
