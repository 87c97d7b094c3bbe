"""The engines behind a gateway: a fleet and a data plane, as a run has them (engines/fleet/fleet.py,
rollout/serving/data_plane.py).

A gateway that is given addresses probes them by itself. It compares no versions: it cannot know which weights are the
newest, and records those that each token was sampled with.

A run's own gateway follows the run's fleet. The rollout manager writes a FleetView to its standard input, one line of
JSON, within VIEW_SECONDS of every change, and every REPEAT_SECONDS. An engine gets turns where both agree: the manager
about its weights, this fleet about its health. So an engine that hangs with an agent's turn is left out here though the
manager has not noticed, and one that the manager took out gets no turn however healthy it looks. When the manager is
gone the last view stays, and probes go on.

Behind a router the fleet is empty: the router chooses, and its own list of workers follows the run.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from rltool.engines.client import EngineClient
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet.engine_set import EngineSet
from rltool.engines.fleet.fleet import Fleet, FleetPolicy, State
from rltool.engines.types import EngineInfo
from rltool.engines.weight_version import Lineage, WeightVersion
from rltool.gateway.parts import Parts
from rltool.processes.tasks import Background
from rltool.rollout.serving.data_plane import DataPlane
from rltool.rollout.serving.monitor import FleetMonitor
from rltool.rollout.serving.versions import VersionBook

VIEW_SECONDS = 0.05
"""How often the manager looks for a change: turns wait for so long after a sync."""
REPEAT_SECONDS = 1.0
POLICY = FleetPolicy(probe_seconds=2.0, probes_to_dead=15, canary_seconds=2.0)
"""Quicker than a run's: a gateway may have one engine, and an agent waits for it. Half a minute to dead, as there."""
UNLIMITED = 10**9
"""Requests at one engine: engines queue turns by themselves, and agents bound them (--max-turns-at-once)."""
LINE_BYTES = 64 * 1024 * 1024
UNSEEN = frozenset({State.STARTING, State.SUSPECT, State.DEAD})
"""States in which the manager gets no answer from an engine."""

logger = logging.getLogger(__name__)


class EngineView(NamedTuple):
    """One engine as the manager's fleet has it. since: of its state, seconds of time.monotonic(), which all processes
    of a host share. version: of its last full sync; boot_id: of the process that it was found to be."""

    endpoint: EngineEndpoint
    takes_weights: bool
    state: State
    since: float
    version: WeightVersion | None
    boot_id: str | None


class FleetView(NamedTuple):
    """published: training steps of the weights that the engines serve, None where the run sends none."""

    engines: tuple[EngineView, ...]
    published: int | None

    @classmethod
    def of(cls, fleet: Fleet, published: int | None) -> FleetView:
        return cls(
            tuple(
                EngineView(m.endpoint, m.takes_weights, m.state, m.since, m.version, m.boot_id)
                for m in fleet.members()
            ),
            published,
        )

    def to_json(self) -> str:
        """One line."""
        rows = [
            [e.endpoint.model_dump(mode="json"), *e[1:4], str(e.version) if e.version else None, e.boot_id]
            for e in self.engines
        ]
        return json.dumps({"engines": rows, "published": self.published})

    @classmethod
    def from_json(cls, text: str | bytes) -> FleetView:
        """The inverse of `to_json`."""
        data: dict[str, Any] = json.loads(text)
        engines = (
            EngineView(
                EngineEndpoint.model_validate(endpoint), takes_weights, State(state), since,
                WeightVersion.parse(version) if version else None, boot_id,
            )
            for endpoint, takes_weights, state, since, version, boot_id in data["engines"]
        )  # fmt: skip
        return cls(tuple(engines), data["published"])


