"""How many requests a fleet should have in flight: additive increase, multiplicative decrease, by what engines report
of their load.

With too few an engine's batches are small and its GPU idles. With too many, requests wait in its queue, or its KV cache
fills and it takes back what it has begun: no token comes sooner, and each is older by the time that it is trained on.
The right number depends on model, lengths and GPU, and drifts as answers grow; so it is found while the run goes on.

The controller owns the number, and when it may move. It does not ask engines, count requests, hold permits, or abort
anything: after a decrease the surplus is let finish. Hence the one transition that must not exist: a decrease on the
evidence of a surplus that an earlier decrease has already condemned. Taken again and again until the queue has drained,
it would end at the minimum.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rltool.engines.fleet.engine_set import EngineSet
from rltool.engines.fleet.fleet import State
from rltool.engines.types import EngineLoad
from rltool.rollout.serving.data_plane import DataPlane

DECREASE = 0.75
"""Half, as TCP takes, would leave a GPU idle for many increases; 0.9 drains a full cache slowly."""
STEPS_TO_DOUBLE = 16
"""One increase is the start's 16th part: with the default cooldown it takes 80 s to double, and overshoots by 6 %."""
WAITING_SHARE = 0.05
"""Of running samples. A group that has just arrived waits for a step or two: that is no queue yet."""
FULL_KV_CACHE = 0.95
"""vLLM preempts when not one block is free, and a step of a full batch may want one for each sequence."""
ROOMY_KV_CACHE = 0.8
"""Below it there is room for more. Between the two the number stays: samples that run will still grow."""
USED_SHARE = 0.9
"""Of the limit. Where fewer are in flight the limit is not what holds them back, and a quiet engine proves nothing
about it."""


class Pressure(StrEnum):
    ROOM = "room"  # nothing waits, and the KV caches have space: more requests would run at once
    FILLED = "filled"  # neither: stay
    OVERLOADED = "overloaded"  # requests wait, or a KV cache is about to overflow


def pressure(loads: Sequence[EngineLoad]) -> Pressure:
    """Of a fleet, whose engines share the work evenly: queues are summed, the fullest KV cache stands for all."""
    running, waiting = sum(load.running for load in loads), sum(load.waiting for load in loads)
    usage = max(load.kv_cache_usage for load in loads)
    if waiting > WAITING_SHARE * running or usage >= FULL_KV_CACHE:
        return Pressure.OVERLOADED
    return Pressure.ROOM if waiting == 0 and usage < ROOMY_KV_CACHE else Pressure.FILLED


@dataclass(frozen=True)
class ConcurrencyPolicy:
    """Requests (prompt groups) per serving engine. cooldown: seconds between two changes, so that what is read was
    caused by the last one: some forward passes until new requests run, and the engine's metrics follow."""

    start: int
    minimum: int = 1
    maximum: int = 4096
    cooldown: float = 5.0

    def __post_init__(self) -> None:
        if not 1 <= self.minimum <= self.start <= self.maximum or self.cooldown < 0:
            raise ValueError(f"not a concurrency policy, 1 <= minimum <= start <= maximum and cooldown >= 0: {self}")

    @property
    def increase(self) -> float:
        """Requests per engine by which the limit grows at a time."""
        return max(1.0, self.start / STEPS_TO_DOUBLE)


class ConcurrencyController:
    """The limit is kept per engine, so that it follows the number of engines that serve. clock: monotonic seconds."""

    def __init__(self, policy: ConcurrencyPolicy, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._policy, self._clock = policy, clock
        self._per_engine = float(policy.start)
        self._changed_at = clock()

    def limit(self, num_engines: int) -> int:
        """Requests that `num_engines` serving engines should have in flight together."""
        return int(self._per_engine * num_engines)

    def observe(self, loads: Sequence[EngineLoad], *, in_flight: int) -> Pressure | None:
        """The serving engines' counters now, and the requests that are with them. Moves the limit, or leaves it.

        Engines that did not answer are left out; where none did, nothing is known (None) and nothing changes.
        """
        if not loads:
            return None
        found = pressure(loads)
        if self._clock() - self._changed_at < self._policy.cooldown:
            return found
        limit = self.limit(len(loads))
        if found is Pressure.OVERLOADED and in_flight <= limit:
            # From what is in flight: an unreached limit has to come down to it before it holds anything back.
            self._move(min(self._per_engine, in_flight / len(loads)) * DECREASE)
        elif found is Pressure.ROOM and in_flight >= USED_SHARE * limit:
            self._move(self._per_engine + self._policy.increase)
        return found

    def _move(self, per_engine: float) -> None:
        self._per_engine = min(max(per_engine, self._policy.minimum), self._policy.maximum)
        self._changed_at = self._clock()


LOAD_SECONDS = 1.0
"""How often engines are asked for their load."""


async def adapt_concurrency(engines: EngineSet, plane: DataPlane, controller: ConcurrencyController) -> None:
    """The plane's requests in flight follow the engines' queues and KV caches (rollout.adaptive_concurrency), once."""
    serving = [member.endpoint for member in engines.fleet.members(State.READY)]
    replies = await asyncio.gather(*map(engines.client.load, serving), return_exceptions=True)
    loads = [reply for reply in replies if isinstance(reply, EngineLoad)]
    controller.observe(loads, in_flight=plane.in_flight)
    if serving:
        plane.limit = controller.limit(len(serving))
        plane.changed()
