"""Runs any reward function: a plain one in processes of its own, an async one on the event loop.

A reward function is `f(sample: Sample, text: str) -> float`, plain or async; `text` is the decoded response. An async
one may take a third argument, `context`, by which it reaches other models. A plain
one that hangs, dies or holds the interpreter must not hold up the rollout manager, so it runs in worker processes. They
are started with the pool and import the function once; a group of samples travels in one message, and every sample is
answered as soon as it is scored. So a deadline is that of one sample, a worker that hangs or dies is known to have done
so at one sample, and after that one has failed the others of its group go on in a new worker.

Not here: what a failure means for the sample, its group and the run (rltool.rollout.scoring).
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import importlib.util
import inspect
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rltool.config.import_path import load_callable
from rltool.config.reward import SHIPPED
from rltool.errors import RltoolError, UsageError
from rltool.processes.tasks import Background, beside
from rltool.rollout.model_clients import Models, RewardContext, ended_in_time, too_slow
from rltool.rollout.reward_worker import ACCEPTED, CHANGED, LENGTH, READY, describe, finite
from rltool.rollout.sample import Sample

RewardFunction = Callable[..., Any]
CONTEXT = "context"
"""The argument by which an async function says that it wants a RewardContext."""

START_SECONDS = 120.0
"""For a worker to import the function's module: one that brings torch takes ten, on a busy host more."""
LOST_GROUPS = 3
"""How many workers in a row may die before they have taken up a group, which is nobody's sample's fault."""
REAP_SECONDS = 5.0
"""For a killed process to be gone."""

BOOTSTRAP = """\
import sys
sys.path[:] = {path!r}
from rltool.rollout.reward_worker import main
main({descriptor}, {function!r}, {refuse}, {slower})
"""
"""Not multiprocessing: its children import the parent's main module anew, which in a Ray actor is Ray's own worker."""


@dataclass(frozen=True)
class RewardFailure:
    """Why a sample has no reward."""

    reason: str


