"""A process that runs an agent's async function: many episodes side by side on its event loop.

JSON lines over a socket that the parent has left to this process. In: {"id", "task"}, {"cancel": id}. Out: READY or
{"unusable": reason}, then for each episode {"id", "reward"} (a Result) or {"id", "failed"}. Its own deadline ends an
episode; one that blocks the event loop is the parent's to end, with this process.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import Callable
from typing import Any

from rltool.agents.outcome import result_of
from rltool.agents.task import AgentTask
from rltool.config.import_path import load_callable
from rltool.errors import UsageError
from rltool.processes.tasks import Background
from rltool.rollout.reward_worker import describe

READY = "ready"
LONGEST_LINE = 64 * 1024 * 1024
"""A row of the data set may be long."""


def main(descriptor: int, function_path: str) -> None:
    """Serve until the parent closes its end of the socket, or dies."""
    os.set_inheritable(descriptor, False)
    asyncio.run(_serve(socket.socket(fileno=descriptor), function_path))


async def _serve(connection: socket.socket, function_path: str) -> None:
    reader, writer = await asyncio.open_connection(sock=connection, limit=LONGEST_LINE)

    def say(value: Any) -> None:
        writer.write(json.dumps(value).encode() + b"\n")

    try:
        function = load_callable(function_path, setting="rollout.agent", takes=("task",))
    except UsageError as error:
        say({"unusable": str(error)})
        await writer.drain()
        return
    say(READY)
    episodes: dict[int, asyncio.Task[None]] = {}
    background = Background()

    async def run(number: int, task: AgentTask) -> None:
        try:
            say({"id": number, **await _outcome(function, task)})
        finally:
            episodes.pop(number, None)

    while line := await reader.readline():
        message = json.loads(line)
        if "cancel" in message:
            if message["cancel"] in episodes:
                episodes[message["cancel"]].cancel()
        else:
            number = message["id"]
            episodes[number] = background.start(run(number, AgentTask(**message["task"])), f"episode {number}")
    os.killpg(0, signal.SIGKILL)  # what the agents have started goes too


async def _outcome(function: Callable[..., Any], task: AgentTask) -> dict[str, Any]:
    deadline = asyncio.timeout(task.deadline)
    try:
        async with deadline:
            result = await function(task)
        return {"reward": result_of(result)}
    except (Exception, SystemExit) as error:  # whatever an agent raises is its episode's failure
        if isinstance(error, TimeoutError) and deadline.expired():
            return {"failed": f"did not end within deadlines.agent = {task.deadline:g} s"}
        return {"failed": describe(error)}
