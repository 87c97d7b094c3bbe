"""Bringing engines back that a trainer left paused or in a transfer group when it died."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from rltool.engines.client import EngineClient
from rltool.engines.dialects import dialect
from rltool.engines.endpoints import EngineEndpoint
from rltool.errors import EngineError

TRANSFER_GROUP = "rltool-weights"
"""The name under which every rltool trainer joins engines. Constant,
so that anybody can shut down what a dead one left behind."""


@dataclass(frozen=True)
class Resumed:
    """`was_paused` None: this engine does not tell. `transfer`: what became of the transfer group.
    `error`: it could not be resumed."""

    url: str
    was_paused: bool | None = None
    transfer: str = ""
    error: str | None = None


async def resume_engines(client: EngineClient, engines: Sequence[EngineEndpoint], *, timeout: float) -> list[Resumed]:
    """Shut the transfer group down and unpause, all engines side by side; one result each, failures too, in order.

    `timeout`: seconds for each step (probe, group, resume). An engine without a known dialect is asked for it. Engines
    that take no weights were never paused by a trainer: they are to be left out by the caller.
    """
    return list(await asyncio.gather(*(_resume(client, engine, timeout) for engine in engines)))


async def _resume(client: EngineClient, engine: EngineEndpoint, timeout: float) -> Resumed:
    try:
        info = await client.probe(engine, timeout=timeout)
        known = engine.model_copy(update={"dialect": info.dialect})
        requests = dialect(info.dialect)
        # The group first: a resumed engine must not wait in a collective for a trainer that is gone.
        try:
            await client.run(known, requests.shutdown_transfer(TRANSFER_GROUP), timeout=timeout)
            transfer = "transfer group shut down"
        except EngineError as error:  # most often: there was none
            transfer = f"no transfer group shut down: {error}"
        await client.run(known, requests.resume(), timeout=timeout)
    except EngineError as error:
        return Resumed(engine.url, error=str(error))
    return Resumed(engine.url, was_paused=info.paused, transfer=transfer)
