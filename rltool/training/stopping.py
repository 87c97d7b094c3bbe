"""SIGTERM and Ctrl-C, turned into an orderly end: save, free the engines, leave. A second Ctrl-C ends at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

_STDERR = 2


class StopRequested(BaseException):
    """Raised out of a wait that may be cancelled. Not an Exception: no handler of failures shall swallow it."""


def write_at_once(line: str) -> None:
    """To the terminal, past all buffers: the handler may have interrupted a print, whose lock is then held."""
    with suppress(OSError):  # the terminal is gone
        os.write(_STDERR, line.encode())


class StopSignal:
    """`requested` names the first signal that came. It is for the loop, and for waits that may be cancelled, to see.

    The handler raises nothing: an exception that comes out of it inside one of Ray's waits ends as a SystemError
    ("returned a result with an exception set"), and now and then it did. A second Ctrl-C takes that risk. What it does
    is log at once what happens now: `consequence`, which the run keeps up to date.
    """

    def __init__(self, log: Callable[[str], None] = write_at_once) -> None:
        self.requested: signal.Signals | None = None
        self.consequence = "the run ends"
        self._log = log

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C; 0 after SIGTERM, which a scheduler sends to have the run saved."""
        return 130 if self.requested == signal.SIGINT else 0

    @property
    def name(self) -> str:
        """Of the signal that came, as people call it."""
        return "Ctrl-C" if self.requested == signal.SIGINT else "SIGTERM"

    @contextmanager
    def installed(self) -> Iterator[StopSignal]:
        """Handle SIGTERM and SIGINT in this block; the handlers before are put back."""
        before = self.arm()
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def arm(self) -> dict[signal.Signals, Any]:
        """Set the handlers; returns those before. Again after ray.init: it puts its own on SIGTERM, which abort the
        driver."""
        return {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)}

    def raise_if_requested(self, _waited: float = 0.0) -> None:
        """StopRequested once a signal has come: called again and again by a wait whose loss costs nothing."""
        if self.requested:
            raise StopRequested

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.requested is None:
            self.requested = signal.Signals(number)
            self._log(f"\n{self.name}: {self.consequence}; Ctrl-C{self._again} ends at once\n")

    @property
    def _again(self) -> str:
        return " again" if self.requested == signal.SIGINT else ""
