"""Trainer ranks for tests: two processes that stay alive, with hard deadlines; forked, as commands are, from one that
has imported Megatron, which takes six seconds."""

from __future__ import annotations

import gc
import multiprocessing as mp
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import psutil

from tests.e2e.commands import FORKED
from tests.e2e.engines import free_port

DEADLINE = 120.0
"""Seconds for one case. A rank that raises leaves the others waiting in a collective: they are ended."""
IDLE_SECONDS = 30.0
"""After which ranks without a case end: those that had hundreds keep a third of a core busy (_serve)."""
MOST_THREADS = 400
"""Of a rank; one that has more ends after its case. Two with 2,000 each took both cores for their polling."""


class CaseFailed(AssertionError):
    """A case raised in a rank; carries the ranks' tracebacks."""


@dataclass(frozen=True)
class Place:
    """Where a case runs: what every trainer wants to know."""

    rank: int
    world_size: int
    port: int


def _serve(pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    while (job := pipe.recv()) is not None:
        case, place, arguments = job
        try:
            pipe.send((True, case(place, *arguments)))
        except BaseException:
            pipe.send((False, f"rank {place.rank}:\n{traceback.format_exc()}"))
        # A model's references go in circles and hold its process groups, and each of these has a gloo thread that wakes
        # up a hundred times a second. Some stay all the same.
        gc.collect()


class RankPool:
    """`run(case, world_size, *arguments)` calls case(place, *arguments) on each rank and returns the results by rank.

    case must be a module-level function, and arguments and results must pickle.
    """

    def __init__(self, size: int = 2) -> None:
        self._size = size
        self._workers: list[tuple[mp.process.BaseProcess, Connection]] = []
        self._lock = threading.Lock()
        self._idle: threading.Timer | None = None

    def _start(self) -> None:
        for _ in range(self._size):
            ours, theirs = FORKED.Pipe()
            # Not daemonic: dist_checkpointing forks writers, which daemons may not.
            process = FORKED.Process(target=_serve, args=(theirs,), daemon=False)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def run(self, case: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
        with self._lock:
            if self._idle is not None:
                self._idle.cancel()
            try:
                return self._run(case, world_size, *arguments)
            finally:
                self._idle = threading.Timer(IDLE_SECONDS, self.close)
                self._idle.daemon = True
                self._idle.start()

    def close(self) -> None:
        with self._lock:
            if self._idle is not None:
                self._idle.cancel()
            self._end()

    # -- the rest is private

    def _run(self, case: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
        if not self._workers:
            self._start()
        port = free_port()
        pipes = [pipe for _, pipe in self._workers[:world_size]]
        for rank, pipe in enumerate(pipes):
            pipe.send((case, Place(rank, world_size, port), arguments))
        replies, failures = [], []
        for pipe in pipes:
            # After one failure the others can only be stuck in a collective, or failing too.
            if not pipe.poll(5.0 if failures else DEADLINE):
                failures.append("a rank did not answer in time")
                continue
            try:
                good, value = pipe.recv()
            except EOFError:
                good, value = False, "a rank died"
            (replies if good else failures).append(value)
        if failures:
            self._end(firm=True)
            raise CaseFailed("\n".join(failures))
        if any(psutil.Process(process.pid).num_threads() > MOST_THREADS for process, _ in self._workers):
            self._end()
        return replies

    def _end(self, *, firm: bool = False) -> None:
        for process, pipe in self._workers:
            if not firm and process.is_alive():
                pipe.send(None)
                process.join(10)
            if process.is_alive():
                # With its children: writers of a save that was cut off would stay behind.
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
                process.kill()
            process.join()
            pipe.close()
        self._workers = []
