"""Python processes that run a user's functions for this one: started, given jobs, killed with all that they started,
replaced.

Each has a session of its own, so Ctrl-C does not reach it and one signal ends it with its children, and a socket of its
own, so a function may print. When the parent has gone, a worker kills its own group.

Messages, either way: HEADER (the job's number, the length of the rest in bytes), then the rest. To a worker: the bytes
of a job; none cancel it. From a worker: JSON; about number 0, the worker itself, READY or {"unusable": reason}, about a
job its answers. The first part of this file runs in the parent, the second (`Parent`) in a worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import json
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from rltool.errors import RltoolError, UsageError
from rltool.processes.tasks import Background

HEADER = struct.Struct(">QQ")
READY = "ready"

START_SECONDS = 120.0
"""For a worker to import the function's module: one that brings torch takes ten, on a busy host more."""
REAP_SECONDS = 5.0
"""For a killed process to be gone."""
EXIT_SECONDS = 1.0
"""Between the end of a worker's connection and that of its process."""

BOOTSTRAP = """\
import sys
sys.path[:] = {path!r}
from rltool.processes.worker_pool import run_worker
run_worker({descriptor}, {main!r})
"""
"""Not multiprocessing: its children import the parent's main module anew, which in a Ray actor is Ray's own worker."""


class WorkerLost(RltoolError):
    """A worker ended, or was killed, before it gave an answer. The message: how it ended."""


class Job:
    """What a worker was given, and its answers."""

    def __init__(self, worker: Worker, answers: int) -> None:
        self._worker, self.missing = worker, answers
        self.arrived: asyncio.Queue[Any] = asyncio.Queue()

    async def answer(self, seconds: float) -> Any:
        """The next one. Raises TimeoutError, and WorkerLost once the worker has ended."""
        async with asyncio.timeout(seconds):
            answer = await self.arrived.get()
        if isinstance(answer, RltoolError):
            raise answer
        self.missing -= 1
        return answer

    def kill_worker(self, reason: str) -> None:
        """Its other jobs are lost too."""
        self._worker.lose(WorkerLost(reason))


class WorkerPool:
    """`workers` processes that run `main`. Owned by one event loop; its constructor and `start` need none.

    name: of one worker, in errors. main: `package.module:function`, called in each as main(Parent, *arguments); the
    arguments are pickled. shared: a worker has any number of jobs at a time, and cancels one by itself; else it has one
    job at a time, and is killed to cancel it.
    """

    def __init__(
        self, name: str, main: str, arguments: tuple[Any, ...], *, workers: int, shared: bool = False
    ) -> None:  # fmt: skip
        self._name, self._main, self._arguments, self._shared = name, main, arguments, shared
        self.workers: list[Worker | None] = [None] * workers
        """None: not started yet."""
        self._turns = contextlib.nullcontext() if shared else asyncio.Semaphore(workers)
        self._numbers = itertools.count(1)
        self._unreaped: list[Worker] = []
        self.closed = False

    def start(self) -> None:
        """Start every worker that does not live."""
        for place in range(len(self.workers)):
            self._living(place)

    async def ready(self) -> None:
        """Wait until those that were started have imported what they need; see Worker.ready."""
        await asyncio.gather(*(worker.ready() for worker in self.workers if worker is not None))

    @contextlib.asynccontextmanager
    async def job(self, payload: bytes, *, answers: int = 1) -> AsyncIterator[Job]:
        """Give it to the least busy worker, started if need be; cancelled where the block is left before it has had so
        many answers. Raises as Worker.ready, and RltoolError if the pool is closed."""
        async with self._turns:
            worker = self._least_busy()
            number, job = next(self._numbers), Job(worker, answers)
            worker.jobs[number] = job  # before it is ready: else all that wait for the first would wait for the same
            given = False
            try:
                await worker.ready()
                given = True
                worker.send(number, payload)
                yield job
            finally:
                del worker.jobs[number]
                if given and job.missing and self._shared:
                    worker.send(number, b"")
                elif given and job.missing:
                    worker.lose(WorkerLost("its job was cancelled"))

    async def close(self) -> None:
        """Kill the workers; jobs in progress raise WorkerLost. May be called twice."""
        self.closed = True
        for worker in self._unreaped:
            worker.lose(WorkerLost("the pool was closed"))
        await asyncio.to_thread(self._reap, REAP_SECONDS)

    def _least_busy(self) -> Worker:
        def busy(place: int) -> tuple[int, bool]:
            worker = self.workers[place]
            if worker is None or not worker.alive:
                return 0, True
            return len(worker.jobs), not worker.is_ready

        return self._living(min(range(len(self.workers)), key=busy))

    def _living(self, place: int) -> Worker:
        worker = self.workers[place]
        if worker is None or not worker.alive:
            if self.closed:
                raise RltoolError(f"{self._name} cannot be started: the pool is closed")
            self._reap(0.0)
            worker = self.workers[place] = Worker(self._name, self._main, self._arguments)
            self._unreaped.append(worker)
        return worker

    def _reap(self, seconds: float) -> None:
        ends = time.monotonic() + seconds
        self._unreaped = [
            worker for worker in self._unreaped if worker.alive or not worker.gone(max(0.0, ends - time.monotonic()))
        ]


