"""Bringing engines back that a trainer left paused or in a transfer group when it died."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from rltool.engines.client import EngineClient
from rltool.engines.dialects.table import controls
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet.lease import ask_lease, leased_to_another
from rltool.engines.types import EngineInfo, Holder
from rltool.errors import EngineError, UsageError

TRANSFER_GROUP = "rltool-weights"
"""The name under which every rltool trainer joins engines. Constant,
so that anyone can shut down what a dead one left behind."""
STEPS = 2
"""Of `timeout` each, for which a stolen lease must last."""


@dataclass(frozen=True)
class Resumed:
    """`was_paused` None: not reported. `transfer`: what became of the transfer group.
    `error`: it could not be resumed."""

    url: str
    was_paused: bool | None = None
    transfer: str = ""
    error: str | None = None


async def resume_engines(
    client: EngineClient, engines: Sequence[EngineEndpoint], *, timeout: float, holder: Holder, steal: bool = False
) -> list[Resumed]:
    """Shut the transfer group down and unpause, all engines side by side; one result each, failures too, in order.

    An engine that a run has leased is left as it is, unless that run has died, or `steal`; `holder` (whose run the
    client names) then has the lease meanwhile. `timeout`: seconds for each step (probe, group, resume). An engine
    without a known dialect is asked for it. Engines that take no weights were never paused by a trainer: they are to be
    left out by the caller.
    """
    return list(await asyncio.gather(*(_resume(client, engine, timeout, holder, steal) for engine in engines)))


async def _resume(client: EngineClient, engine: EngineEndpoint, timeout: float, holder: Holder, steal: bool) -> Resumed:
    try:
        info = await client.probe(engine, timeout=timeout)
        leased = leased_to_another(info.lease, holder.run)
        if leased is not None and not steal:
            return Resumed(engine.url, error=leased)
        known = engine.model_copy(update={"dialect": info.dialect})
        async with AsyncExitStack() as stack:
            if info.lease is not None:
                await stack.enter_async_context(_stolen(client, known, info.lease.holder, holder, STEPS * timeout))
            return await _unpause(client, known, info, timeout)
    except (EngineError, UsageError) as error:  # UsageError: of a kind that rltool does not control
        return Resumed(engine.url, error=str(error))


@asynccontextmanager
async def _stolen(
    client: EngineClient, engine: EngineEndpoint, victim: Holder, holder: Holder, seconds: float
) -> AsyncIterator[None]:
    await ask_lease(client, engine, "steal", holder, seconds, only_from=victim.run)
    try:
        yield
    finally:
        await ask_lease(client, engine, "release", holder, seconds)


async def _unpause(client: EngineClient, engine: EngineEndpoint, info: EngineInfo, timeout: float) -> Resumed:
    requests = controls(info.dialect)
    # The group first: a resumed engine must not wait in a collective for a trainer that is gone.
    try:
        await client.run(engine, requests.leave_transfer(TRANSFER_GROUP), timeout=timeout)
        transfer = "transfer group shut down"
    except EngineError as error:  # most often: there was none
        transfer = f"no transfer group shut down: {error}"
    await client.run(engine, requests.resume(), timeout=timeout)
    return Resumed(engine.url, was_paused=info.paused, transfer=transfer)
