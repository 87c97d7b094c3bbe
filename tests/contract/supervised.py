"""Playing a scenario under `supervise`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

from rltool.processes.run_directory import RunDirectory
from rltool.processes.state import ProcessState, read_state
from rltool.processes.supervise import ProcessGroup, supervise

SECONDS = 60.0
Scenario = Callable[[], Iterator[Callable[[], bool]]]
"""It yields what is waited for."""


class Over(Exception):
    """The scenario was played."""


class Supervised:
    """A group that `play` watches while a scenario goes on. said: notes so far; now: seconds that its clock is ahead of
    the real one."""

    def __init__(self, group: ProcessGroup) -> None:
        self.run: RunDirectory = group.run
        self.group, self.now = group, 0.0
        self.said: list[str] = []

    def process(self, role: str) -> ProcessState:
        state = read_state(self.run, role)
        assert state is not None
        return state

    def kill_process(self, role: str) -> ProcessState:
        state = self.process(role)
        os.kill(state.pid, signal.SIGKILL)
        return state

    def play(self, scenario: Scenario) -> None:
        """Raises Over when it was played, and what supervise raises."""
        waits, ends = scenario(), time.monotonic() + SECONDS
        until: Callable[[], bool] = lambda: True  # noqa: E731

        def sleep(_seconds: float) -> None:
            nonlocal until
            time.sleep(0.02)
            assert time.monotonic() < ends, f"never happened; said: {self.said}"
            while until():
                following = next(waits, None)
                if following is None:
                    raise Over
                until = following

        group, began = self.group, time.monotonic()
        supervise(
            group.processes, checks=group.checks, restarts=group.restarts, sleep=sleep, note=self.said.append,
            clock=lambda: time.monotonic() - began + self.now,
        )  # fmt: skip
