"""A run's requests in flight follow its engines' load (rollout.adaptive_concurrency)."""

from __future__ import annotations

import asyncio

from rltool.engines.fleet.engine_set import EngineSet
from rltool.engines.fleet.fleet import State
from rltool.engines.types import EngineLoad
from rltool.rollout.serving.concurrency import ConcurrencyController
from rltool.rollout.serving.data_plane import DataPlane

LOAD_SECONDS = 1.0
"""How often engines are asked for their load."""


async def adapt_concurrency(engines: EngineSet, plane: DataPlane, controller: ConcurrencyController) -> None:
    """Once, by the engines' own queues and KV caches."""
    serving = [member.endpoint for member in engines.fleet.members(State.READY)]
    replies = await asyncio.gather(*map(engines.client.load, serving), return_exceptions=True)
    loads = [reply for reply in replies if isinstance(reply, EngineLoad)]
    controller.observe(loads, in_flight=plane.in_flight)
    if serving:
        plane.limit = controller.limit(len(serving))
        plane.changed()
