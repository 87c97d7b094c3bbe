"""Engines on the trainer's own GPUs: who has these now, the engines or the trainer's ranks. One owner, in the rollout
manager, hands them over; nobody else puts an engine to sleep or a rank's memory away.

    to_trainer      engines asleep (one that cannot is ended), then the ranks have all of their memory again
    to_engines      the ranks keep their parameters alone; engines that died are started again
    (a weight sync) the policy's engines wake up and take the parameters, which then leave the GPUs as well
    wake_others     the engines of other models wake up

An engine that is started needs its whole share of the GPUs' memory, so none is while the trainer has them, and the
trainer gets them only when those that are being started have loaded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rltool.engines.client import EngineClient
from rltool.engines.dialects import controls
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet import Fleet, State
from rltool.engines.types import EngineInfo, HttpRequest
from rltool.errors import EngineError, RltoolError
from rltool.megatron.offload import PARTS
from rltool.rollout.engine_restarts import EngineRestarts
from rltool.rollout.fleet_monitor import FleetMonitor
from rltool.weights.connections import Ranks
from rltool.weights.residency import TRAINED, EngineResidency, residency_of

LOOK_SECONDS = 0.2
"""How often it is looked whether engines that are being started have loaded."""
CAN_SLEEP = (State.READY, State.STALE)


@dataclass(frozen=True)
class Members:
    """The engines of one model, live. takes_weights: a sync brings them when they wake up; from_disk: else they are
    loaded again then, and not kept."""

    fleet: Fleet
    monitor: FleetMonitor
    endpoints: Mapping[str, EngineEndpoint]
    infos: Mapping[str, EngineInfo]
    takes_weights: bool
    from_disk: bool = False

    def residency(self, url: str, trainer_device: str) -> EngineResidency:
        return residency_of(self.infos[url], trainer_device, updated=self.takes_weights, from_disk=self.from_disk)


class GpuTurns:
    """models: the policy's engines and those of the others. trainer_device: cpu or cuda. step_seconds: for an engine to
    fall asleep, or to wake up (deadlines.sync_step); start_seconds: for one to load. lock: held while a weight sync
    runs."""

    def __init__(
        self, client: EngineClient, ranks: Ranks, models: list[Members], restarts: EngineRestarts, *,
        trainer_device: str, step_seconds: float, start_seconds: float, lock: asyncio.Lock,
        log: Callable[[str], None], clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._client, self._ranks, self._models, self._restarts = client, ranks, models, restarts
        self._trainer_device, self._step_seconds, self._start_seconds = trainer_device, step_seconds, start_seconds
        self._lock, self._log, self._clock = lock, log, clock

    async def to_trainer(self) -> None:
        """Every engine has let go of the GPUs, and the ranks are as they were before they did. Raises what a rank
        raises."""
        self._restarts.hold()
        await self._until_loaded()
        async with self._lock:
            await asyncio.gather(*(self._release(of, url) for of in self._models for url in self._ours(of)))
            for of in self._models:
                await of.monitor.carry_out()
            await self._ranks.onload(PARTS)

    async def to_engines(self) -> None:
        """Before a sync, which wakes the policy's engines up."""
        await self._ranks.offload(TRAINED)
        self._restarts.go_on()

    async def wake_others(self) -> None:
        """After a sync: the ranks have nothing on the GPUs any more."""
        fixed = [of for of in self._models if not of.takes_weights]
        await asyncio.gather(*(self._wake(of, url) for of in fixed for url in self._ours(of, State.ASLEEP)))
        for of in fixed:
            await of.monitor.carry_out()

    async def end(self, url: str, why: str) -> None:
        """An engine that holds memory it must not hold, or lacks what it needs: its process ends, and is started again
        when the engines have the GPUs."""
        self._log(f"engine {url} is ended: {why}")
        try:
            await self._restarts.end(url, why)
        except RltoolError as error:
            self._log(f"engine {url} could not be ended: {error}")

    # -- the rest is private

    def _ours(self, of: Members, *states: State) -> list[str]:
        """Those that the run has started, and that are in one of these states: the others have GPUs of their own."""
        members = of.fleet.members()
        return [m.url for m in members if self._restarts.owns(m.url) and (not states or m.state in states)]

    async def _release(self, of: Members, url: str) -> None:
        state = of.fleet.member(url).state
        if state is State.ASLEEP:
            return
        if state not in CAN_SLEEP:
            await self._restarts.end(url, f"it is {state.value}, and the trainer needs its GPUs")
            return
        of.fleet.fall_asleep(url)
        try:
            await self._ask(of, url, of.residency(url, self._trainer_device).release())
        except EngineError as error:
            await self.end(url, f"it did not free its GPUs: {error}")

    async def _wake(self, of: Members, url: str) -> None:
        residency, resume = of.residency(url, self._trainer_device), controls(of.infos[url].dialect).resume()
        try:
            await self._ask(of, url, [*residency.weights_back(), *residency.caches_back(), *resume])
        except EngineError as error:
            await self.end(url, f"it did not wake up: {error}")
        else:
            of.fleet.wake_up(url)

    async def _ask(self, of: Members, url: str, requests: list[HttpRequest]) -> None:
        await self._client.run(of.endpoints[url], requests, timeout=self._step_seconds)

    async def _until_loaded(self) -> None:
        """Engines that are being started wait for their first probe; a late one is ended with the others."""
        started = self._clock()
        while self._clock() - started < self._start_seconds:
            loading = any(self._ours(of, State.STARTING) for of in self._models)
            if not loading and not self._restarts.is_starting:
                return
            await asyncio.sleep(LOOK_SECONDS)
