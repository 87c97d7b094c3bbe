"""Finding what a trainer started after the trainer has died: all its processes have a mark in their environment.

Who was killed leaves orphans: their parent is init, and Ray gives some of them sessions of their own. The environment
is inherited from any parent, and other users' cannot be read. The mark names the run, its directory (a copy has
the same id) and the very process of the trainer, so what a living trainer started is never taken for a leftover; with
the boot of its host, for that of another host cannot be seen from here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

from rltool.processes.environment import environment
from rltool.processes.run_directory import RunDirectory
from rltool.processes.state import ProcessState, boot, find_process, pid_namespace, start_time

MARK_VARIABLE = "RLTOOL_TRAINER"

TRAINER_ROLE = "train"

KILL_ROUNDS = 20
"""Of looking for what a process has started between being found and being killed."""

_KEPT = {"SPT_NOENV": "1"}
"""Ray's agents write their titles over the environment that they were started with, unless this is set."""


@contextmanager
def marking(run: RunDirectory, trainer: ProcessState) -> Iterator[None]:
    """Every process that is started inside the block has the mark of this trainer of this run."""
    with environment({MARK_VARIABLE: f"{_prefix(run)}{trainer.pid} {trainer.start_time}", **_KEPT}):
        yield


def left_behind(run: RunDirectory) -> list[ProcessState]:
    """What trainers of this run started that have ended themselves, as states for `stop_processes`."""
    prefix, found = _prefix(run), []
    for process, mark in _marked(MARK_VARIABLE):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            if mark.startswith(prefix) and _has_ended(mark.removeprefix(prefix)):
                found.append(_state(process))
    return found


def kill_marked(variable: str, value: str) -> None:
    """Every process of this user that has this in its environment, and what such ones start meanwhile."""
    for _ in range(KILL_ROUNDS):
        found = [process for process, mark in _marked(variable) if mark == value]
        for process in found:
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                process.kill()
        if not found:
            return


def _marked(variable: str) -> Iterator[tuple[psutil.Process, str]]:
    """Processes whose environment can be read and has it, with its value."""
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            if mark := process.environ().get(variable, ""):
                yield process, mark


def _prefix(run: RunDirectory) -> str:
    return f"{run.run_id} {boot() or '-'} {pid_namespace() or '-'} {run.path.resolve()} "


def _has_ended(trainer: str) -> bool:
    pid, started = trainer.split(" ")
    state = ProcessState(role=TRAINER_ROLE, pid=int(pid), start_time=float(started), boot=boot(), argv=())
    return find_process(state) is None


def _state(process: psutil.Process) -> ProcessState:
    argv = tuple(process.cmdline())
    return ProcessState(
        role=_name(process.name(), argv), pid=process.pid, start_time=start_time(process.pid), boot=boot(),
        argv=argv, session_leader=False,
    )  # fmt: skip


def _name(program: str, argv: tuple[str, ...]) -> str:
    """What people know it by: Ray's Python processes call themselves ray::SOMETHING."""
    return argv[0].split()[0] if argv and argv[0].startswith("ray::") else program
