"""Where agents run: an async function in worker processes, or a command line as one process for each episode."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import signal
import tempfile
import uuid
from collections.abc import Sequence
from typing import Protocol

from rltool.agents.outcome import PARTS, AgentFailed, Result, result_of
from rltool.agents.task import AgentTask
from rltool.config.import_path import load_callable
from rltool.errors import UsageError
from rltool.processes.marks import kill_marked
from rltool.processes.worker_pool import WorkerLost, WorkerPool

GRACE_SECONDS = 10.0
"""Behind its deadline, for an episode to be reported: then its worker's event loop is blocked, and it is ended."""
BLOCKED = "an agent of this worker blocked its event loop; use async calls, or a command line"
QUOTED_CHARACTERS = 500
"""Of the end of a failed command's output."""
EPISODE_VARIABLE = "RLTOOL_EPISODE"
"""In the environment of a command and of what it starts, by which that is found when it has left its session."""
LAST_WORDS_SECONDS = 1.0
"""Behind the end of a command, for what it started to write what it has to (`> >(tee log)`)."""
END_SECONDS = 10.0
"""For a killed command to be gone."""
KEPT_BYTES = 64 * 1024
"""Of the end of a command's output, however much it prints: the reward stands in its last line."""
LARGEST_PIPE = 1024 * 1024
"""Bytes that a pipe holds at most, where the system's limit was not raised."""


class Agents(Protocol):
    async def run(self, task: AgentTask) -> Result:
        """What the agent returned. Raises AgentFailed. Cancelling it ends the agent."""
        ...

    async def close(self) -> None:
        """End what runs."""
        ...


def load_agents(agent: str | Sequence[str], *, workers: int) -> Agents:
    """agent: `package.module:function`, or the words of a command line. UsageError for a function that is not async, or
    that cannot be called with a task."""
    if not isinstance(agent, str):
        return CommandAgents(agent)
    check_agent(agent)
    return FunctionAgents(agent, workers=workers)


def check_agent(path: str) -> None:
    """UsageError unless it is an async function of a task."""
    function = load_callable(path, setting="rollout.agent", takes=("task",))
    if not inspect.iscoroutinefunction(function):
        raise UsageError(f"rollout.agent = {path!r} must be `async def`, or a list: the words of a command line")


class FunctionAgents:
    """Worker processes, each with many episodes on its event loop. Owned by one event loop."""

    def __init__(self, path: str, *, workers: int) -> None:
        self._pool = WorkerPool(
            "an agent worker", "rltool.agents.worker:main", (path,), workers=workers, shared=True
        )  # fmt: skip

    async def run(self, task: AgentTask) -> Result:
        try:
            async with self._pool.job(json.dumps(task.to_json()).encode()) as job:
                try:
                    outcome = await job.answer(task.deadline + GRACE_SECONDS)
                except TimeoutError:
                    job.kill_worker(BLOCKED)
                    raise AgentFailed(BLOCKED) from None
        except WorkerLost as error:
            raise AgentFailed(f"the agent's process ended ({error})") from error
        if "failed" in outcome:
            raise AgentFailed(outcome["failed"])
        return outcome["reward"]

    async def close(self) -> None:
        await self._pool.close()


class CommandAgents:
    """One process for each episode, in a session of its own, and with its end, or at its deadline, what it has started
    is ended, daemons too. It gets OPENAI_BASE_URL, OPENAI_API_KEY,
    ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY and RLTOOL_MODEL, and the row and the rest of its task as JSON on stdin. It
    ends with exit code 0; where the last line of its output is a JSON object with `reward`, that is the episode's (a
    list: one for each of its turns), and so is its `train_metadata`."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = tuple(words)

    async def run(self, task: AgentTask) -> Result:
        environment = {
            "OPENAI_BASE_URL": task.base_url,
            "OPENAI_API_KEY": task.api_key,
            "ANTHROPIC_BASE_URL": task.anthropic_base_url,
            "ANTHROPIC_API_KEY": task.api_key,
            "RLTOOL_MODEL": task.model,
            EPISODE_VARIABLE: uuid.uuid4().hex,
        }
        request = {"row": task.row, "model": task.model, "deadline": task.deadline, "seed": task.seed}
        with _Tail() as output, tempfile.TemporaryFile() as stdin:
            stdin.write(json.dumps(request).encode())
            stdin.seek(0)
            try:
                # No pipe of asyncio's: its processes have not ended before their pipes are closed, by daemons too.
                process = await asyncio.create_subprocess_exec(
                    *self._words, env={**os.environ, **environment}, start_new_session=True,
                    stdin=stdin, stdout=output.write_end, stderr=asyncio.subprocess.STDOUT,
                )  # fmt: skip
            except OSError as error:
                raise UsageError(f"rollout.agent: {self._words[0]} cannot be started: {error.strerror}") from error
            try:
                output.begin()
                async with asyncio.timeout(task.deadline):
                    await process.wait()
                await output.closed(LAST_WORDS_SECONDS)
            except TimeoutError:
                raise AgentFailed(f"did not end within deadlines.agent = {task.deadline:g} s") from None
            finally:
                await _end(process, environment[EPISODE_VARIABLE])
            text = output.rest().decode("utf-8", "replace").rstrip()
        if process.returncode:
            raise AgentFailed(f"ended with exit code {process.returncode}: {text[-QUOTED_CHARACTERS:]}")
        return _result_in(text)

    async def close(self) -> None:
        """Every process ends with its `run`."""


class _Tail:
    """The last KEPT_BYTES that are written into a pipe, which any process may hold open for as long as it likes."""

    def __enter__(self) -> _Tail:
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self._kept = bytearray()
        self._closed = asyncio.Event()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._let_go()
        os.close(self._read_end)

    def begin(self) -> None:
        """What was started has the other end."""
        self._let_go()
        asyncio.get_running_loop().add_reader(self._read_end, self._take)

    async def closed(self, seconds: float) -> None:
        """Wait until no process has the other end, or so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closed.wait()

    def rest(self) -> bytes:
        """What is there, all that has been written by now included."""
        for _ in range(1 + LARGEST_PIPE // KEPT_BYTES):
            if not self._take():
                break
        return bytes(self._kept)

    def _take(self) -> bool:
        """Whether there was something."""
        try:
            block = os.read(self._read_end, KEPT_BYTES)
        except BlockingIOError:
            return False
        if not block:
            self._stop()
        self._kept.extend(block)
        del self._kept[:-KEPT_BYTES]
        return bool(block)

    def _stop(self) -> None:
        asyncio.get_running_loop().remove_reader(self._read_end)
        self._closed.set()

    def _let_go(self) -> None:
        if self.write_end >= 0:
            os.close(self.write_end)
            self.write_end = -1


async def _end(process: asyncio.subprocess.Process, episode: str) -> None:
    """Kill it and what it has started. A process of another user, such as root's of a container, is not found."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(END_SECONDS):
            await process.wait()
    await asyncio.to_thread(kill_marked, EPISODE_VARIABLE, episode)


def _result_in(text: str) -> Result:
    last = text.rpartition("\n")[2]
    try:
        found = json.loads(last)
    except ValueError:
        return None
    if not isinstance(found, dict):
        return None
    parts = {name: found[name] for name in PARTS if found.get(name) is not None}
    try:
        return result_of(parts if "train_metadata" in parts else parts.get("reward"))
    except ValueError as error:
        raise AgentFailed(f"its result: {error}") from error
