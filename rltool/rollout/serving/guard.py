"""Whether enough engines are left to go on with, and the router in front of them; the error when they do not come
back."""

from __future__ import annotations

from typing import Protocol

from rltool.engines.fleet.engine_set import EngineSet
from rltool.engines.fleet.fleet import State
from rltool.engines.fleet.state import QUIET
from rltool.errors import RltoolError
from rltool.processes.excerpt import excerpt

LOG_LINES = 6
"""Of each engine's log in the error that ends a run."""


class GenerationLost(RltoolError):
    """Nobody has been there to generate for longer than deadlines.engines."""


class TooFewEngines(GenerationLost):
    """Fewer engines than engines.min_serving."""


class RouterLost(GenerationLost):
    """The router that all requests go through does not answer."""


class GuardedRouter(Protocol):
    """The router's worker list (rollout/serving/router_members.py)."""

    @property
    def url(self) -> str: ...

    @property
    def unreachable_since(self) -> float | None:
        """On the guard's clock; None: it answers."""
        ...


class EngineGuard:
    """deadline: seconds (deadlines.engines). An engine that is paused
    for a sync counts, and one that sleeps while the trainer has its GPUs: both have deadlines of their own. router:
    None where engines are asked directly."""

    def __init__(
        self, engines: EngineSet, *, min_serving: int, deadline: float, router: GuardedRouter | None = None
    ) -> None:
        self._fleet, self._clock = engines.fleet, engines.clock
        self._min_serving, self._deadline, self._router = min_serving, deadline, router
        self._since: float | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether there were too few engines at the last check."""
        return self._since is not None

    def check(self) -> None:
        """To be called every second or so. TooFewEngines, RouterLost once it has lasted too long."""
        self._check_router()
        there = self._fleet.members(State.READY, *QUIET)
        if len(there) >= self._min_serving:
            self._since = None
            return
        now = self._clock()
        self._since = self._since if self._since is not None else now
        if now - self._since >= self._deadline:
            raise TooFewEngines(self.explain())

    def _check_router(self) -> None:
        """A run never leaves its router by itself: its owner may mean it to choose."""
        since = self._router.unreachable_since if self._router is not None else None
        if self._router is None or since is None or self._clock() - since < self._deadline:
            return
        raise RouterLost(
            f"the router {self._router.url}, through which all generation goes, has not answered for "
            f"{self._clock() - since:.0f} s (deadlines.engines = {self._deadline:g} s). Start it again at that address "
            "(`rltool router --port`), or leave it out (engines.router, data_url in endpoints.json), and go on with "
            "`rltool train --resume`"
        )

    def explain(self) -> str:
        """Each engine, its reason, the end of its log where that is on this host, and what to do."""
        waited = self._clock() - (self._since if self._since is not None else self._clock())
        lines = [
            f"too few engines serve: engines.min_serving = {self._min_serving}, waited {waited:.0f} s "
            f"(deadlines.engines = {self._deadline:g} s)"
        ]
        for member in self._fleet.members():
            lines.append(f"  {member.url}: {member.state.value} ({member.reason})")
            log = member.endpoint.log
            lines += [f"    | {line}" for line in (excerpt(log, LOG_LINES) if log else [])]
        lines.append(
            "Start engines again (`rltool serve-engines`), then go on with `rltool train --resume`, which starts its "
            "own again; `rltool engines add` gives new ones to a run that is waiting."
        )
        return "\n".join(lines)
