"""Starting Ray on this host: within a deadline, and given up at once, with nothing left of it, when a signal comes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

from rltool.errors import RunFault
from rltool.training.ray_calls import Waiting

POLL_SECONDS = 0.1

_CLEAN_SECONDS = 10.0
_QUIET_SECONDS = 1.0
"""A start that is given up may start something more before it notices that its processes are gone. ray.init notices
late: after so long with nothing new it is left alone; what it still starts ends with this process."""


RAYS_OWN_LIMIT = "timed out during startup"
"""Ray gives its processes 30 s, whatever they were told (ray/_private/node.py); on a busy host that is not enough. Such
a start is tried again, up to the deadline."""


class RayStartFailed(RunFault):
    """Ray did not start. A machine that is busy now may not be later."""


def start_ray(start: Callable[[], object], deadline: float, while_waiting: Waiting) -> None:
    """Run `start` (ray.init) in a thread of its own; returns when it has.

    A start that meets Ray's own limit is made again. ray.init blocks for as long as it likes, partly where no Python
    signal handler runs. The thread never ends: Ray has the kernel kill its processes when the *thread* that started
    them ends. while_waiting(seconds so far): called now and then; what it raises gives the start up. RayStartFailed
    after `deadline` seconds, or where Ray fails.
    """
    before = set(_children())
    started = time.monotonic()
    while (failure := _attempt(start, before, started, deadline, while_waiting)) is not None:
        # Tried again, it may fail at once: what looks at the time and at signals is not only the waiting.
        _look(started, deadline, while_waiting)
        if RAYS_OWN_LIMIT not in str(failure):
            raise RayStartFailed(
                f"Ray did not start: {_first_line(failure)} Its logs are in /tmp/ray/session_latest/logs; a busy host "
                "is the usual reason, so try again"
            ) from failure


def _attempt(
    start: Callable[[], object], before: set[psutil.Process], started: float, deadline: float, while_waiting: Waiting
) -> BaseException | None:
    """What `start` raised; then nothing is left of it."""
    failure: list[BaseException] = []
    ended = threading.Event()

    def run() -> None:
        try:
            start()
        except BaseException as error:
            failure.append(error)
        ended.set()
        threading.Event().wait()

    threading.Thread(target=run, name="ray-start", daemon=True).start()
    try:
        while not ended.wait(POLL_SECONDS):
            _look(started, deadline, while_waiting)
    except BaseException:
        _end_children(before, ended)
        raise
    if not failure:
        return None
    _end_children(before, ended)
    return failure[0]


def _look(started: float, deadline: float, while_waiting: Waiting) -> None:
    """RayStartFailed after so many seconds; else while_waiting."""
    waited = time.monotonic() - started
    if waited > deadline:
        raise RayStartFailed(
            f"Ray did not start within deadlines.ray_start = {deadline:g} s: is the host too busy (`uptime`), or its "
            "memory or disk full? Its logs are in /tmp/ray/session_latest/logs. Try again, or raise the deadline"
        )
    while_waiting(waited)


def _children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _end_children(before: set[psutil.Process], ended: threading.Event) -> None:
    """Kill what the start has started, also what it starts while it has not noticed. Nothing of it holds any state."""
    now = time.monotonic()
    deadline, quiet_since = now + _CLEAN_SECONDS, now
    while time.monotonic() < min(deadline, quiet_since + _QUIET_SECONDS):
        left = [process for process in _children() if process not in before]
        if left:
            quiet_since = time.monotonic()
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=POLL_SECONDS)
        if ended.is_set() and not left:
            return


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    text = lines[0].strip() if lines else type(error).__name__
    return text if text.endswith((".", "!", "?")) else f"{text}."
