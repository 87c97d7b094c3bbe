"""What rltool knows about a process that it started, kept in state/ROLE.json so that any shell can find it again.

A pid is no lasting name: the kernel hands it out again, after another boot and in another container anew. So a
process is ours only if boot, pid namespace, pid *and* its start time match, and everything that signals or counts
processes asks `is_alive` first.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterable
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict, ValidationError

from rltool import __version__
from rltool.errors import RltoolError
from rltool.processes.files import write_text_atomic
from rltool.processes.run_directory import RunDirectory

_START_TIME_TOLERANCE = 1.0
"""Seconds. The boot time that psutil reports wanders by fractions of a second as the clock is slewed."""

ORDERLY_SECONDS = 300.0
"""A trainer finishes its optimizer step and writes a checkpoint of any size before it ends."""

_NOT_ROLES = ("run.json",)


class ProcessState(BaseModel):
    """One process. start_time: seconds between the host's boot and its start, which no change of the clock moves."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: str
    pid: int
    start_time: float
    boot: str = ""
    """Of the host, an id; empty where the system has none."""
    pid_namespace: str = ""
    """In which the pid counts; empty where it is not known."""
    host: str = ""
    """Its name; empty where it is not known."""
    argv: tuple[str, ...]
    log: Path | None = None
    url: str | None = None
    gpus: tuple[int, ...] = ()
    session_leader: bool = True
    """It was started by `start` in a session of its own, so what is left of that session belongs to it."""
    orderly_seconds: float = 0.0
    """Above 0: it ends its own children in order (a trainer saves first), so `rltool stop` signals it alone and gives
    it this long."""
    stopping: bool = False
    """Somebody asked for its end; its death is no failure."""
    rltool: str = __version__


def is_alive(state: ProcessState) -> bool:
    """The very process of this state is running (a zombie is not)."""
    return find_process(state) is not None


def find_process(state: ProcessState) -> psutil.Process | None:
    if not is_of_this_machine(state):
        return None
    try:
        process = psutil.Process(state.pid)
        same = abs(start_time(state.pid) - state.start_time) <= _START_TIME_TOLERANCE
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
        return None


def is_of_this_machine(state: ProcessState) -> bool:
    """Its pid counts here: same boot of the host, same pid namespace. Else it is that of a stranger."""
    return state.boot == boot() and state.pid_namespace in ("", pid_namespace())


def is_elsewhere(state: ProcessState) -> bool:
    """Another host shares the run directory and recorded it: whether it lives is known there alone.

    A host that was started anew, or a container, keeps its name: what it recorded before is dead.
    """
    return state.host not in ("", socket.gethostname()) and not is_of_this_machine(state)


def start_time(pid: int) -> float:
    """When this process started, in seconds since the host's boot. Raises psutil.NoSuchProcess.

    Not since the epoch: when the clock is set, every process would be another one, and nothing would be found to stop.
    """
    # In this order: psutil adds the boot time that it read last, and keeps the sum for as long as a Process lives.
    booted = psutil.boot_time()
    return psutil.Process(pid).create_time() - booted


def boot() -> str:
    """An id of the host's boot: after another one, equal pids and start times mean nothing."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def pid_namespace() -> str:
    """Of process ids: those of a container mean nothing outside of it. Empty where the system has none."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def state_of_this_process(
    role: str,
    *,
    argv: Iterable[str],
    url: str | None = None,
    log: Path | None = None,
    orderly_seconds: float = ORDERLY_SECONDS,
) -> ProcessState:
    """For a command that runs in the foreground and wants to be seen by status and stop."""
    pid = os.getpid()
    return ProcessState(
        role=role,
        pid=pid,
        start_time=start_time(pid),
        boot=boot(),
        pid_namespace=pid_namespace(),
        host=socket.gethostname(),
        argv=tuple(argv),
        url=url,
        log=log,
        session_leader=False,
        orderly_seconds=orderly_seconds,
    )


def state_file(run: RunDirectory, role: str) -> Path:
    return run.state_dir / f"{role}.json"


def where_to_stop(run: RunDirectory, state: ProcessState) -> str:
    """What to do about a process of another host, for people."""
    return (
        f"{state.role} of run {run.name} was started on host {state.host} (pid {state.pid}), which alone knows "
        f"whether it lives: stop it there, or remove {state_file(run, state.role)} if that host is gone"
    )


def write_state(run: RunDirectory, state: ProcessState) -> None:
    write_text_atomic(state_file(run, state.role), state.model_dump_json(indent=2) + "\n", mode=0o600)


def read_states(run: RunDirectory) -> list[ProcessState]:
    """Every process that this run has recorded, alive or not, by role."""
    files = sorted(run.state_dir.glob("*.json"), key=lambda file: _natural_order(file.stem))
    return [state for file in files if file.name not in _NOT_ROLES and (state := _read(file)) is not None]


def read_state(run: RunDirectory, role: str) -> ProcessState | None:
    return _read(state_file(run, role))


def free_role(role: str, run: RunDirectory) -> str:
    """`role`, or role-2, role-3, ... where living processes of the run have it, or those of another host."""
    taken = {state.role for state in read_states(run) if is_alive(state) or is_elsewhere(state)}
    names = (role if number == 1 else f"{role}-{number}" for number in itertools.count(1))
    return next(name for name in names if name not in taken)


def remove_state(run: RunDirectory, state: ProcessState) -> None:
    """Forget a process that has ended, unless its role has been taken by a newer one."""
    current = read_state(run, state.role)
    if current is not None and current.pid == state.pid:
        state_file(run, state.role).unlink(missing_ok=True)


def _read(file: Path) -> ProcessState | None:
    try:
        return ProcessState.model_validate_json(file.read_text())
    except FileNotFoundError:  # removed between listing and reading
        return None
    except ValidationError as error:
        raise RltoolError(
            f"{file} is not a process state of rltool {__version__}: {error.errors()[0]['msg']}. "
            "Another version wrote it, or it is damaged; if nothing of that run lives, remove it"
        ) from error


def _natural_order(role: str) -> tuple[str, int]:
    """engine-10 after engine-9."""
    name, _, number = role.rpartition("-")
    return (name, int(number)) if number.isdigit() else (role, -1)
