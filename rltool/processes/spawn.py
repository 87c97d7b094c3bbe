"""Starting one process of a run: own session, own log file, recorded before it can be lost."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rltool.errors import RltoolError
from rltool.processes.excerpt import excerpt
from rltool.processes.leftovers import make_temporary_directory
from rltool.processes.run_directory import RunDirectory
from rltool.processes.signals import deferred_interrupts
from rltool.processes.state import ProcessState, boot, pid_namespace, start_time, write_state

LOG_LINES_IN_ERRORS = 20

SOCKET_NAME = 64
"""Characters of the longest name that an engine gives a socket: vLLM's are UUIDs, those of its connectors longer."""


@dataclass(frozen=True)
class ProcessSpec:
    """What to start. `environment` is laid over the parent's; secrets belong into files that it names, not into
    argv."""

    role: str
    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    url: str | None = None
    gpus: tuple[int, ...] = ()
    cwd: Path | None = None
    temporary_in: str | None = None
    """The variable that names it a temporary directory of its own, for sockets (leftovers.py)."""


class ProcessFailed(RltoolError):
    """A process ended that should not have, or never got ready. The message quotes the end of its log."""


@dataclass(frozen=True)
class RunningProcess:
    """A child of this process. `state` is what other shells see of it."""

    state: ProcessState
    popen: subprocess.Popen[bytes]
    run: RunDirectory

    @property
    def role(self) -> str:
        return self.state.role

    @property
    def log(self) -> Path:
        if self.state.log is None:
            raise ValueError(f"{self.role} was started without a log file")
        return self.state.log

    def exit_code(self) -> int | None:
        """None while it runs; negative is the number of the signal that killed it."""
        return self.popen.poll()

    def wait(self, seconds: float) -> int | None:
        """The exit code as soon as it has ended, None if it still runs after `seconds`."""
        try:
            return self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def failure(self, what: str) -> ProcessFailed:
        """The error to show: what happened, the last lines of the log, where it is, what to type next."""
        quoted = "\n".join(f"    {line}" for line in excerpt(self.log, LOG_LINES_IN_ERRORS)) or "    (the log is empty)"
        if self.run.key_file.exists():  # some servers log their arguments, and errors are pasted into chats
            quoted = quoted.replace(self.run.key_file.read_text().strip(), "(the key)")
        return ProcessFailed(
            f"{self.role} {what}. The end of its log:\n{quoted}\n"
            f"log: {self.log}\nnext: rltool logs {self.role} --run {self.run.name} -n 200"
        )


def start(spec: ProcessSpec, run: RunDirectory, *, log: Path | None = None) -> RunningProcess:
    """Start it in a session of its own, stdout and stderr to a new log file, and write its state file.

    log: of the process whose place it takes, to be gone on with.

    Its own session keeps the terminal's Ctrl-C from it (its parent stops it in order) and lets `stop_processes`
    find orphans. Raises ProcessFailed if the program cannot be executed. Where its state cannot be written (OSError) it
    is killed: it would be unknown.
    """
    log = log or run.new_log(spec.role)
    with deferred_interrupts(), log.open("ab") as output, _temporary(spec) as (variables, inherited):
        try:
            popen = subprocess.Popen(
                list(spec.argv),
                env={**os.environ, **spec.environment, **variables},
                cwd=spec.cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=inherited,
            )
        except OSError as error:
            raise ProcessFailed(f"{spec.role} could not be started: {error.strerror}: {spec.argv[0]}") from error
        try:
            # An unreaped child keeps its pid and start time readable even if it has died at once.
            state = ProcessState(
                role=spec.role, pid=popen.pid, start_time=start_time(popen.pid), boot=boot(),
                pid_namespace=pid_namespace(), host=socket.gethostname(), argv=spec.argv, log=log, url=spec.url,
                gpus=spec.gpus,
            )  # fmt: skip
            write_state(run, state)
        except BaseException:
            os.killpg(popen.pid, signal.SIGKILL)
            popen.wait()
            raise
    return RunningProcess(state=state, popen=popen, run=run)


@contextmanager
def _temporary(spec: ProcessSpec) -> Iterator[tuple[dict[str, str], tuple[int, ...]]]:
    """(variables, descriptors to inherit) of a process that is started in the block: from then on the directory is
    its."""
    if spec.temporary_in is None:
        yield {}, ()
        return
    made = make_temporary_directory(SOCKET_NAME)
    try:
        yield {spec.temporary_in: str(made.path)}, (made.descriptor,)
    except BaseException:
        made.remove()
        raise
    made.release()


def describe_exit(code: int) -> str:
    """Exit code in words, for "ROLE ..."."""
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
