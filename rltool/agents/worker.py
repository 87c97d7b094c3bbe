"""A process that runs an agent's async function: many episodes side by side on its event loop.

A job is the JSON of an AgentTask. Its answer: {"reward"} (a Result) or {"failed": reason}. Its own deadline ends an
episode; one that blocks the event loop is the parent's to end, with this process.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from rltool.agents.outcome import result_of
from rltool.agents.task import AgentTask
from rltool.config.import_path import load_callable
from rltool.errors import UsageError
from rltool.processes.tasks import Background
from rltool.processes.worker_pool import Parent
from rltool.rollout.rewards.worker import describe


def main(parent: Parent, function_path: str) -> None:
    """Serve until killed."""
    try:
        function = load_callable(function_path, setting="rollout.agent", takes=("task",))
    except UsageError as error:
        parent.unusable(str(error))
        return
    asyncio.run(_serve(parent, function))


async def _serve(parent: Parent, function: Callable[..., Any]) -> None:
    loop = asyncio.get_running_loop()
    episodes: dict[int, asyncio.Task[None]] = {}
    background = Background()

    async def run(number: int, task: AgentTask) -> None:
        try:
            parent.answer(number, await _outcome(function, task))
        finally:
            del episodes[number]

    def take(number: int, task: bytes) -> None:
        if task:
            work = run(number, AgentTask(**json.loads(task)))
            episodes[number] = background.start(work, f"episode {number}")
        elif number in episodes:
            episodes[number].cancel()

    parent.ready(lambda number, task: loop.call_soon_threadsafe(take, number, task))
    await asyncio.Event().wait()


async def _outcome(function: Callable[..., Any], task: AgentTask) -> dict[str, Any]:
    deadline = asyncio.timeout(task.deadline)
    try:
        async with deadline:
            result = await function(task)
        return {"reward": result_of(result)}
    except (Exception, SystemExit) as error:  # an agent's exception is its episode's failure
        if isinstance(error, TimeoutError) and deadline.expired():
            return {"failed": f"did not end within deadlines.agent = {task.deadline:g} s"}
        return {"failed": describe(error)}
