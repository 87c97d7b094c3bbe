"""Ray on this host: started within a deadline, and cancelled at once, with nothing left of it, when a signal comes;
watched while it runs."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from rltool.errors import HostLost, PartLost, RunFault
from rltool.training.cluster.ray_calls import LOSS, Waiting
from rltool.training.stopping import write_at_once

POLL_SECONDS = 0.1

_CLEAN_SECONDS = 10.0
_QUIET_SECONDS = 1.0
"""A cancelled start may start something more before it notices that its processes are gone. ray.init notices
late: after so long with nothing new it is left alone; what it still starts ends with this process."""


RAYS_OWN_LIMIT = "timed out during startup"
"""Ray gives its processes 30 s, regardless of settings (ray/_private/node.py); on a busy host that is not enough. Such
a start is tried again, up to the deadline."""


WATCHED = {"raylet": 0.0, "gcs_server": 15.0}
"""Ray's processes without which a run does not go on -> seconds that the driver then has for an orderly end. Without
the raylet none: Ray's library ends this process from inside, within a second or two, without a word on the run. Without
the GCS actors still answer, so engines can be left as they should be; other calls of Ray's wait a minute for it, and
then end this process."""


KNOCK_SECONDS, HEAD_SECONDS = 5.0, 60.0
"""Of HeadWatch: between two attempts, and how long they may all be in vain. Ray gives up nodes after as long."""


class RayStartFailed(RunFault):
    """Ray did not start. A machine that is busy now may not be later."""


def start_ray(start: Callable[[], object], deadline: float, while_waiting: Waiting, logs: Path | None) -> None:
    """Run `start` (ray.init) in a thread of its own; returns when it has.

    A start that meets Ray's own limit is made again. ray.init blocks for as long as it likes, partly where no Python
    signal handler runs. The thread never ends: Ray has the kernel kill its processes when the *thread* that started
    them ends. while_waiting(seconds so far): called now and then; what it raises gives the start up. RayStartFailed
    after `deadline` seconds, or where Ray fails; logs: where its logs are then, for the message.
    """
    before = children()
    started = time.monotonic()
    while (failure := _attempt(start, before, started, deadline, while_waiting, logs)) is not None:
        # Tried again, it may fail at once: what looks at the time and at signals is not only the waiting.
        _look(started, deadline, while_waiting, logs)
        if RAYS_OWN_LIMIT not in str(failure):
            raise RayStartFailed(
                f"Ray did not start: {_first_line(failure)}{_see(logs)} A busy host is the usual reason, so try again"
            ) from failure


def _attempt(
    start: Callable[[], object], before: set[psutil.Process], started: float, deadline: float, while_waiting: Waiting,
    logs: Path | None,
) -> BaseException | None:  # fmt: skip
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
            _look(started, deadline, while_waiting, logs)
    except BaseException:
        end_children(before, ended)
        raise
    if not failure:
        return None
    end_children(before, ended)
    return failure[0]


def _look(started: float, deadline: float, while_waiting: Waiting, logs: Path | None) -> None:
    """Calls `while_waiting` until `seconds` have passed, then raises RayStartFailed."""
    waited = time.monotonic() - started
    if waited > deadline:
        raise RayStartFailed(
            f"Ray did not start within deadlines.start = {deadline:g} s: is the host too busy (`uptime`), or its "
            f"memory or disk full?{_see(logs)} Try again, or raise the deadline"
        )
    while_waiting(waited)


def _see(logs: Path | None) -> str:
    return f" Its logs are in {logs}." if logs is not None else ""


def children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def end_children(before: set[psutil.Process], ended: threading.Event) -> None:
    """Kill what Ray has started, also what a start that has not `ended` starts before it notices. Nothing of it holds
    any state."""
    now = time.monotonic()
    deadline, quiet_since = now + _CLEAN_SECONDS, now
    while time.monotonic() < min(deadline, quiet_since + _QUIET_SECONDS):
        left = list(children() - before)
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


class RayWatch:
    """Sees at once that a process of a local Ray has ended by itself, and has the run report it.

    The main thread's wait raises PartLost (ray_calls.py). Where the run is not over by the end of the time that it has
    for that, the error line is written here, and the process ends. processes: by name, of WATCHED.
    """

    def __init__(self, processes: Mapping[str, psutil.Process]) -> None:
        LOSS.text, LOSS.kind, LOSS.was_raised, LOSS.look = None, PartLost, False, self._look
        self._processes, self._closed = dict(processes), threading.Event()
        threading.Thread(target=self._run, name="ray-watch", daemon=True).start()

    def close(self) -> None:
        """Before Ray is shut down: what ends from now on was meant to."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(POLL_SECONDS):
            name = self._look()
            if name is not None:
                _end_after(self._closed, WATCHED[name])
                return

    def _look(self) -> str | None:
        """The process that has ended, if one has; its text is then written."""
        for name, process in self._processes.items():
            if _has_ended(process):
                LOSS.text = (
                    f"Ray's {name} (pid {process.pid}) died: it was killed (by the kernel for memory? see `dmesg`), or "
                    "crashed. `rltool stop` ends what is left of the run; go on with `rltool train --resume`"
                )
                return name
        return None


class HeadWatch:
    """Sees that the head of a cluster takes no connection of this host any more: its host has gone down, or the way
    there. Ray by itself waits for minutes, and then ends this process without a word.

    The rest as RayWatch. address: HOST:PORT of the GCS.
    """

    def __init__(self, address: str) -> None:
        LOSS.text, LOSS.kind, LOSS.was_raised, LOSS.look = None, HostLost, False, None
        self._address, self._closed = address, threading.Event()
        threading.Thread(target=self._run, name="head-watch", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        host, _, port = self._address.rpartition(":")
        answered: float | None = None  # a client of Ray's (ray://) may never reach it
        while not self._closed.wait(KNOCK_SECONDS):
            try:
                socket.create_connection((host.strip("[]"), int(port)), KNOCK_SECONDS).close()
                answered = time.monotonic()
            except OSError as error:
                if answered is not None and time.monotonic() - answered > HEAD_SECONDS:
                    LOSS.text = (
                        f"Ray's head at {self._address} takes no connection from host {socket.gethostname()} for "
                        f"{HEAD_SECONDS:g} s ({error}): it ended, its host went down, or the network between the "
                        "two. Go on with `rltool train --resume` when it is there again, or on another cluster"
                    )
                    _end_after(self._closed, WATCHED["gcs_server"])
                    return


def _end_after(closed: threading.Event, seconds: float) -> None:
    """The end of this process, with LOSS as its error, where the run has not come to its own within that time."""
    if not closed.wait(seconds):
        write_at_once(f"error: {LOSS.text}\n")
        os._exit(LOSS.kind.exit_code)


def watched_processes(before: set[psutil.Process]) -> dict[str, psutil.Process]:
    """Of the Ray that this process has started since `before`."""
    found: dict[str, psutil.Process] = {}
    for process in children() - before:
        with suppress(psutil.NoSuchProcess):
            if process.name() in WATCHED:
                found[process.name()] = process
    return found


def _has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE or not process.is_running()
    except psutil.NoSuchProcess:
        return True
