"""Whether a server that still answers can still generate.

What generates is a child of the server's process: vLLM's engine core and its workers, SGLang's scheduler. When one of
them dies, the server that waits for it lives on for a minute, accepts connections, and answers most routes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import psutil

from rltool.config.serve import ENGINES
from rltool.engines.dialects.protocol import Launches
from rltool.engines.dialects.table import dialect
from rltool.engines.sync_client import exchange
from rltool.engines.types import HttpRequest
from rltool.errors import EngineUnreachable

HEALTH_INTERVAL = 2.0
HEALTH_SECONDS = 1.0
"""No answer within it is no verdict: a server may be busy."""
ENGINE_IS_DEAD = 503
"""vLLM's answer on /health once its engine core has died, or has lost a worker."""


def serves(url: str) -> bool:
    """The server answers its health route, and all is well."""
    try:
        return exchange(url, HttpRequest("GET", "/health"), timeout=HEALTH_SECONDS)[0] == 200
    except EngineUnreachable:
        return False


def reports_dead(url: str) -> bool:
    """The server answers, and reports that its engine is dead. Asks the one route that needs no key."""
    try:
        status, _ = exchange(url, HttpRequest("GET", "/health"), timeout=HEALTH_SECONDS)
    except EngineUnreachable:
        return False
    return status == ENGINE_IS_DEAD


class Liveness:
    """Of one engine that has become ready: made then, called as often as one likes."""

    def __init__(self, pid: int, url: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._url, self._clock = url, clock
        self._workers = {worker: title for worker in _children(pid) if (title := _title(worker))}
        self._asked_at = clock()

    def __call__(self) -> str | None:
        """What is wrong, as words after the engine's name, or None."""
        for worker, title in self._workers.items():
            if not _runs(worker):
                return f"lost its process {title} (pid {worker.pid}): the server answers, and can generate nothing"
        if self._clock() - self._asked_at < HEALTH_INTERVAL:
            return None
        self._asked_at = self._clock()
        if reports_dead(self._url):
            return f"answers {ENGINE_IS_DEAD} on /health: the server runs, and its engine is dead"
        return None


class LivenessFromStart:
    """Of an engine that is still loading: only when it serves are all of its own processes there. Until then nothing is
    wrong with it but that it takes longer than `seconds`."""

    def __init__(
        self, pid: int, url: str, *, seconds: float = math.inf, on_serving: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._pid, self._url, self._seconds, self._on_serving, self._clock = pid, url, seconds, on_serving, clock
        self._started = clock()
        self._liveness: Liveness | None = None

    def __call__(self) -> str | None:
        if self._liveness is not None:
            return self._liveness()
        if serves(self._url):
            self._liveness = Liveness(self._pid, self._url, clock=self._clock)
            self._on_serving()
        elif self._clock() - self._started > self._seconds:
            return f"did not serve within {self._seconds:g} s"
        return None


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _title(process: psutil.Process) -> str | None:
    try:
        title = (process.cmdline() or [""])[0].strip()
    except psutil.Error:
        return None
    return title if title.startswith(_worker_titles()) else None


def _worker_titles() -> tuple[str, ...]:
    """Of the processes that generate; other children come and go."""
    kinds = [dialect(name) for name in ENGINES]
    return tuple(kind.worker_title for kind in kinds if isinstance(kind, Launches) and kind.worker_title)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
