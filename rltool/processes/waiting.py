"""Progress lines of a long wait, on a terminal and in a log."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PROGRESS_SECONDS = 15.0


def _nothing() -> str:
    return ""


@contextmanager
def waiting(
    what: str,
    log: Callable[[str], None],
    *,
    still: Callable[[], str] = _nothing,
    every: float = PROGRESS_SECONDS,
) -> Iterator[None]:
    """Log `what` at the start, and every few seconds that it still runs, until the block ends.

    what: names the deadline, where there is one. still: what is missing at that moment, appended. The lines come
    from a thread: the block may be a single call into Ray or torch.
    """
    log(what)
    started, ended = time.monotonic(), threading.Event()

    def repeat() -> None:
        while not ended.wait(every):
            missing = still()
            log(f"{what}: {time.monotonic() - started:.0f} s so far" + (f", {missing}" if missing else ""))

    thread = threading.Thread(target=repeat, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
