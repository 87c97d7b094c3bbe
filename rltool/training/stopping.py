"""SIGTERM and Ctrl-C, turned into an orderly end: save, free the engines, leave. A second Ctrl-C ends at once."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class StopRequested(BaseException):
    """Raised out of a wait that may be given up. Not an Exception: no handler of failures shall swallow it."""


class StopSignal:
    """`requested` names the first signal that came. It is for the loop, and for waits that may be given up, to see.

    The handler raises nothing: an exception that comes out of it inside one of Ray's waits ends as a SystemError
    ("returned a result with an exception set"), and now and then it did. A second Ctrl-C takes that risk.
    """

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C; 0 after SIGTERM, which a scheduler sends to have the run saved."""
        return 130 if self.requested == signal.SIGINT else 0

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

    def raise_if_requested(self) -> None:
        """StopRequested once a signal has come: called again and again by a wait whose loss costs nothing."""
        if self.requested:
            raise StopRequested

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = self.requested or signal.Signals(number)