async def views_on_stdin() -> AsyncIterator[FleetView]:
    """What the manager writes, until it is gone."""
    reader = asyncio.StreamReader(limit=LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while (line := await reader.readline()).endswith(b"\n"):  # a manager that is killed may leave half a line
        yield FleetView.from_json(line)
    logger.warning("the rollout manager is gone: the engines that it named last are kept")


class FollowingFleet(Fleet):
    """A fleet whose weight states follow another fleet's, and whose health states come from its own probes."""

    def __init__(self, policy: FleetPolicy, *, clock: Callable[[], float]) -> None:
        super().__init__(policy, clock=clock)
        self._refused_at: dict[str, float] = {}
        """When an engine last answered with weights that it should not have."""
        self._viewed: dict[str, str | None] = {}
        """The boot id of each engine in the last view."""

    def probe_succeeded(self, url: str, info: EngineInfo, *, sent_at: float) -> None:
        # An engine may be probed between its update and the view that shows it: its new version is no fault.
        super().probe_succeeded(url, replace(info, weight_version=None), sent_at=sent_at)

    def version_refused(self, url: str, reason: str, *, sent_at: float) -> None:
        serves = url in self.serving()
        super().version_refused(url, reason, sent_at=sent_at)
        if serves and url not in self.serving():
            self._refused_at[url] = self.clock()

    def join(self, engine: EngineView) -> None:
        """-> READY, or STALE where the engine takes weights; STARTING where the manager gets no answer from it."""
        self.add(engine.endpoint, _unprobed(engine.endpoint), takes_weights=engine.takes_weights)
        self._identify(engine)

    def leave(self, url: str) -> None:
        self.process_exited(url, "left the run")  # no state but this can be left at once
        self.remove(url, "left the run")
        for facts in (self._refused_at, self._viewed):
            facts.pop(url, None)

    def follow(self, engines: tuple[EngineView, ...]) -> None:
        """Bring each member to the state that the view gives it, as far as its own health allows."""
        for engine in engines:
            self._identify(engine)
            if engine.state is not State.READY:
                self._stop(engine)
        served = [engine for engine in engines if engine.state is State.READY and self._may_serve(engine)]
        for engine in served:
            if self.member(engine.endpoint.url).state is not State.PAUSED:
                self.pause(engine.endpoint.url)
        for engine in served:
            assert engine.version is not None
            self.update_finished(engine.endpoint.url, engine.version)
            if self.version != engine.version:
                self.advance(engine.version)
        for engine in served:
            self.resume(engine.endpoint.url)

    def _identify(self, engine: EngineView) -> None:
        """Take over what the manager has found: that a STARTING engine answers, and which process it is."""
        url, boot_id = engine.endpoint.url, engine.boot_id
        is_news = boot_id is not None and boot_id != self._viewed.get(url)
        self._viewed[url] = boot_id
        if engine.state not in UNSEEN and (is_news or self.member(url).state is State.STARTING):
            self.probe_succeeded(url, replace(self.member(url).info, boot_id=boot_id), sent_at=self.clock())

    def _may_serve(self, engine: EngineView) -> bool:
        """Whether an engine that the manager has READY is to be brought there."""
        member = self.member(engine.endpoint.url)
        if not member.takes_weights:
            if member.state is State.ASLEEP:
                self.wake_up(member.url)
            return False
        is_another = None not in (member.boot_id, engine.boot_id) and member.boot_id != engine.boot_id
        if engine.version is None or is_another or engine.since <= self._refused_at.get(member.url, float("-inf")):
            return False  # the manager has not seen yet that it was started again, or samples with other weights
        is_there = member.state is State.READY and member.version == engine.version
        return not is_there and member.state in (State.READY, State.STALE, State.ASLEEP, State.PAUSED)

    def _stop(self, engine: EngineView) -> None:
        """The engine gets nothing new. What it has is withdrawn, unless it is PAUSED or DRAINING."""
        url, wanted = engine.endpoint.url, engine.state
        state = self.member(url).state
        if wanted is State.DRAINING:
            if state is State.ASLEEP and engine.takes_weights:
                self.pause(url)
            if self.member(url).state is State.PAUSED:
                self.resume(url)
            if self.member(url).state in (State.READY, State.STALE, State.SUSPECT):
                self.drain(url, "removed from the run")
        elif not engine.takes_weights:  # of its health this fleet knows by itself
            if wanted is State.ASLEEP and state is State.READY:
                self.fall_asleep(url)
        elif wanted is State.PAUSED:
            if state in (State.READY, State.STALE, State.ASLEEP):
                self.pause(url)
        elif not (wanted is State.ASLEEP and state is State.ASLEEP):
            if state in (State.READY, State.ASLEEP):
                self.pause(url)
            if self.member(url).state is State.PAUSED:
                self.update_failed(url, f"{wanted.value} in the run's fleet")
            if wanted is State.ASLEEP and self.member(url).state is State.STALE:
                self.fall_asleep(url)


class Engines:
    """`start` first, `close` last. deadline: seconds for a request at one engine; policy: thresholds of the fleet."""

    def __init__(
        self, client: EngineClient, parts: Parts, *, deadline: float, policy: FleetPolicy = POLICY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.fleet = FollowingFleet(policy, clock=clock)
        self._background = Background()
        engines = EngineSet(self.fleet, client, logger.info)
        # What the run is publishing just now is known here a moment later than at its engines.
        lineage = Lineage.from_json(parts.lineage) if parts.lineage is not None else None
        self._book = VersionBook(lineage, publishing=sys.maxsize) if lineage is not None else None
        router = parts.endpoints[0] if parts.through_router else None
        self.plane = DataPlane(
            engines, router=router, requests_per_engine=UNLIMITED, deadline=deadline, min_serving=0 if router else 1,
            judge=self._book,
        )  # fmt: skip
        self.monitor = FleetMonitor(engines, on_change=self.plane.changed)
        if router is not None:
            self.plane.limit = UNLIMITED
            return
        now = clock()
        self._join(EngineView(e, False, State.READY, now, None, e.boot_id) for e in parts.endpoints)
        self.fleet.take_transitions()

    def start(self, views: AsyncIterator[FleetView] | None = None) -> None:
        """Watch the engines; those of the views, where a run's fleet is followed."""
        self.monitor.start()
        if views is not None:
            self._background.start(self._follow(views), "following the run's engines")

    async def close(self) -> None:
        await self._background.close()
        await self.monitor.close()

    async def _follow(self, views: AsyncIterator[FleetView]) -> None:
        async for view in views:
            try:
                await self.apply(view)
            except Exception:  # the next view may be followed again
                logger.exception("a view of the run's engines could not be followed")

    async def apply(self, view: FleetView) -> None:
        """Take over which engines there are, and what the run's manager knows of each."""
        named = {engine.endpoint.url: engine for engine in view.engines}
        for member in self.fleet.members():
            wanted = named.get(member.url)
            was_added_again = member.state is State.DRAINING and wanted and wanted.state is not State.DRAINING
            if wanted is None or was_added_again:
                self.fleet.leave(member.url)
        self._join(engine for url, engine in named.items() if self.fleet.find(url) is None)
        if self._book is not None and view.published is not None:
            self._book.published = view.published
        self.fleet.follow(view.engines)
        await self.monitor.carry_out()

    def why_not(self) -> str:
        """Why nothing serves, or ""."""
        found = [f"{m.url} is {m.state.value} ({m.reason})" for m in self.fleet.members()]
        return "" if self.fleet.serving() else "; ".join(found)

    def _join(self, engines: Iterable[EngineView]) -> None:
        for engine in engines:
            self.fleet.join(engine)


def _unprobed(endpoint: EngineEndpoint) -> EngineInfo:
    """What is known of an engine before this gateway's own first probe of it."""
    return EngineInfo(
        dialect=endpoint.dialect or "", engine_version="", model_id="", world_size=1, max_model_len=None,
        vocab_size=None, dtype=None, weight_backend=endpoint.weight_backend, weight_version=None,
        boot_id=endpoint.boot_id, plugin=endpoint.plugin, role=endpoint.role, bootstrap_port=endpoint.bootstrap_port,
    )  # fmt: skip