class Worker:
    """One process, and the parent's end of its socket."""

    def __init__(self, name: str, main: str, arguments: tuple[Any, ...]) -> None:
        self._name = name
        self._socket, theirs = socket.socketpair()
        with theirs, tempfile.TemporaryFile() as given:
            pickle.dump(arguments, given)  # not in argv, which every user of the host can read: there may be keys in it
            given.seek(0)
            code = BOOTSTRAP.format(path=sys.path, descriptor=theirs.fileno(), main=main)
            self.process = subprocess.Popen(
                # unbuffered: what a function prints before it hangs is what its author needs
                [sys.executable, "-u", "-c", code], stdin=given, pass_fds=[theirs.fileno()], start_new_session=True,
            )  # fmt: skip
        self.jobs: dict[int, Job] = {}
        self._lost: RltoolError | None = None
        self.is_ready = False
        self._started = asyncio.Event()
        """It is ready, or never will be."""
        self._background = Background(lambda failure: self.lose(WorkerLost(str(failure))))
        self._reading: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        has_ended = self.process.poll() is not None
        if has_ended and self._reading is None:  # else answers may still be in the socket
            self.lose(WorkerLost(self._how_it_ended()))
        return self._lost is None and not has_ended

    async def ready(self) -> None:
        """Raises UsageError if it cannot import its function, WorkerLost if it ends, or takes over START_SECONDS."""
        if self._reading is None and self._lost is None:
            self._reading = self._background.start(self._read(), f"answers of {self._name}")
            self._reading.add_done_callback(lambda _: self._socket.close())
        try:
            async with asyncio.timeout(START_SECONDS):
                await self._started.wait()
        except TimeoutError:
            self.lose(WorkerLost(f"it did not import its function within {START_SECONDS:g} s"))
        if self._lost is not None and not self.is_ready:
            raise self._lost.with_context(before=f"{self._name} did not start: ") from self._lost

    def send(self, number: int, payload: bytes) -> None:
        if self._lost is None:
            self._writer.write(HEADER.pack(number, len(payload)) + payload)

    def lose(self, error: RltoolError) -> None:
        """Kill it and what it has started; its jobs raise this."""
        if self._lost is not None:
            return
        self._lost = error
        self._started.set()
        for job in self.jobs.values():
            job.arrived.put_nowait(error)
        if self._reading is None:
            self._socket.close()
        else:
            self._reading.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def gone(self, seconds: float) -> bool:
        """Whether it has been reaped; waits so long for it."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    async def _read(self) -> None:
        reader, self._writer = await asyncio.open_connection(sock=self._socket)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while True:
                    number, length = HEADER.unpack(await reader.readexactly(HEADER.size))
                    self._take(number, json.loads(await reader.readexactly(length)))
        finally:  # not the socket alone: the event loop would refuse the next one that gets its descriptor
            self._writer.transport.abort()
        await asyncio.to_thread(self.gone, EXIT_SECONDS)
        self.lose(WorkerLost(self._how_it_ended()))

    def _take(self, number: int, message: Any) -> None:
        if number:
            if (job := self.jobs.get(number)) is not None:
                job.arrived.put_nowait(message)
        elif message == READY:
            self.is_ready = True
            self._started.set()
        else:
            self.lose(UsageError(message["unusable"]))

    def _how_it_ended(self) -> str:
        code = self.process.returncode
        if code is None:
            how = "it closed its connection"
        else:
            how = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        return how if self.is_ready else f"{how}; see its output"


def run_worker(descriptor: int, main: str) -> None:
    """What a worker's process runs. Its main function keeps the main thread, where libraries that set an alarm for
    their own time limits want to be."""
    parent = Parent(descriptor)
    module, _, name = main.partition(":")
    getattr(importlib.import_module(module), name)(parent, *pickle.load(sys.stdin.buffer))


class Parent:
    """A worker's end of the socket."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self._connection = socket.socket(fileno=descriptor)
        threading.Thread(target=self._receive, daemon=True).start()

    def ready(self, take: Callable[[int, bytes], object]) -> None:
        """Jobs may come. take: called in another thread with each one's number and bytes; none: it is cancelled."""
        self._take = take
        self.answer(0, READY)

    def unusable(self, reason: str) -> None:
        """No jobs can be done."""
        self.answer(0, {"unusable": reason})

    def answer(self, number: int, value: Any) -> None:
        """value: JSON."""
        text = json.dumps(value).encode()
        self._connection.sendall(HEADER.pack(number, len(text)) + text)

    def _receive(self) -> None:
        """Also the watch over the parent: when it has gone, this process and what its function started go too."""
        stream = self._connection.makefile("rb")
        try:
            while len(header := stream.read(HEADER.size)) == HEADER.size:
                number, length = HEADER.unpack(header)
                self._take(number, stream.read(length))
        finally:
            os.killpg(0, signal.SIGKILL)
