"""The task that keeps the fleet's facts up to date and carries out what it decides: probes, canary requests, router
membership, log.

The fleet (engines/fleet/fleet.py) is pure; this is its I/O. Rules of what a failure means stand there.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from typing import Protocol

from rltool.config.serve import Task
from rltool.engines.client import HEALTH_SECONDS
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet.canary import canary
from rltool.engines.fleet.engine_set import EngineSet
from rltool.engines.fleet.fleet import State, Transition
from rltool.engines.fleet.state import QUIET
from rltool.errors import EngineError, UsageError
from rltool.processes.tasks import Background, TaskFailed

KEPT_TRANSITIONS = 200
"""How many of the last transitions `recent` shows."""
CANARY_SECONDS = 15.0
"""Deadline of a canary request. One that had to queue behind others proves nothing, see `_canary`."""


LAG_INTERVAL = 0.1
KEPT_LAGS = 600
"""One minute of measurements."""


class LoopLag:
    """How late the event loop runs: work that blocks it delays every answer, and must not be taken for an engine's
    silence. Sleeps LAG_INTERVAL seconds again and again and keeps by how much it overslept."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: deque[tuple[float, float]] = deque(maxlen=KEPT_LAGS)

    def worst_since(self, moment: float) -> float:
        """Seconds of the longest delay since `moment`, 0 where none was seen."""
        return max((lag for at, lag in self._seen if at >= moment), default=0.0)

    async def watch(self) -> None:
        """Until it is cancelled."""
        while True:
            due = self._clock() + LAG_INTERVAL
            await asyncio.sleep(LAG_INTERVAL)
            self._seen.append((self._clock(), max(0.0, self._clock() - due)))


class Router(Protocol):
    """The worker list of the router in front of the fleet (rollout/serving/router_members.py)."""

    def note(self, transition: Transition) -> None: ...

    async def reconcile(self) -> None: ...


class FleetMonitor:
    """Logs one line per transition. on_change: called when the set of serving engines may have changed.
    observed_version(url, version, sent_at): called with what a probe found.
    restart: starts an engine's process again, for engines that we launched; None for those of others.
    serves: what the engines are for, so what a canary request asks of them.
    """

    def __init__(
        self,
        engines: EngineSet,
        *,
        router: Router | None = None,
        restart: Callable[[str], Awaitable[None]] | None = None,
        on_change: Callable[[], None] = lambda: None,
        observed_version: Callable[[str, str | None, float], None] = lambda *_: None,
        serves: Task = "generate",
    ) -> None:
        self._client, self._fleet, self._clock, self._log = engines.client, engines.fleet, engines.clock, engines.log
        self._router, self._restart, self._on_change = router, restart, on_change
        self._observed_version = observed_version
        self._serves: Task = serves
        self.lag = LoopLag(clock=engines.clock)
        self.recent: deque[Transition] = deque(maxlen=KEPT_TRANSITIONS)
        self.counts: Counter[str] = Counter()
        """Transitions since the start, by the state that they led to, and monitor_failures."""
        self._background = Background(self._failed)

    def start(self) -> None:
        self._background.repeat(self._round, "fleet monitor", seconds=self._fleet.policy.probe_seconds)
        self._background.keep(self.lag.watch(), "event loop lag")

    async def close(self) -> None:
        await self._background.close()

    async def carry_out(self) -> None:
        """Act on every transition since the last call. Whoever changed the fleet calls this; so does the task."""
        for transition in self._fleet.take_transitions():
            self.recent.append(transition)
            self.counts[transition.after.value if transition.after else "removed"] += 1
            before, after = (state.value if state else "-" for state in (transition.before, transition.after))
            ours = QUIET & {transition.before, transition.after}  # each sync pauses and resumes all
            if not ours or transition.after is State.DEAD:
                self._log(f"engine {transition.url}: {before} -> {after}: {transition.reason}")
            if self._router is not None:
                self._router.note(transition)
            if transition.after is State.DEAD and self._restart is not None:
                await self._restart(transition.url)
        if self._router is not None:
            await self._router.reconcile()
        self._on_change()

    async def probe(self, url: str) -> None:
        """Ask one engine how it is and what it holds; the answer is a fact for the fleet."""
        sent_at = self._clock()
        engine = self._fleet.find(url)
        if engine is None:  # it has left since it was to be asked
            return
        endpoint = engine.endpoint
        try:
            await self._client.health(endpoint)
            info = await self._client.probe(endpoint, timeout=HEALTH_SECONDS)
        except (EngineError, UsageError) as error:
            # A loop that was busy for most of the deadline has kept the answer waiting itself.
            if self.lag.worst_since(sent_at) < HEALTH_SECONDS / 2:
                self._fleet.probe_failed(url, str(error), sent_at=sent_at)
            return
        self._observed_version(url, info.weight_version, sent_at)
        self._fleet.probe_succeeded(url, info, sent_at=sent_at)

    async def _round(self) -> None:
        await asyncio.gather(*(self.probe(url) for url in self._fleet.to_probe()))
        for url in self._fleet.canaries_due():  # beside the probes, which they must not hold up
            self._background.start(self._canary(url), f"canary {url}")
        self._fleet.tick()
        await self.carry_out()

    def _failed(self, failure: TaskFailed) -> None:
        self.counts["monitor_failures"] += 1
        self._log(str(failure))

    async def _canary(self, url: str) -> None:
        """Asks an engine whose requests fail, or whose state is unknown: only a request shows that it works.

        No answer in time counts as a failure unless the engine has requests waiting: then this one waits among them.
        """
        sent_at = self._clock()
        self.counts["canary_requests"] += 1
        engine = self._fleet.find(url)
        if engine is None:
            return
        endpoint = engine.endpoint
        try:
            await canary(self._client, endpoint, self._serves, timeout=CANARY_SECONDS)
        except EngineError as error:
            if not await self._has_a_queue(endpoint):
                self._fleet.request_failed(url, f"canary request: {error}", sent_at=sent_at)
        else:
            self._fleet.request_succeeded(url, sent_at=sent_at)
        if self._fleet.has_transitions:  # idle fleets have one from each engine at once, and this looks at all of them
            await self.carry_out()

    async def _has_a_queue(self, endpoint: EngineEndpoint) -> bool:
        try:
            return (await self._client.load(endpoint)).waiting > 0
        except EngineError:
            return False
