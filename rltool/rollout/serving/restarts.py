"""Engines that the run has started itself are started again when they die: within a budget, each time after a longer
pause.

Two ways lead here. The process ended, or lost what generates: its host reports it to the fleet
(Fleet.process_exited). Or the fleet has given an engine up that still runs, for it answers nothing: then its process is
ended first. Either way the engine is DEAD, FleetMonitor calls `restart`, and a new process under the old address is
STARTING; it serves after its next weight sync.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from rltool.engines.fleet.fleet import Fleet, State
from rltool.errors import RltoolError
from rltool.processes.restarts import RestartBudget
from rltool.processes.tasks import Background
from rltool.rollout.serving.monitor import FleetMonitor

LOOK_SECONDS = 1.0
"""How often hosts are asked whether a process has ended."""


class EngineProcesses(Protocol):
    """The processes of engines that the run has started, by URL (training/cluster/engine_host.py: HostHandles)."""

    def urls(self) -> Iterable[str]: ...

    def is_lost(self, url: str) -> bool:
        """Whether a host that has a part of it is gone for good: it cannot be started again."""
        ...

    async def exits(self) -> Mapping[str, str]:
        """Those that have ended since the last call, and how."""
        ...

    async def start_again(self, url: str) -> None:
        """End what is left of it, and start it anew. Raises RltoolError where that cannot be."""
        ...

    async def end(self, url: str) -> None:
        """End what is left of it. Raises RltoolError where that cannot be."""
        ...


class EngineRestarts:
    """Owned by the rollout manager's event loop. log: one line for the user. counts: restarts, and given_up for engines
    that have none left, of all models."""

    def __init__(self, processes: EngineProcesses, budget: RestartBudget, *, log: Callable[[str], None]) -> None:
        self._processes, self._budget, self._log = processes, budget, log
        self.counts: Counter[str] = Counter()
        self._fleets: list[tuple[Fleet, FleetMonitor]] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._died_again: set[str] = set()
        """Engines whose end was reported while they were being started."""
        self._unanswered: set[str] = set()
        """Engines that have died, and have answered nothing since: while they load they do not count as alive."""
        self._buried: set[str] = set()
        """Engines whose host is gone."""
        self._background = Background(lambda failure: log(str(failure)))
        self._trouble: str | None = None
        self._may_start = asyncio.Event()
        self._may_start.set()
        self._starting: set[str] = set()

    @property
    def is_starting(self) -> bool:
        """Whether a process is being started right now."""
        return bool(self._starting)

    def owns(self, url: str) -> bool:
        """Whether the run has started this engine."""
        return url in self._processes.urls()

    def hold(self) -> None:
        """No engine is started again until `go_on`: what it needs is not there."""
        self._may_start.clear()

    def go_on(self) -> None:
        self._may_start.set()

    def watch(self, fleet: Fleet, monitor: FleetMonitor) -> None:
        """Engines of this fleet may be among the processes; the monitor was given `restart`."""
        self._fleets.append((fleet, monitor))

    def start(self) -> None:
        self._background.repeat(self._look, "engine processes", seconds=LOOK_SECONDS)

    async def close(self) -> None:
        await self._background.close()

    async def restart(self, url: str) -> None:
        """An engine of the fleet is DEAD: have it started again, later. Engines of others are left to them."""
        found = self._fleet_of(url)
        is_dead = found is not None and found[0].member(url).state is State.DEAD
        if not is_dead or url in self._tasks or url in self._buried or not self.owns(url):
            return
        if self._processes.is_lost(url):
            await self._bury(url)
            return
        delay = self._budget.died(url)
        if delay is None:
            self.counts["given_up"] += 1
            self._log(
                f"engine {url} stays dead: it was started again {self._budget.used(url)} times "
                "(engines.max_restarts); see its log (`rltool logs`)"
            )
            return
        self._unanswered.add(url)
        self._log(f"engine {url}: started again in {delay:g} s (restart {self._budget.used(url)})")
        task = self._tasks[url] = self._background.start(self._after(url, delay), f"restart of {url}")
        task.add_done_callback(lambda ended: self._ended(url, ended))

    async def _after(self, url: str, delay: float) -> None:
        await asyncio.sleep(delay)
        await self._may_start.wait()
        found = self._fleet_of(url)
        if found is None or found[0].member(url).state is not State.DEAD:
            return  # it was removed meanwhile, or has come back by itself
        self._starting.add(url)
        try:
            await self._start(url)
        finally:
            self._starting.discard(url)

    async def _start(self, url: str) -> None:
        self._died_again.discard(url)
        try:
            await self._processes.start_again(url)
        except RltoolError as error:
            if not self._processes.is_lost(url):
                self._log(f"engine {url} could not be started again: {error}")
            del self._tasks[url]
            await self.restart(url)
            return
        del self._tasks[url]  # from here on its death is news again
        self.counts["restarts"] += 1
        found = self._fleet_of(url)
        if found is None:
            return
        fleet, monitor = found
        if fleet.member(url).state is not State.DEAD:  # what was ended just now had answered once more
            fleet.process_exited(url, "ended, to be started again")
        fleet.restarted(url)
        await monitor.carry_out()
        if url in self._died_again:
            await self._exited(url, "ended as soon as it was started")

    async def _bury(self, url: str) -> None:
        self._buried.add(url)
        self.counts["given_up"] += 1
        try:
            await self._processes.end(url)  # what other hosts have of it
        except RltoolError as error:
            self._log(f"engine {url} stays dead: {error}")

    async def end(self, url: str, why: str) -> None:
        """End an engine's process, in any state; it counts as one that has died. Raises
        RltoolError."""
        await self._processes.end(url)
        found = self._fleet_of(url)
        if found is not None and found[0].member(url).state is not State.DEAD:
            await self._exited(url, why)

    async def _look(self) -> None:
        self._see_who_answers()
        try:
            ended = await self._processes.exits()
        except RltoolError as error:
            if str(error) != self._trouble:  # once, however often it happens in a row
                self._log(f"engine processes: {error}")
            self._trouble = str(error)
            return
        self._trouble = None
        for url, how in ended.items():
            await self._exited(url, how)

    def _see_who_answers(self) -> None:
        for url in list(self._unanswered):
            found = self._fleet_of(url)
            if found is not None and found[0].member(url).state not in (State.STARTING, State.DEAD):
                self._unanswered.discard(url)
                self._budget.started(url)

    async def _exited(self, url: str, how: str) -> None:
        found = self._fleet_of(url)
        if found is None:  # it has left the run
            return
        if url in self._tasks:  # it may be the process that is being started now
            self._died_again.add(url)
            return
        fleet, monitor = found
        was_dead = fleet.member(url).state is State.DEAD
        fleet.process_exited(url, how)
        await monitor.carry_out()
        if was_dead:  # the monitor saw no transition
            await self.restart(url)

    def _fleet_of(self, url: str) -> tuple[Fleet, FleetMonitor] | None:
        return next((pair for pair in self._fleets if pair[0].find(url) is not None), None)

    def _ended(self, url: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(url) is task:
            del self._tasks[url]
