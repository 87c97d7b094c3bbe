"""Whether enough engines are left to go on with, and what to say when they do not come back."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet import Fleet, State
from rltool.engines.fleet_state import QUIET
from rltool.errors import RltoolError
from rltool.processes.excerpt import excerpt

LOG_LINES = 6
"""Of each engine's log in the error that ends a run."""


class TooFewEngines(RltoolError):
    """Fewer engines than engines.min_serving, for longer than deadlines.engines."""


class EngineGuard:
    """endpoints: of the members, by URL, a live view. deadline: seconds (deadlines.engines). An engine that is paused
    for a sync counts, and one that sleeps while the trainer has its GPUs: both have deadlines of their own."""

    def __init__(
        self,
        fleet: Fleet,
        endpoints: Mapping[str, EngineEndpoint],
        *,
        min_serving: int,
        deadline: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet, self._endpoints, self._clock = fleet, endpoints, clock
        self._min_serving, self._deadline = min_serving, deadline
        self._since: float | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether there were too few engines at the last check."""
        return self._since is not None

    def check(self) -> None:
        """To be called every second or so. TooFewEngines once it has lasted too long."""
        there = [m for m in self._fleet.members() if m.state is State.READY or m.state in QUIET]
        if len(there) >= self._min_serving:
            self._since = None
            return
        now = self._clock()
        self._since = self._since if self._since is not None else now
        if now - self._since >= self._deadline:
            raise TooFewEngines(self.explain())

    def explain(self) -> str:
        """Each engine, its reason, the end of its log where that is on this host, and what to do."""
        waited = self._clock() - (self._since if self._since is not None else self._clock())
        lines = [
            f"too few engines serve: engines.min_serving = {self._min_serving}, waited {waited:.0f} s "
            f"(deadlines.engines = {self._deadline:g} s)"
        ]
        for member in self._fleet.members():
            lines.append(f"  {member.url}: {member.state.value} ({member.reason})")
            log = self._endpoints[member.url].log if member.url in self._endpoints else None
            lines += [f"    | {line}" for line in (excerpt(log, LOG_LINES) if log else [])]
        lines.append(
            "Start engines again (`rltool serve-engines`), then go on with `rltool train --resume`; "
            "`rltool engines add` gives new ones to a run that is waiting."
        )
        return "\n".join(lines)
