"""`supervise` beside other work: in a thread of its own, for a process whose main thread trains."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rltool.processes.signals import deferred_interrupts
from rltool.processes.supervise import ProcessGroup, supervise


class _Over(Exception):
    """The block has ended."""


class Watching:
    """Inside the `with` block the group's processes are watched, and started again by those whose they are
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
