"""How well engines reuse work: hits of the prefix cache, accepted drafts of speculative decoding, as they count it
themselves."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet.fleet import Member
from rltool.engines.types import EngineCounters, Tally

ASK_SECONDS = 2.0
"""A number that comes later is left out of its step: no batch waits for statistics."""


class CountersClient(Protocol):
    """Of engines.client.EngineClient."""

    async def counters(self, endpoint: EngineEndpoint, *, timeout: float) -> EngineCounters: ...


class EngineRates:
    """Rates since the last question."""

    def __init__(self, client: CountersClient) -> None:
        self._client = client
        self._before: dict[str, EngineCounters] = {}

    async def since_last(self, engines: Sequence[Member]) -> dict[str, float]:
        """rollout/prefix_cache_hit_rate and rollout/speculative_acceptance_rate of these engines; without what no
        engine reports. The first question of an engine that counts from its start is about all of it."""
        replies = await asyncio.gather(
            *(self._client.counters(engine.endpoint, timeout=ASK_SECONDS) for engine in engines),
            return_exceptions=True,
        )
        pairs = zip(engines, replies, strict=True)
        now = {engine.url: reply for engine, reply in pairs if isinstance(reply, EngineCounters)}
        found = rates(self._before, now)
        self._before |= now
        return found


def rates(before: Mapping[str, EngineCounters], now: Mapping[str, EngineCounters]) -> dict[str, float]:
    """Means over the engines that had something to count in between. An engine whose counts fell was started again."""
    found: dict[str, float] = {}
    for name, attribute in (
        ("rollout/prefix_cache_hit_rate", "prefix_cache"),
        ("rollout/speculative_acceptance_rate", "speculation"),
    ):
        shares = []
        for url, counters in now.items():
            earlier = before.get(url)
            share = _share(getattr(earlier, attribute) if earlier else None, getattr(counters, attribute))
            if share is not None:
                shares.append(share)
        if shares:
            found[name] = math.fsum(shares) / len(shares)
    return found


def _share(before: Tally | float | None, now: Tally | float | None) -> float | None:
    """Of a gauge its value; of counts the share since `before`, None where nothing was counted."""
    if not isinstance(now, Tally):
        return now
    start = before if isinstance(before, Tally) and before.total <= now.total else Tally(0.0, 0.0)
    total = now.total - start.total
    return (now.hits - start.hits) / total if total > 0 else None
