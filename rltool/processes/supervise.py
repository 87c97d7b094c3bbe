"""Groups of child processes: one that leaves none behind, and a foreground that ends with its first failure."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from rltool.errors import RltoolError, UsageError
from rltool.processes.background import in_background
from rltool.processes.run_directory import RunDirectory
from rltool.processes.signals import deferred_interrupts, termination_interrupts
from rltool.processes.spawn import ProcessSpec, RunningProcess, describe_exit, start
from rltool.processes.state import (
    is_alive,
    is_elsewhere,
    read_state,
    remove_state,
    state_of_this_process,
    where_to_stop,
    write_state,
)
from rltool.processes.stop import GRACE_SECONDS, stop_processes

Check = Callable[[], str | None]

class Restarts(Protocol):
    """Starts processes of one kind again that have ended by themselves, or are useless."""

    @property
    def vital(self) -> bool:
        """Whether its last process that is not restarted ends the others, which are of no use without it."""
        ...

    def owns(self, process: RunningProcess) -> bool:
        """Whether it is one of its processes. The end of one without an owner ends the others."""
        ...

    def delay(self, process: RunningProcess) -> float:
        """Seconds to wait, counting one restart; inf: it was started again too often, and the others go on without
        it."""
        ...

    def end(self, process: RunningProcess) -> None:
        """End what is left of it. Raises RltoolError."""
        ...

    def start(self, process: RunningProcess) -> RunningProcess:
        """End what is left of it, and start another in its place, with a check of its own. Raises RltoolError,
        OSError."""
        ...


@dataclass(frozen=True)
class _Due:
    """at: when its owner starts it again. was_stopped: what was left of it has been ended here already."""

    at: float
    process: RunningProcess
    owner: Restarts
    was_stopped: bool


SETTLE_SECONDS = 1.0
"""For a process that a check has found dead to end by itself, and to write why."""


class ProcessGroup:
    """Processes of one run that end with this `with` block, however it is left."""

    def __init__(
        self, run: RunDirectory, *, grace: float = GRACE_SECONDS, note: Callable[[str], None] = lambda _: None,
        replaces_other_hosts: bool = False,
    ) -> None:  # fmt: skip
        """replaces_other_hosts: a trainer that holds the run's lock starts them, so what other hosts have recorded
        under these roles is of an earlier one."""
        self.run = run
        self.processes: list[RunningProcess] = []
        self.checks: dict[str, Check] = {}
        """Role -> what is wrong with a process that runs, or None; asked by `supervise`."""
        self.restarts: list[Restarts] = []
        """What `supervise` does about processes that end by themselves, of each kind."""
        self.before_stop: Callable[[], None] = lambda: None
        """Called before an orderly end (Ctrl-C, SIGTERM) stops the processes; not where one has failed. What it raises
        is noted, and keeps no process alive."""
        self._grace, self._note, self._replaces_other_hosts = grace, note, replaces_other_hosts

    def start(self, spec: ProcessSpec, *, log: Path | None = None) -> RunningProcess:
        """Raises UsageError if the run has a living process of this role already. log: see spawn.start."""
        refuse_living(self.run, spec.role, other_hosts=not self._replaces_other_hosts)
        # An interrupt between the start and the append would lose the process.
        with deferred_interrupts():
            process = start(spec, self.run, log=log)
            self.processes.append(process)
        return process

    def stop(self, processes: Sequence[RunningProcess]) -> None:
        """End these alone, with their trees."""
        stop_all(processes, self._grace)
        self.processes = [process for process in self.processes if process not in processes]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self.processes and (kind is None or issubclass(kind, KeyboardInterrupt)):
                self._prepare_stop(error)
            stop_all(self.processes, self._grace)
        except KeyboardInterrupt:  # the second Ctrl-C: without grace, but not without killing
            stop_all(self.processes, 0.0)
            raise

    def _prepare_stop(self, reason: BaseException | None) -> None:
        try:
            self.before_stop()
        except Exception as error:  # a full disk, a closed terminal: the processes end anyway
            text = f"the end was not prepared ({type(error).__name__}: {error}); the processes are stopped all the same"
            if reason is not None:
                reason.add_note(text)
            with suppress(OSError):  # a closed terminal once more
                self._note(text)


def refuse_living(run: RunDirectory, role: str, *, other_hosts: bool = True) -> None:
    """UsageError if another living process has this role in the run: its state is not to be replaced. other_hosts: nor
    is one of another host, of which it is not known here whether it lives."""
    current = read_state(run, role)
    if other_hosts and current is not None and is_elsewhere(current):
        raise UsageError(f"{where_to_stop(run, current)}; another --run NAME leaves it alone")
    # This very process may be recorded already, by its parent (the quickstart).
    if current is not None and current.pid != os.getpid() and is_alive(current):
        raise UsageError(
            f"run {run.name} has a living {role} (pid {current.pid}): "
            f"`rltool stop --run {run.name} {role}` ends it, another --run NAME leaves it alone"
        )


def run_command(
    role: str,
    run: RunDirectory,
    bring_up: Callable[[ProcessGroup], None],
    *,
    detach: bool,
    note: Callable[[str], None] = lambda _: None,
    orderly_seconds: float = 2 * GRACE_SECONDS,
) -> int:
    """run_in_foreground; with `detach` in a process of its own, whose output goes to the log of `role` once
    everything serves, and this one returns then."""
    if not detach:
        return run_in_foreground(role, run, bring_up, note=note, orderly_seconds=orderly_seconds)
    refuse_living(run, role)  # before it gets a log
    log = run.new_log(role)

    def watched(ready: Callable[[], None]) -> int:
        def bring_up_and_leave(group: ProcessGroup) -> None:
            bring_up(group)
            ready()

        return run_in_foreground(role, run, bring_up_and_leave, note=note, orderly_seconds=orderly_seconds, log=log)

    return in_background(watched, log)


def run_in_foreground(
    role: str,
    run: RunDirectory,
    bring_up: Callable[[ProcessGroup], None],
    *,
    note: Callable[[str], None] = lambda _: None,
    orderly_seconds: float = 2 * GRACE_SECONDS,
    log: Path | None = None,
) -> int:
    """Bring processes up and stay until Ctrl-C, SIGTERM or the first death that `group.restarts` does not restart; then
    stop all. The exit code.

    bring_up starts processes in the group it is given and returns when they serve. This command has a state of its own
    under `role`, so status and stop see it; stop gives it orderly_seconds. 130 after Ctrl-C, 0 after SIGTERM or
    `rltool stop`; a process that dies raises ProcessFailed. log: where its output goes, if not to a terminal.
    """

    def noting(line: str) -> None:
        with suppress(OSError):  # a log on a full disk is no reason to leave the processes alone
            note(line)

    refuse_living(run, role)
    with termination_interrupts() as ending:
        try:
            own = state_of_this_process(role, argv=sys.argv, log=log, orderly_seconds=orderly_seconds)
            write_state(run, own)
            try:
                with ProcessGroup(run, note=noting) as group:
                    bring_up(group)
                    supervise(group.processes, checks=group.checks, restarts=group.restarts, note=noting)
                    return 0
            finally:
                remove_state(run, own)
        except KeyboardInterrupt:
            return ending.exit_code


def supervise(
    processes: Sequence[RunningProcess],
    *,
    checks: Mapping[str, Check] | None = None,
    restarts: Sequence[Restarts] = (),
    poll: float = 0.2,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
    note: Callable[[str], None] = lambda _: None,
) -> None:
    """Block until `rltool stop` has ended every one of them; raises ProcessFailed as soon as one ends by itself, or the
    check of its role finds it useless, unless one of `restarts` has a word for it.

    Leaves by KeyboardInterrupt on Ctrl-C. The caller stops the others in any case.
    """
    watched, due = list(processes), list[_Due]()

    def ended(process: RunningProcess, wrong: str, *, was_stopped: bool = False) -> None:
        owner = next((one for one in restarts if one.owns(process)), None)
        if owner is None:
            raise process.failure(wrong)
        delay = owner.delay(process)
        if delay < math.inf:
            due.append(_Due(clock() + delay, process, owner, was_stopped))
            note(f"{process.role} {wrong}; it is started again in {delay:g} s (log: {process.log})")
        elif owner.vital and not any(map(owner.owns, [*watched, *(one.process for one in due)])):
            raise process.failure(wrong)
        else:
            note(f"{process.role} {wrong}; it stays dead: too many restarts (log: {process.log})")
            with suppress(RltoolError, OSError):  # what cannot be ended is no reason to end the others
                owner.end(process)

    while watched or due:
        for one in [one for one in due if clock() >= one.at]:
            due.remove(one)
            if not one.was_stopped and was_asked_to_stop(one.process):
                note(f"{one.process.role} was stopped")
                continue
            try:
                watched.append(one.owner.start(one.process))
            except (RltoolError, OSError) as error:
                ended(one.process, f"could not be started again: {error}", was_stopped=True)
        for process in list(watched):
            code = process.exit_code()
            wrong = describe_exit(code) if code is not None else _found_by_check(process, checks or {})
            if wrong is None:
                continue
            if not was_asked_to_stop(process):
                if code is None and (code := process.wait(SETTLE_SECONDS)) is not None:
                    wrong = f"{wrong}; since then it {describe_exit(code)}"
                watched.remove(process)
                ended(process, wrong)
            elif code is not None:  # else it is being stopped, and its children went first
                note(f"{process.role} was stopped")
                watched.remove(process)
        sleep(poll)


def _found_by_check(process: RunningProcess, checks: Mapping[str, Check]) -> str | None:
    check = checks.get(process.role)
    return check() if check is not None else None


class _Over(Exception):
    """The block has ended."""


class Watching:
    """`supervise` beside other work: in a thread of its own, for a process whose main thread trains.

    Inside the `with` block the group's processes are watched, and started again by those whose they are
    (group.restarts); no one else starts or stops one of them meanwhile. note: a line for the user, from the thread.

    What the thread cannot restart is noted and ends the watch: the main thread has ways of its own to find out.
    """

    def __init__(self, group: ProcessGroup, note: Callable[[str], None]) -> None:
        self._group, self._note = group, note
        self._over = threading.Event()
        names = ", ".join(process.role for process in group.processes)
        self._thread = threading.Thread(target=self._watch, name=f"watching {names}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Returns when no process is started any more."""
        self._over.set()
        with deferred_interrupts():  # the thread may be starting a process that only then is known to its group
            self._thread.join()

    def _watch(self) -> None:
        group = self._group
        try:
            supervise(group.processes, checks=group.checks, restarts=group.restarts, sleep=self._sleep, note=self._note)
        except _Over:
            return
        except Exception as error:  # a thread that ends without a word would leave the processes to themselves
            self._note(f"{type(error).__name__}: {error}")

    def _sleep(self, seconds: float) -> None:
        if self._over.wait(seconds):
            raise _Over


def was_asked_to_stop(process: RunningProcess) -> bool:
    """`rltool stop` marks the state before it signals, and removes it when the process is gone."""
    state = read_state(process.run, process.role)
    return state is None or state.pid != process.state.pid or state.stopping


def stop_all(processes: Sequence[RunningProcess], grace: float = GRACE_SECONDS) -> None:
    """Stop children of this process with their trees, reap them and remove their state files.

    A state that cannot be marked (a full disk, a damaged file) keeps no process alive.
    """
    for process in processes:
        with suppress(OSError, RltoolError):
            if read_state(process.run, process.role) == process.state:
                write_state(process.run, process.state.model_copy(update={"stopping": True}))
    stop_processes([process.state for process in processes], grace)
    for process in processes:
        process.popen.wait()
    for process in processes:
        remove_state(process.run, process.state)
