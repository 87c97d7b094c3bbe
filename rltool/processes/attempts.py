"""Starting a command again that ended through a fault. Each attempt is a process of its own: nothing of one that wedged
(a Ray, a CUDA context, a thread that hangs) is left for the next."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from rltool.processes.signals import deferred_interrupts
from rltool.processes.spawn import describe_exit

ENDED_FOR_GOOD = 3
"""Exit code of an attempt that another one would not help: the run's own rules ended it. For others it is a plain 1."""

_FINAL = (0, 2, 130, ENDED_FOR_GOOD)
"""Done or stopped, wrong usage, interrupted, ended for good. All else is a fault: an error, an abort, a signal."""


class Attempts:
    """command(n): the argv of attempt n, from 1. restarts: how many may follow the first. stopped(pid): a user asked
    for the end of this attempt, which was killed. on_fault: called after each; returns what a next one would go on
    from. log: gets one line for each restart."""

    def __init__(
        self, command: Callable[[int], Sequence[str]], *, restarts: int, log: Callable[[str], None],
        stopped: Callable[[int], bool], on_fault: Callable[[], str],
    ) -> None:  # fmt: skip
        self._command, self._restarts, self._log, self._stopped = command, restarts, log, stopped
        self._on_fault = on_fault
        self._child: subprocess.Popen[bytes] | None = None
        self._signalled: int | None = None

    def run(self) -> int:
        """The exit code of the last attempt, as a shell would see it. Signals to this process reach the attempt; while
        there is none, it is the last."""
        code = 0
        with self._forwarding():
            number = 1
            while True:
                if not self._start(number):
                    code = code or -(self._signalled or 0)  # 0: there was no attempt yet
                    break
                code = self._running.wait()
                if code in _FINAL or self._signalled or (code < 0 and self._stopped(self._running.pid)):
                    break
                start = self._on_fault()
                if self._signalled:
                    break
                if number > self._restarts:
                    self._log(
                        f"attempt {number} {describe_exit(code)}, and --restarts {self._restarts} is used up"
                    )
                    break
                self._log(
                    f"attempt {number} {describe_exit(code)}, see its error above: restart {number} of "
                    f"{self._restarts}, from {start}"
                )
                number += 1
        if code == ENDED_FOR_GOOD:
            return 1
        return 128 - code if code < 0 else code

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        assert self._child is not None
        return self._child

    def _start(self, number: int) -> bool:
        """False after a signal, which came while no attempt ran."""
        with deferred_interrupts():
            if self._signalled:
                return False
            # A process group of its own: the terminal's Ctrl-C would reach it beside the one that is forwarded, and two
            # are an order to end at once.
            self._child = subprocess.Popen(list(self._command(number)), process_group=0)
        return True

    @contextmanager
    def _forwarding(self) -> Iterator[None]:
        def forward(received: int, _frame: FrameType | None) -> None:
            self._signalled = received
            if self._child is not None:
                with suppress(ProcessLookupError):
                    self._child.send_signal(received)  # not to one that was reaped: Popen looks first

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        previous: dict[int, Any] = {number: signal.signal(number, forward) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler or signal.SIG_DFL)
