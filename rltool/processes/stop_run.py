"""`rltool stop`: end what a run has recorded, the trainer before the engines that it still needs, and what a trainer
that was killed has left."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import psutil

from rltool.errors import UsageError
from rltool.processes.marks import TRAINER_ROLE, left_behind
from rltool.processes.run_directory import RunDirectory
from rltool.processes.state import (
    ProcessState,
    find_process,
    is_elsewhere,
    read_states,
    remove_state,
    where_to_stop,
    write_state,
)
from rltool.processes.stop import GRACE_SECONDS, process_tree, stop_processes


def stop_order(states: Sequence[ProcessState]) -> list[ProcessState]:
    """Whoever needs longest for an orderly end goes first, a trainer before those who watch its engines, for it resumes
    them before it leaves them."""
    return sorted(states, key=lambda state: (-state.orderly_seconds, state.role.split("-")[0] != TRAINER_ROLE))


def stop_run(
    run: RunDirectory,
    roles: Sequence[str] = (),
    *,
    grace: float = GRACE_SECONDS,
    report: Callable[[str], None] = lambda _: None,
) -> list[ProcessState]:
    """Stop these roles of a run, all if none is named; returns those that were running. State files of the dead are
    removed; those of another host, which shares the directory, are left to it and reported. With the trainer goes what
    earlier ones have left: processes that lost their parent to a SIGKILL.

    A process that ends its children in order (orderly_seconds) is asked alone first, and waited for; then every tree
    gets TERM, `grace` seconds, KILL. A process whose start time does not match its pid is never touched. Raises
    UsageError for a role that the run does not have.
    """
    recorded = read_states(run)
    unknown = sorted(set(roles) - {state.role for state in recorded})
    if unknown:
        known = ", ".join(state.role for state in recorded) or "none"
        raise UsageError(f"run {run.name} has no process {', '.join(unknown)}; it has: {known}")
    chosen = [state for state in recorded if not roles or state.role in roles]
    for state in chosen:
        if is_elsewhere(state):
            report(where_to_stop(run, state))
    chosen = [state for state in chosen if not is_elsewhere(state)]
    running = [state for state in chosen if process_tree(state)]
    for state in running:
        try:
            write_state(run, state.model_copy(update={"stopping": True}))
        except OSError as error:
            why = f"cannot be marked as stopping ({error.strerror}): who watches it takes its end for a failure"
            report(f"{state.role} (pid {state.pid}) {why}")
    for state in stop_order(running):
        if state.orderly_seconds > 0:
            _ask_and_wait(state, report)
    stop_processes(running, grace)
    for state in chosen:
        remove_state(run, state)
    if roles and TRAINER_ROLE not in roles:
        return running
    return [*running, *end_left_behind(run, grace=grace, report=report)]


def end_left_behind(
    run: RunDirectory, *, grace: float = GRACE_SECONDS, report: Callable[[str], None] = lambda _: None
) -> list[ProcessState]:
    """End what trainers of this run started and did not live to end; returns what that was."""
    left = left_behind(run)
    if left:
        names = ", ".join(f"{state.role} (pid {state.pid})" for state in left)
        report(f"an earlier trainer of run {run.name} was killed and left these, which end now: {names}")
        stop_processes(left, grace)
    return left


def _ask_and_wait(state: ProcessState, report: Callable[[str], None], poll: float = 0.1) -> None:
    process = find_process(state)
    if process is None:
        return
    report(f"{state.role} (pid {state.pid}): asked to end, it has {state.orderly_seconds:g} s")
    try:
        process.terminate()
    except psutil.NoSuchProcess:
        return
    deadline = time.monotonic() + state.orderly_seconds
    while find_process(state) is not None and time.monotonic() < deadline:
        time.sleep(poll)
