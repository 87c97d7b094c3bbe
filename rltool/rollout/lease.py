"""This run's claim on its engines: leases where rltool's plugin runs, an eye on the weights elsewhere.

A lease is taken before the first control call, renewed by a task of its own (a sync, in which nobody probes, may take
longer than a lease lasts), and given back at the end. Whoever loses it does not fight back: the run ends, and says who
took the engine. So it does when the last engine without a plugin is left to another trainer (rollout/foreign.py), and
when a lease expires because something in this process keeps it from being renewed.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, TypeVar

from rltool.engines.client import EngineClient
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet import Fleet, State
from rltool.engines.lease import ask_lease, has_died
from rltool.engines.plugin.lease import Action, Answer
from rltool.engines.types import EngineInfo, Holder
from rltool.errors import EngineConflict, EngineError, RltoolError
from rltool.processes.tasks import Background, beside
from rltool.rollout.foreign import ForeignWeights

T = TypeVar("T")

RENEWALS_PER_LEASE = 6
"""So many may be lost on the way before the lease expires."""
LONGEST_INTERVAL = 5.0
"""A run that lost its engines shall hear of it soon, however long its leases are."""
CAN_LEAVE = (State.READY, State.STALE, State.SUSPECT)


class Synced(Protocol):
    """What a sync reports (weights.sync.SyncReport): the engines that took the weights."""

    @property
    def updated(self) -> Collection[str]: ...


S = TypeVar("S", bound=Synced)


class EngineTaken(RltoolError):
    """Another run controls an engine of this one."""


class LeaseExpired(RltoolError):
    """A lease could not be renewed in its time, by no fault of its engine; `__cause__` is what the last try raised."""


@dataclass(frozen=True)
class LeaseTerms:
    """seconds: how long an engine stays ours without a renewal; steal: take engines that another run has leased."""

    holder: Holder
    seconds: float
    steal: bool = False

    @property
    def interval(self) -> float:
        return min(self.seconds / RENEWALS_PER_LEASE, LONGEST_INTERVAL)


class Ownership:
    """endpoints, infos: of the fleet's members by URL; live views. terms None: no leases are taken (nobody syncs)."""

    def __init__(
        self,
        client: EngineClient,
        fleet: Fleet,
        endpoints: Mapping[str, EngineEndpoint],
        infos: Mapping[str, EngineInfo],
        terms: LeaseTerms | None,
        *,
        run: str,
        say: Callable[[str], None] = print,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._fleet, self._endpoints, self._infos = client, fleet, endpoints, infos
        self._terms, self._say = terms, say
        self._foreign = ForeignWeights(run, clock)
        self._clock = clock
        self._held: dict[str, float] = {}
        """Engines whose leases were granted, and when that was asked for last."""
        self.ceded: set[str] = set()
        """Engines that are another's now: they are told nothing more, at the end of the run neither."""
        self._error: EngineTaken | LeaseExpired | None = None
        self._lost = asyncio.Event()
        self._background = Background(lambda failure: say(str(failure)))

    # -- life

    async def start(self) -> None:
        """Take every lease. EngineTaken if another run has one; those that were granted are given back then."""
        if self._terms is None:
            return
        steal = self._terms.steal
        refused = await asyncio.gather(*(self._acquire(url, steal=steal) for url in self._leasable()))
        reasons = [reason for reason in refused if reason is not None]
        if reasons:
            self.ceded.update(m.url for m in self._fleet.members() if m.url not in self._held)
            await self.close()
            raise EngineTaken("\n".join(reasons) + "\nWait until that run has ended, or take them over with --steal")
        self._background.repeat(self._renew, "leases", seconds=self._terms.interval)

    async def close(self) -> None:
        """Give the leases back; they would expire by themselves."""
        await self._background.close()
        await asyncio.gather(*(self._each(self.release, url) for url in self._held.keys() - self.ceded))

    async def admit(self, url: str) -> None:
        """An engine that is about to join while the run trains. EngineConflict if it is another's."""
        is_leased = self._terms is not None and self._endpoints[url].takes_weights and self._infos[url].plugin
        refusal = await self._acquire(url) if is_leased else None
        if refusal is not None:
            raise EngineConflict(refusal)

    async def release(self, url: str) -> None:
        """This run needs the engine no more."""
        if self._held.pop(url, None) is not None:
            with suppress(EngineError):
                await self._ask(url, "release")

    # -- what the service asks

    def check(self) -> None:
        """Raises EngineTaken once an engine was lost to another run, LeaseExpired once it may be."""
        if self._error is not None:
            raise self._error

    async def unless_taken(self, waiting: Awaitable[T]) -> T:
        """Its result, or what `check` raises as soon as that is known; what is waited for is cancelled then."""
        async with beside(waiting) as (task,), beside(self._lost.wait()) as (lost,):
            await asyncio.wait((task, lost), return_when=asyncio.FIRST_COMPLETED)
            self.check()
            return await task

    async def synced(self, sync: Callable[[], Awaitable[S]]) -> S:
        """The report of a sync. One that reached nobody may have been refused: then who holds the engines is asked at
        once, for the error that the run ends with."""
        self.check()
        try:
            report = await sync()
        except EngineError:
            await self._renew()
            self.check()
            raise
        self._foreign.synced(report.updated)
        return report

    def saw(self, url: str, version: str | None, sent_at: float) -> None:
        """An engine showed this weight version, in a probe or a completion that was sent at `sent_at`."""
        if not self._can_leave(url):
            return
        news = self._foreign.saw(url, version, sent_at=sent_at)
        if news is None:
            return
        self._say(str(news))
        if not news.given_up:
            self._fleet.version_refused(url, str(news), sent_at=sent_at)
            return
        self.ceded.add(url)
        self._fleet.drain(url, str(news))
        if not any(m.takes_weights and m.state is not State.DRAINING for m in self._fleet.members()):
            self._end(EngineTaken(f"{news}. It was the last one. {self._next()}"))

    # -- the rest is private

    def _can_leave(self, url: str) -> bool:
        return any(m.url == url and m.state in CAN_LEAVE for m in self._fleet.members())

    def _leasable(self) -> list[str]:
        if self._terms is None:
            return []
        members = [m.url for m in self._fleet.members() if m.takes_weights and m.state is not State.DRAINING]
        return [url for url in members if url in self._infos and self._infos[url].plugin]

    async def _renew(self) -> None:
        urls = self._leasable()
        losses = await asyncio.gather(
            *(self._each(self._keep if url in self._held else self._claim, url) for url in urls),
            *(self._each(self.release, url) for url in self._held.keys() - {*urls, *self.ceded}),
        )
        for lost in filter(None, losses):  # when it is known whose each engine is: the end leaves others' alone
            self._end(lost)

    async def _each(
        self, step: Callable[[str], Awaitable[EngineTaken | None]], url: str
    ) -> EngineTaken | LeaseExpired | None:
        """The step at one engine. What it raises keeps neither the others' leases nor the next try from anything."""
        try:
            return await step(url)
        except Exception as error:
            what = f"the lease of the engine {url}: {type(error).__name__}: {error}"
            self._say(what)
            held = self._clock() - self._held.get(url, math.inf)
            if self._terms is None or held <= self._terms.seconds:
                return None
            expired = LeaseExpired(f"{what}. It has not been renewed for {held:.0f} s, and has expired. {self._next()}")
            expired.__cause__ = error
            return expired

    async def _keep(self, url: str) -> EngineTaken | None:
        """Why the run ends. An engine that says nothing is the fleet's business; that it is another's is ours."""
        with suppress(EngineError):
            answer = await self._ask(url, "renew")
            if answer is not None and not answer.granted:
                self.ceded.add(url)
                return EngineTaken(
                    f"{answer.taken_by} has taken over the engine {url}, which this run controlled; this run does not "
                    f"fight for it, and ends. {self._next()}"
                )
        return None

    async def _claim(self, url: str) -> None:
        """An engine that did not answer before, or came later."""
        refusal = await self._acquire(url)
        if refusal is not None and self._can_leave(url):
            self._say(f"{refusal}; this run goes on without it")
            self.ceded.add(url)
            self._fleet.drain(url, refusal)

    async def _acquire(self, url: str, *, steal: bool = False) -> str | None:
        """Why the lease was not granted, or None: it was, or the engine knows none, or does not answer now."""
        with suppress(EngineError):
            answer = await self._ask(url, "steal" if steal else "acquire")
            if answer is not None and answer.taken_by is not None and has_died(answer.taken_by):
                answer = await self._ask(url, "steal", only_from=answer.taken_by.run)
            if answer is not None and not answer.granted:
                left = f", for another {answer.lease.expires_in:.0f} s unless it renews" if answer.lease else ""
                return f"the engine {url} is leased by {answer.taken_by}{left}"
        return None

    async def _ask(self, url: str, action: Action, *, only_from: str | None = None) -> Answer | None:
        """None: the engine knows no leases, or has left the fleet, and is not asked anything."""
        assert self._terms is not None
        if url not in self._endpoints:
            return None
        endpoint, terms, asked_at = self._endpoints[url], self._terms, self._clock()
        answer = await ask_lease(self._client, endpoint, action, terms.holder, terms.seconds, only_from=only_from)
        if answer is not None and answer.granted and action != "release":
            self._held[url] = asked_at
        return answer

    def _end(self, error: EngineTaken | LeaseExpired) -> None:
        if self._error is None:
            self._error = error
            self._say(str(error))
            self._lost.set()

    def _next(self) -> str:
        name = f" --run {self._terms.holder.name}" if self._terms else ""
        return f"Go on with `rltool train --resume{name}`, on engines that no other run uses or with --steal"
