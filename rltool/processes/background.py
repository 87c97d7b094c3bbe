"""`--detach`: a command that goes on without its terminal once what it starts is ready."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from rltool.processes.signals import deferred_interrupts

LOOK_SECONDS = 0.2

def in_background(work: Callable[[Callable[[], None]], int], log: Path) -> int:
    """work(ready) runs in a forked process with a session of its own; the exit code of either process.

    The one that was called returns 0 as soon as work has called ready(), and work's exit code where that ends without;
    Ctrl-C and its kin until then are handed on to it. The forked one returns what work returns, to leave by the way by
    which the command would have left. What it prints goes to the terminal until ready(), then to `log`, and nothing of
    the caller's is held open. To be called while there are no threads.
    """
    reading, writing = os.pipe()
    sys.stdout.flush()  # what is buffered would be written twice
    sys.stderr.flush()
    with deferred_interrupts() as handlers:
        own = dict(handlers)
        # Blocked until the other one runs: Python, when it has forked, forgets what reached it before.
        held = signal.pthread_sigmask(signal.SIG_BLOCK, handlers)
        try:
            pid = os.fork()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
        if pid == 0:
            os.setsid()
        else:  # also what arrives here is the other process's
            handlers.update(dict.fromkeys(handlers, partial(_hand_on, pid)))
    if pid:
        os.close(writing)
        try:
            return _wait(pid, reading)
        finally:
            for number, handler in own.items():
                signal.signal(number, handler or signal.SIG_DFL)
    os.close(reading)

    def ready() -> None:
        _leave_terminal(log)
        with suppress(BrokenPipeError):  # who waited was killed
            os.write(writing, b"ready")
        os.close(writing)

    return work(ready)


def _leave_terminal(log: Path) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    with log.open("ab") as output, open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)


def _wait(pid: int, reading: int) -> int:
    with open(reading, "rb") as pipe:
        # Not a blocking read at once: Python would run the handler of a signal that came just before it after it only.
        while not select.select([pipe], [], [], LOOK_SECONDS)[0]:
            pass
        if pipe.read(1):
            return 0
        _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code  # as shells do


def _hand_on(pid: int, number: int, _frame: object) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
