"""What the processes of a run are doing: what is recorded of them, and what they answer when asked."""

from __future__ import annotations

import asyncio
from pathlib import Path

from pydantic import BaseModel

from rltool.engines.client import EngineClient, RetryPolicy
from rltool.engines.endpoints import Endpoints, EngineEndpoint
from rltool.engines.types import HttpRequest
from rltool.errors import EngineError, EngineUnreachable
from rltool.processes.run_directory import RunDirectory
from rltool.processes.state import ProcessState, is_alive, read_states

ASK_SECONDS = 5.0


class ProcessStatus(BaseModel):
    """One row. pid and alive are None for an engine of endpoints.json without a recorded process: somebody else's, or stopped.

    health is "ok", "paused", "unreachable" or what the server said.
    """

    role: str
    pid: int | None
    alive: bool | None
    url: str | None
    health: str | None
    weight_version: str | None
    gpus: tuple[int, ...]
    log: Path | None


async def run_status(run: RunDirectory) -> list[ProcessStatus]:
    """Every process of the run, and engines in its endpoints.json that it did not start. Asks all side by side, 5 s at most."""
    states = read_states(run)
    engines = _engines(run)
    async with EngineClient(retry=RetryPolicy(attempts=1)) as client:
        rows = [_row(client, state, engines.get(state.url or "")) for state in states]
        started = {state.url for state in states}
        foreign = [engine for url, engine in engines.items() if url not in started]
        rows += [_foreign(client, index, engine) for index, engine in enumerate(foreign)]
        return list(await asyncio.gather(*rows))


def _engines(run: RunDirectory) -> dict[str, EngineEndpoint]:
    if not run.endpoints_file.exists():
        return {}
    return {engine.url: engine for model in Endpoints.load(run.endpoints_file).models.values() for engine in model.engines}


async def _row(client: EngineClient, state: ProcessState, engine: EngineEndpoint | None) -> ProcessStatus:
    alive = is_alive(state)
    health: str | None = None
    version: str | None = None
    if alive and engine is not None:
        health, version = await _ask_engine(client, engine)
    elif alive and state.url is not None:
        health = await _ask(client, state.url, "/readiness" if state.role == "router" else "/health")
    return ProcessStatus(
        role=state.role, pid=state.pid, alive=alive, url=state.url, health=health, weight_version=version, gpus=state.gpus, log=state.log
    )


async def _foreign(client: EngineClient, index: int, engine: EngineEndpoint) -> ProcessStatus:
    health, version = await _ask_engine(client, engine)
    return ProcessStatus(
        role=f"endpoint-{index}", pid=None, alive=None, url=engine.url, health=health, weight_version=version, gpus=engine.gpus, log=None
    )


async def _ask_engine(client: EngineClient, engine: EngineEndpoint) -> tuple[str, str | None]:
    try:
        info = await client.probe(engine, timeout=ASK_SECONDS)
    except EngineUnreachable:
        return "unreachable", None
    except EngineError as error:
        return str(error), None
    if info.paused:
        return "paused", info.weight_version
    try:
        await client.health(engine.model_copy(update={"dialect": info.dialect}), timeout=ASK_SECONDS)
    except EngineError as error:
        return str(error), info.weight_version
    return "ok", info.weight_version


async def _ask(client: EngineClient, url: str, path: str) -> str:
    try:
        await client.request(url, HttpRequest("GET", path), timeout=ASK_SECONDS, retry=False)
    except EngineUnreachable:
        return "unreachable"
    except EngineError as error:
        return str(error)
    return "ok"
