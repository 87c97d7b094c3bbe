"""A step of a weight sync at one engine, aborted as soon as the engine is known to be gone.

A step has a long deadline, for loading weights may take minutes; an engine that is stopped or cut off would hold up the
whole fleet for all of it. So an engine that is slow has to answer health checks meanwhile, which its server does beside
the step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from rltool.engines.client import HEALTH_SECONDS, EngineClient
from rltool.engines.endpoints import EngineEndpoint
from rltool.errors import EngineError, EngineUnreachable
from rltool.processes.tasks import beside

CHECKS_MISSED = 3
"""Health checks in a row, each HEALTH_SECONDS long."""

T = TypeVar("T")


class EngineSilent(EngineUnreachable):
    """It answers nothing at all any more."""


async def while_alive(client: EngineClient, endpoint: EngineEndpoint, step: Awaitable[T]) -> T:
    """The step's result; EngineSilent once the engine has missed CHECKS_MISSED health checks in a row."""
    async with beside(step) as (work,), beside(_silence(client, endpoint)) as (watch,):
        await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        raise EngineSilent(
            f"{endpoint.url} missed {CHECKS_MISSED} health checks in a row in the middle of a weight sync"
        )


async def _silence(client: EngineClient, endpoint: EngineEndpoint) -> None:
    """Returns when the engine has fallen silent."""
    missed = 0
    while missed < CHECKS_MISSED:
        if missed == 0:
            await asyncio.sleep(HEALTH_SECONDS)
        try:
            await client.health(endpoint, timeout=HEALTH_SECONDS)
            missed = 0
        except EngineUnreachable:
            missed += 1
        except EngineError:  # any answer counts; the step has a deadline of its own
            missed = 0
            await asyncio.sleep(HEALTH_SECONDS)
