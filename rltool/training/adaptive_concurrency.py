"""A run's requests in flight follow its engines' load (rollout.adaptive_concurrency)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from rltool.engines.client import EngineClient
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet import Fleet
from rltool.engines.types import EngineLoad
from rltool.rollout.concurrency import ConcurrencyController
from rltool.rollout.data_plane import DataPlane

LOAD_SECONDS = 1.0
"""How often engines are asked for their load."""


async def adapt_concurrency(
    client: EngineClient, fleet: Fleet, endpoints: Mapping[str, EngineEndpoint], plane: DataPlane,
    controller: ConcurrencyController,
) -> None:  # fmt: skip
    """Once, by the engines' own queues and KV caches."""
    serving = fleet.serving()
    replies = await asyncio.gather(*(client.load(endpoints[url]) for url in serving), return_exceptions=True)
    loads = [reply for reply in replies if isinstance(reply, EngineLoad)]
    controller.observe(loads, in_flight=plane.in_flight)
    if serving:
        plane.limit = controller.limit(len(serving))
        plane.changed()
