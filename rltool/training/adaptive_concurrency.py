"""The task that adapts a run's requests in flight to its engines' load (rollout.adaptive_concurrency)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from rltool.engines.client import EngineClient
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet import Fleet
from rltool.engines.types import EngineLoad
from rltool.rollout.concurrency import ConcurrencyController, ConcurrencyPolicy
from rltool.rollout.data_plane import DataPlane

LOAD_SECONDS = 1.0
"""How often engines are asked for their load."""


async def adapt_concurrency(
    client: EngineClient, fleet: Fleet, endpoints: Mapping[str, EngineEndpoint], plane: DataPlane, *,
    requests_per_engine: int, clock: Callable[[], float],
) -> None:  # fmt: skip
    """Until it is cancelled. By the engines' own queues and KV caches; requests_per_engine: to start from."""
    controller = ConcurrencyController(ConcurrencyPolicy(start=requests_per_engine), clock=clock)
    while True:
        await asyncio.sleep(LOAD_SECONDS)
        serving = fleet.serving()
        replies = await asyncio.gather(*(client.load(endpoints[url]) for url in serving), return_exceptions=True)
        loads = [reply for reply in replies if isinstance(reply, EngineLoad)]
        controller.observe(loads, in_flight=plane.in_flight)
        if serving:
            plane.limit = controller.limit(len(serving))
            plane.changed()
