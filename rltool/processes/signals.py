"""Interrupts at the two moments where Python's default is wrong: while a child is being started, and SIGTERM."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def deferred_interrupts() -> Iterator[dict[int, Any]]:
    """Hold Ctrl-C and its kin back until the block has ended, then deliver them. Yields the handlers that they have
    then, by number; the block may set others.

    An interrupt between fork and the bookkeeping would leave an unknown process. Handlers are swapped
    instead of masking signals, because a signal mask is inherited by the child and would make it deaf.
    Does nothing outside of the main thread, where Python delivers no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield {}
        return
    arrived: list[int] = []
    previous: dict[int, Any] = {
        number: signal.signal(number, lambda received, _frame: arrived.append(received)) for number in _ENDING
    }
    try:
        yield previous
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: it was not set from Python
        heard = [number for number in arrived if signal.getsignal(number) is not signal.SIG_IGN]
        if heard:
            signal.raise_signal(heard[0])


class Ending:
    """Which signal asked for the end of a foreground command; None while it goes on."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    @property
    def exit_code(self) -> int:
        """130 for Ctrl-C; 0 for SIGTERM and SIGHUP, which ask a service to end, and it did."""
        return 0 if self.signal in (signal.SIGTERM, signal.SIGHUP) else 130


@contextmanager
def termination_interrupts() -> Iterator[Ending]:
    """Inside the block SIGTERM and SIGHUP do what Ctrl-C does: KeyboardInterrupt, or cancellation of asyncio's main
    task.

    One way out means one clean-up path. A closed terminal (SIGHUP) would otherwise end the supervisor and leave its
    children, which have sessions of their own. A script that starts a command with `&` has it ignore SIGINT: there it
    is KeyboardInterrupt.
    """
    ending = Ending()

    def as_interrupt(number: int, _frame: FrameType | None) -> None:
        ending.signal = signal.Signals(number)
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)

    previous = {number: signal.signal(number, as_interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield ending
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler or signal.SIG_DFL)
