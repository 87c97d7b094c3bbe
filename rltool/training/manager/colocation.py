"""Colocated engines: whether they or the trainer's ranks have the GPUs' memory now. This class of the rollout manager
alone puts engines to sleep and offloads ranks.

    to_trainer      engines asleep (one that cannot is ended), then the ranks have all of their memory again
    to_engines      the ranks keep their parameters alone; engines that died are started again
    (a weight sync) the policy's engines wake up and take the parameters, which then leave the GPUs as well
    wake_others     the engines of other models wake up

An engine that is started needs its whole share of the GPUs' memory, so none is while the trainer has them, and the
trainer gets them only when those that are being started have loaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from rltool.engines.dialects.table import controls
from rltool.engines.fleet.engine_set import EngineSet
from rltool.engines.fleet.fleet import Member, State
from rltool.engines.types import HttpRequest
from rltool.errors import EngineError, RltoolError
from rltool.megatron.offload import PARTS
from rltool.rollout.serving.monitor import FleetMonitor
from rltool.rollout.serving.restarts import EngineRestarts
from rltool.weights.connections import Trainer
from rltool.weights.sleep import TRAINED, EngineSleep, sleep_of

LOOK_SECONDS = 0.2
"""How often it is looked whether engines that are being started have loaded."""
CAN_SLEEP = (State.READY, State.STALE)


@dataclass(frozen=True)
class Members:
    """The engines of one model, live. takes_weights: a sync brings them when they wake up; from_disk: else they are
    loaded again then, and not kept. keeps_weights: a sync brings adapters alone."""

    engines: EngineSet
    monitor: FleetMonitor
    takes_weights: bool
    from_disk: bool = False
    keeps_weights: bool = False

    def sleep_of(self, engine: Member, trainer_device: str) -> EngineSleep:
        updated = self.takes_weights and not self.keeps_weights
        return sleep_of(engine.info, trainer_device, updated=updated, from_disk=self.from_disk)


class Colocation:
    """step_seconds: for an engine to fall asleep, or to wake up (deadlines.sync); start_seconds: for one to
    load."""

    def __init__(
        self, trainer: Trainer, policy: Members, others: Sequence[Members], restarts: EngineRestarts, *,
        step_seconds: float, start_seconds: float,
    ) -> None:  # fmt: skip
        self._trainer, self._ranks, self._lock = trainer, trainer.ranks, trainer.lock
        self._models, self._restarts = [policy, *others], restarts
        self._step_seconds, self._start_seconds = step_seconds, start_seconds
        self._log, self._clock = policy.engines.log, policy.engines.clock

    async def to_trainer(self) -> float:
        """Every engine has let go of the GPUs, and the ranks are as they were before they did. Returns the seconds for
        which these took their memory back. Raises what a rank raises."""
        self._restarts.hold()
        await self._until_loaded()
        async with self._lock:
            await asyncio.gather(*(self._release(of, engine) for of in self._models for engine in self._ours(of)))
            for of in self._models:
                await of.monitor.carry_out()
            started = self._clock()
            await self._ranks.onload(PARTS)
            return self._clock() - started

    async def to_engines(self) -> float:
        """Before a sync, which wakes the policy's engines up. Returns the seconds for which the ranks gave memory
        away."""
        started = self._clock()
        await self._ranks.offload(TRAINED)
        seconds = self._clock() - started
        self._restarts.go_on()
        return seconds

    async def wake_others(self) -> float:
        """After a sync: the ranks have nothing on the GPUs any more. Returns the seconds that it took."""
        started = self._clock()
        fixed = [of for of in self._models if not of.takes_weights]
        await asyncio.gather(*(self._wake(of, engine) for of in fixed for engine in self._ours(of, State.ASLEEP)))
        for of in fixed:
            await of.monitor.carry_out()
        return self._clock() - started

    async def end(self, url: str, why: str) -> None:
        """An engine that holds memory it must not hold, or lacks what it needs: its process ends, and is started again
        when the engines have the GPUs."""
        self._log(f"engine {url} is ended: {why}")
        try:
            await self._restarts.end(url, why)
        except RltoolError as error:
            self._log(f"engine {url} could not be ended: {error}")

    # -- the rest is private

    def _ours(self, of: Members, *states: State) -> list[Member]:
        """Those that the run has started, and that are in one of these states: the others have GPUs of their own."""
        return [member for member in of.engines.fleet.members(*states) if self._restarts.owns(member.url)]

    async def _release(self, of: Members, engine: Member) -> None:
        url, now = engine.url, of.engines.fleet.find(engine.url)
        if now is None or now.state is State.ASLEEP:
            return
        if now.state not in CAN_SLEEP:
            await self._restarts.end(url, f"it is {now.state.value}, and the trainer needs its GPUs")
            return
        of.engines.fleet.fall_asleep(url)
        try:
            await self._ask(of, engine, of.sleep_of(engine, self._trainer.device).sleep())
        except EngineError as error:
            await self.end(url, f"it did not free its GPUs: {error}")

    async def _wake(self, of: Members, engine: Member) -> None:
        sleep, resume = of.sleep_of(engine, self._trainer.device), controls(engine.info.dialect).resume()
        try:
            await self._ask(of, engine, [*sleep.wake_weights(), *sleep.wake_caches(), *resume])
        except EngineError as error:
            await self.end(engine.url, f"it did not wake up: {error}")
            return
        now = of.engines.fleet.find(engine.url)
        if now is not None and now.state is State.ASLEEP:  # it has neither left nor died meanwhile
            of.engines.fleet.wake_up(engine.url)

    async def _ask(self, of: Members, engine: Member, requests: list[HttpRequest]) -> None:
        await of.engines.client.run(engine.endpoint, requests, timeout=self._step_seconds)

    async def _until_loaded(self) -> None:
        """Engines that are being started wait for their first probe; a late one is ended with the others."""
        started = self._clock()
        while self._clock() - started < self._start_seconds:
            loading = any(self._ours(of, State.STARTING) for of in self._models)
            if not loading and not self._restarts.is_starting:
                return
            await asyncio.sleep(LOOK_SECONDS)
