"""Ending process trees: TERM, a grace period, KILL; nothing that rltool did not start."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress

import psutil

from rltool.errors import RltoolError
from rltool.processes.leftovers import mapped_segments, remove_abandoned, remove_unmapped
from rltool.processes.state import ProcessState, find_process, is_of_this_machine, start_time

GRACE_SECONDS = 15.0
"""vLLM takes about 2 s to end after TERM, SGLang up to 5 s."""

_KILL_SECONDS = 10.0
"""A killed process that is still there after this is stuck in the kernel (a GPU driver, a dead network disk)."""


def stop_processes(
    states: Sequence[ProcessState],
    grace: float = GRACE_SECONDS,
    *,
    poll: float = 0.05,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """End these processes and all their descendants, and return when none is left.

    A descendant is a child of any depth or a member of the session that `start` made, so it is found even after its
    parent has died. An interrupt (Ctrl-C) during the grace period cuts it short. What they leave outside of the run
    directory is removed (leftovers.py). Raises RltoolError if something survives KILL.
    """
    trees = {process.pid: process for state in states for process in process_tree(state)}
    segments = mapped_segments(trees)
    _signal(trees.values(), psutil.Process.terminate)
    with suppress(KeyboardInterrupt):  # a second Ctrl-C: KILL now; leaving here would leave processes
        _wait_gone(trees.values(), grace, poll, clock, sleep)
    # Looked up again: what was forked after the first look is not in `trees`.
    trees.update({process.pid: process for state in states for process in process_tree(state)})
    segments |= mapped_segments(trees)
    _signal(trees.values(), psutil.Process.kill)
    survivors = _wait_gone(trees.values(), _KILL_SECONDS, poll, clock, sleep)
    remove_unmapped(segments)
    remove_abandoned()
    if survivors:
        pids = ", ".join(str(process.pid) for process in survivors)
        raise RltoolError(f"pid {pids} did not end even after SIGKILL: probably stuck in a driver; see dmesg")


def process_tree(state: ProcessState) -> list[psutil.Process]:
    """The living process of this state with its descendants, and what is left of its session; empty if there is
    nothing."""
    found: dict[int, psutil.Process] = {}
    root = find_process(state)
    if root is not None:
        found[root.pid] = root
        with suppress(psutil.NoSuchProcess):  # it died meanwhile; its session is looked at below
            found.update({child.pid: child for child in root.children(recursive=True)})
    if state.session_leader and is_of_this_machine(state) and (root is not None or _is_ours_or_gone(state)):
        found.update({process.pid: process for process in _session(state)})
    return [process for process in found.values() if _running(process)]


def _is_ours_or_gone(state: ProcessState) -> bool:
    """False if the pid now belongs to a stranger, whose session would carry the same number.

    While a session has members the kernel does not give its number to a new process, so a free or zombie pid is safe.
    """
    try:
        return psutil.Process(state.pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _session(state: ProcessState) -> list[psutil.Process]:
    members = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == state.pid and start_time(process.pid) >= state.start_time - 1.0:
                members.append(process)
        except (ProcessLookupError, PermissionError, psutil.NoSuchProcess):
            continue
    return members


def _signal(processes: Iterable[psutil.Process], send: Callable[[psutil.Process], None]) -> None:
    for process in processes:
        try:
            if _running(process):
                send(process)  # psutil compares the start time once more before it signals
        except psutil.NoSuchProcess:
            continue


def _running(process: psutil.Process) -> bool:
    """A zombie has ended: it only waits for its parent, which may be this process and reaps it through its Popen."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _wait_gone(
    processes: Collection[psutil.Process],
    seconds: float,
    poll: float,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> list[psutil.Process]:
    deadline = clock() + seconds
    while True:
        left = [process for process in processes if _running(process)]
        if not left or clock() >= deadline:
            return left
        sleep(poll)