class RewardPool:
    """The reward function of a run. Construct it early: its workers warm up meanwhile. Owned by one event loop.

    function_path: a name of config.reward.SHIPPED or `package.module:function`; UsageError if it cannot be imported.
    options: keyword arguments of every call. workers: processes for a plain
    function, so many groups are scored at once; an async function needs none, and its samples run all side by side.
    timeout: seconds for each sample. refuse_changes: a function that changes its sample fails it (a worker's changes
    are lost, an async function's are not). models: what an async function that takes `context` reaches by it. slower:
    seconds that each sample takes longer.
    """

    def __init__(
        self, function_path: str, *, workers: int, timeout: float, refuse_changes: bool = False,
        models: Models | None = None, options: Mapping[str, Any] | None = None, slower: float = 0.0,
    ) -> None:  # fmt: skip
        self._path, self._timeout, self._refuse_changes = import_path_of(function_path), timeout, refuse_changes
        self._options, self._slower = dict(options or {}), slower
        self._function = load_reward(function_path, self._options)
        asks = wants_context(self._function)
        self._models = (asks and models) or Models()
        self._keywords = self._options | ({CONTEXT: RewardContext(self._models)} if asks else {})
        self.is_async = is_async(self._function)
        self._closed = False
        self._workers: set[_Worker] = set()
        self._killed: list[_Worker] = []
        self._idle: asyncio.Queue[_Worker | None] = asyncio.Queue()
        """None stands for a worker that is started when it is needed."""
        if not self.is_async:
            for _ in range(workers):
                self._idle.put_nowait(self._start())

    async def ready(self) -> None:
        """Wait until every worker has imported the function. Raises RltoolError for one that cannot."""
        await asyncio.gather(*(worker.ready() for worker in self._workers))

    async def score(self, samples: list[Sample], texts: list[str]) -> list[float | RewardFailure]:
        """The reward of each sample, of which a plain function gets a copy. Call it once per group.

        A function that raises, is too slow, kills its process or returns anything but a finite number fails that
        sample. RltoolError only if workers die without a sample's doing.
        """
        if len(samples) != len(texts):
            raise ValueError(f"{len(samples)} samples and {len(texts)} texts")
        if self._closed:
            raise RltoolError("the reward pool is closed")
        if self.is_async:
            return await self._score_on_the_loop(samples, texts)
        packed, outcomes = _pack(samples, texts)
        lost = 0
        while left := [index for index in range(len(samples)) if index not in outcomes]:
            lost = 0 if await self._score_in_a_worker(left, packed, outcomes) else lost + 1
            if lost == LOST_GROUPS:
                raise RltoolError(
                    f"{lost} reward workers in a row died before they took up a group: is the host out of memory?"
                )
        return [outcomes[index] for index in range(len(samples))]

    async def close(self) -> None:
        """Kill the workers. May be called twice; a `score` that is in progress raises."""
        self._closed = True
        for worker in list(self._workers):
            self._kill(worker)
        await asyncio.to_thread(self._reap, REAP_SECONDS)

    async def _score_in_a_worker(
        self, indices: list[int], packed: list[bytes], outcomes: dict[int, float | RewardFailure]
    ) -> bool:
        """Adds to `outcomes`, in order, until all are there or the worker is lost. False if it never took the group
        up."""
        frame = pickle.dumps([packed[index] for index in indices])
        worker = await self._idle.get()
        after: _Worker | None = None
        try:
            if worker is None or not worker.alive:
                if worker is not None:
                    self._kill(worker)
                worker = self._start()
            await worker.ready()
            if not await worker.send(frame) or await worker.receive(START_SECONDS) != ACCEPTED:
                return False
            for index in indices:
                try:
                    answer = await worker.receive(self._timeout)
                except TimeoutError:
                    outcomes[index] = RewardFailure(too_slow(self._timeout))
                    after = self._start()
                    return True
                if answer is None:
                    if self._closed:
                        raise RltoolError("the reward pool was closed while it scored")
                    outcomes[index] = RewardFailure(f"the reward function ended its process ({await worker.end()})")
                    after = self._start()
                    return True
                outcomes[index] = RewardFailure(answer["failed"]) if isinstance(answer, dict) else float(answer)
            after = worker
            return True
        finally:
            # Cancelled, or lost: what it is doing is nobody's any more.
            if worker is not None and after is not worker:
                self._kill(worker)
            self._idle.put_nowait(after)

    def _start(self) -> _Worker:
        self._reap(0.0)
        if self._closed:
            raise RltoolError("the reward pool is closed")
        worker = _Worker(self._path, self._refuse_changes, self._options, self._slower)
        self._workers.add(worker)
        return worker

    def _kill(self, worker: _Worker) -> None:
        worker.kill()
        self._workers.discard(worker)
        self._killed.append(worker)

    def _reap(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self._killed = [worker for worker in self._killed if not worker.gone(max(0.0, deadline - time.monotonic()))]

    async def _score_on_the_loop(self, samples: list[Sample], texts: list[str]) -> list[float | RewardFailure]:
        # Their end is not waited for: a function may ignore its cancellation.
        async with beside(*map(self._call, samples, texts), grace=0) as tasks:
            for task in tasks:
                task.add_done_callback(look_at)
            late = RewardFailure(await ended_in_time(tasks, self._timeout, self._models) or "")
            return [_outcome(task) if task.done() else late for task in tasks]

    async def _call(self, sample: Sample, text: str) -> float:
        before = copy.deepcopy(sample) if self._refuse_changes else sample
        if self._slower:
            await asyncio.sleep(self._slower)
        try:
            reward = finite(await self._function(sample, text, **self._keywords))
        except SystemExit as error:  # of a task it would end the event loop
            raise RuntimeError(describe(error)) from error
        if before != sample:
            raise ValueError(CHANGED)
        return reward


def import_path_of(name: str) -> str:
    """Of a reward that ships with rltool; any other text is an import path already."""
    return SHIPPED[name].path if name in SHIPPED else name


def load_reward(
    name: str, options: Mapping[str, Any] | None = None, *, setting: str = "reward.function"
) -> RewardFunction:
    """A reward by name or import path as a function; UsageError for a path that leads nowhere, or to what is no reward,
    a package that is not installed, and options that the function does not take."""
    shipped = SHIPPED.get(name)
    if shipped is not None and shipped.package and importlib.util.find_spec(shipped.package) is None:
        raise UsageError(
            f"{setting} = {name!r} needs a package that is not installed here: pip install 'rltool[{shipped.extra}]'"
        )
    path = import_path_of(name)
    function = load_callable(path, setting=setting)
    takes = ("sample", "text")
    if wants_context(function):
        if not is_async(function):
            raise UsageError(
                f"{setting} = {path!r} takes a context, so it must be `async def`: plain functions run in processes of "
                "their own, from which no engine is reached"
            )
        takes = (*takes, CONTEXT)
    return load_callable(path, setting=setting, takes=takes, options=options or ())


def wants_context(function: Callable[..., Any]) -> bool:
    """Whether it has an argument of that name."""
    try:
        return CONTEXT in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False  # of some functions written in C nothing is known


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine; callable objects with an async __call__ count."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


class _Worker:
    """One process and the parent's end of its socket. Its session is its own: Ctrl-C does not reach it, and what the
    function starts dies with it."""

    def __init__(self, function_path: str, refuse_changes: bool, options: dict[str, Any], slower: float) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs, tempfile.TemporaryFile() as given:
            pickle.dump(options, given)  # not in argv, which every user of the host can read: there may be keys in them
            given.seek(0)
            code = BOOTSTRAP.format(
                path=sys.path,
                descriptor=theirs.fileno(),
                function=function_path,
                refuse=refuse_changes,
                slower=slower,
            )
            self._process = subprocess.Popen(
                # unbuffered: what a function prints before it hangs is what its author needs
                [sys.executable, "-u", "-c", code],
                stdin=given,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._background = Background()
        self._starting: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    async def ready(self) -> None:
        """Raises RltoolError if it has not imported the function within START_SECONDS."""
        if self._starting is None:
            self._starting = self._background.start(self._connect(), "a reward worker starts", awaited=True)
        await asyncio.shield(self._starting)

    async def _connect(self) -> None:
        self._streams = await asyncio.open_connection(sock=self._socket)
        try:
            answer = await self.receive(START_SECONDS)
        except TimeoutError:
            raise RltoolError(f"a reward worker did not import its function within {START_SECONDS:g} s") from None
        if answer != READY:
            reason = (
                answer["unusable"]
                if isinstance(answer, dict)
                else f"it ended ({await self.end()}); its own output says why"
            )
            raise RltoolError(f"a reward worker did not start: {reason}")

    async def send(self, frame: bytes) -> bool:
        """False if it is gone."""
        assert self._streams is not None
        writer = self._streams[1]
        try:
            writer.write(LENGTH.pack(len(frame)))
            writer.write(frame)
            await writer.drain()
        except ConnectionError:
            return False
        return True

    async def receive(self, timeout: float) -> Any:
        """Its next line; None if it is gone; TimeoutError."""
        assert self._streams is not None
        try:
            async with asyncio.timeout(timeout):
                line = await self._streams[0].readline()
        except ConnectionError:
            return None
        return json.loads(line) if line.endswith(b"\n") else None

    async def end(self) -> str:
        """How it ended, for an error message."""
        for _ in range(100):
            if not self.alive:
                break
            await asyncio.sleep(0.01)
        code = self._process.returncode
        if code is None:
            return "it closed its connection"
        return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"

    def kill(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
        if self._streams is not None:
            self._streams[1].close()
        else:
            self._socket.close()
        if self.alive:
            with contextlib.suppress(ProcessLookupError):  # it ends by itself, too, and is reaped by a thread
                os.killpg(self._process.pid, signal.SIGKILL)

    def gone(self, seconds: float) -> bool:
        """Whether it has been reaped; waits so long for it."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True


def _pack(samples: list[Sample], texts: list[str]) -> tuple[list[bytes], dict[int, float | RewardFailure]]:
    """What travels of each sample, and the failures of those that cannot, by index: anything may be in a sample's
    metadata."""
    packed, failures = [], {}
    for index, pair in enumerate(zip(samples, texts, strict=True)):
        try:
            packed.append(pickle.dumps(pair))
        except Exception as error:
            packed.append(b"")
            failures[index] = RewardFailure(f"the sample cannot be sent to a reward worker: {describe(error)}")
    return packed, failures


def look_at(task: asyncio.Future[float]) -> None:
    """So that asyncio does not log the error of one that came too late."""
    if not task.cancelled():
        task.exception()


def _outcome(task: asyncio.Future[float]) -> float | RewardFailure:
    if task.cancelled():
        return RewardFailure("CancelledError: the reward function was cancelled from within")
    error = task.exception()
    return task.result() if error is None else RewardFailure(describe(error))
