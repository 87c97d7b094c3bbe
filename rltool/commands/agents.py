"""`rltool agents`."""

from __future__ import annotations

import asyncio
import os
import platform
import signal
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from rltool.agents.pool import Agents, load_agents
from rltool.agents.remote import AgentWorker
from rltool.engines.client import EngineClient
from rltool.processes.keys import read_key
from rltool.terminal import Console

console = Console()


def agents(
    gateway: Annotated[str, typer.Argument(help="URL of the gateway.", metavar="URL")],
    agent: Annotated[
        list[str], typer.Argument(help="package.module:function, or the words of a command line (behind --).")
    ],
    key_file: Annotated[Path, typer.Option(help="File with the key that opens the gateway's sessions.")],
    at_once: Annotated[int, typer.Option(min=1, help="Episodes side by side.")] = 8,
    workers: Annotated[int, typer.Option(min=1, help="Processes for an async function.")] = 2,
) -> None:
    """Run agents on this host for a run elsewhere whose rollout.agent is "remote"; it dials that run's gateway."""
    key = read_key(key_file, gateway)
    [first, *more] = agent
    running = load_agents(first if not more and ":" in first else agent, workers=workers)
    console.print(f"agents for {gateway}, {at_once} at once; Ctrl-C ends them")
    with suppress(asyncio.CancelledError):  # SIGTERM
        asyncio.run(_work(gateway, key, running, at_once))


async def _work(gateway: str, key: str, agents: Agents, at_once: int) -> None:
    working = asyncio.current_task()
    assert working is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, working.cancel)
    name = f"{platform.node()}:{os.getpid()}"
    try:
        async with EngineClient() as client:
            await AgentWorker(client, gateway, key, agents, name=name, log=_log).work(at_once)
    finally:
        await agents.close()


def _log(line: str) -> None:
    console.print(line)
