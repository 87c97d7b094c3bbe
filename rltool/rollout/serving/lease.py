"""This run's claim on its engines: leases where rltool's plugin runs, an eye on the weights elsewhere.

A lease is taken before the first control call, renewed by a task of its own (a sync, without probes, may take
longer than a lease lasts), and given back at the end. A run that loses it does not fight back: it ends, and names who
took the engine. So it does when the last engine without a plugin is left to another trainer
(rollout/serving/foreign.py), and when a lease expires because something in this process keeps it from being renewed.

Who renews may live on without the run's driver: Ray ends an actor whose driver was killed after a minute where what
was Ray's stays behind as a zombie, as in a container without an init, and where a whole host went. So leases are given
back once the driver is dead, or has been silent for as long as they last.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, TypeVar

from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet.engine_set import EngineSet
from rltool.engines.fleet.fleet import State
from rltool.engines.fleet.lease import ask_lease, has_died
from rltool.engines.plugin.lease import Action, Answer
from rltool.engines.types import EngineInfo, Holder
from rltool.errors import EngineConflict, EngineError, RltoolError
from rltool.processes.tasks import Background, beside
from rltool.rollout.serving.foreign import ForeignWeights

T = TypeVar("T")

RENEWALS_PER_LEASE = 6
"""Renewals that may be lost before the lease expires."""
LONGEST_INTERVAL = 5.0
"""A run that lost its engines notices it soon, however long its leases are."""
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


class EngineLeases:
    """This run's leases. terms None: none are taken (no syncs)."""

    def __init__(self, engines: EngineSet, terms: LeaseTerms | None, *, run: str) -> None:
        self._client, self._fleet, self._clock, self._log = engines.client, engines.fleet, engines.clock, engines.log
        self._terms = terms
        self._foreign = ForeignWeights(run, engines.clock)
        self._held: dict[str, float] = {}
        """Engines whose leases were granted, and when that was asked for last."""
        self._heard_at: float | None = None
        self._given_back = False
        self.lost: set[str] = set()
        """Engines that another run controls now: they are sent nothing more, not even at the end."""
        self._error: EngineTaken | LeaseExpired | None = None
        self._failed = asyncio.Event()
        self._background = Background(lambda failure: engines.log(str(failure)))

    # -- life

    async def start(self) -> None:
        """Take every lease. EngineTaken if another run has one; those that were granted are given back then."""
        if self._terms is None:
            return
        steal = self._terms.steal
        refused = await asyncio.gather(*(self._acquire(each, steal=steal) for each in self._leasable().values()))
        reasons = [reason for reason in refused if reason is not None]
        if reasons:
            self.lost.update(m.url for m in self._fleet.members() if m.url not in self._held)
            await self.close()
            raise EngineTaken("\n".join(reasons) + "\nWait until that run has ended, or take them over with --steal")
        self._background.repeat(self._renew, "leases", seconds=self._terms.interval)

    async def close(self) -> None:
        """Give the leases back; they would expire by themselves."""
        await self._background.close()
        await asyncio.gather(*(self._each(self.release, url) for url in self._held.keys() - self.lost))

    async def admit(self, endpoint: EngineEndpoint, info: EngineInfo) -> None:
        """An engine that is about to join while the run trains. EngineConflict if it is another's."""
        is_leased = self._terms is not None and endpoint.takes_weights and info.plugin
        refusal = await self._acquire(endpoint) if is_leased else None
        if refusal is not None:
            raise EngineConflict(refusal)

    async def release(self, url: str) -> None:
        """This run needs the engine no more."""
        engine, was_held = self._fleet.find(url), self._held.pop(url, None) is not None
        if was_held and engine is not None:
            with suppress(EngineError):
                await self._ask(engine.endpoint, "release")

    # -- what the service asks

    def heard_of_driver(self) -> None:
        """It lives. Once said it is to be said again and again: without it the leases are not kept."""
        self._heard_at = self._clock()

    def check(self) -> None:
        """Raises EngineTaken once an engine was lost to another run, LeaseExpired once it may be."""
        if self._error is not None:
            raise self._error

    async def unless_taken(self, waiting: Awaitable[T]) -> T:
        """Its result, or what `check` raises as soon as that is known; what is waited for is cancelled then."""
        async with beside(waiting) as (task,), beside(self._failed.wait()) as (lost,):
            await asyncio.wait((task, lost), return_when=asyncio.FIRST_COMPLETED)
            self.check()
            return await task

    async def synced(self, sync: Callable[[], Awaitable[S]]) -> S:
        """The report of a sync. One that reached no engine may have been refused: then who holds the engines is asked
        at once, for the error that the run ends with."""
        self.check()
        try:
            report = await sync()
        except EngineError:
            await self._renew()
            self.check()
            raise
        self._foreign.synced(report.updated)
        return report

    def observed_version(self, url: str, version: str | None, sent_at: float) -> None:
        """An engine showed this weight version, in a probe or a completion that was sent at `sent_at`."""
        if not self._can_leave(url):
            return
        news = self._foreign.observed_version(url, version, sent_at=sent_at)
        if news is None:
            return
        self._log(str(news))
        if not news.given_up:
            self._fleet.version_refused(url, str(news), sent_at=sent_at)
            return
        self.lost.add(url)
        self._fleet.drain(url, str(news))
        if not any(m.takes_weights and m.state is not State.DRAINING for m in self._fleet.members()):
            self._end(EngineTaken(f"{news}. It was the last one. {self._next()}"))

    # -- the rest is private

    def _can_leave(self, url: str) -> bool:
        engine = self._fleet.find(url)
        return engine is not None and engine.state in CAN_LEAVE

    def _leasable(self) -> dict[str, EngineEndpoint]:
        """By URL."""
        if self._terms is None:
            return {}
        members = [m for m in self._fleet.members() if m.takes_weights and m.state is not State.DRAINING]
        return {m.url: m.endpoint for m in members if m.info.plugin}

    async def _renew(self) -> None:
        gone = self._without_driver()
        if gone is not None:
            if not self._given_back:
                self._log(f"{gone}: its engines are given back")
                self._given_back = True
                await asyncio.gather(*(self._each(self._give_back, url) for url in self._held.keys() - self.lost))
            return
        self._given_back = False  # heard of again, it has the engines again that no other run took meanwhile
        leasable = self._leasable()

        async def renew(url: str) -> EngineTaken | None:
            step = self._keep if url in self._held else self._claim
            return await step(leasable[url])

        losses = await asyncio.gather(
            *(self._each(renew, url) for url in leasable),
            *(self._each(self.release, url) for url in self._held.keys() - {*leasable, *self.lost}),
        )
        for lost in filter(None, losses):  # when it is known whose each engine is: the end leaves others' alone
            self._end(lost)

    def _without_driver(self) -> str | None:
        """Why leases are not renewed any more: the driver has died or is silent; None: it lives."""
        if self._terms is None:  # nothing is leased
            return None
        holder, now = self._terms.holder, self._clock()
        if has_died(holder):
            return f"{holder} has died"
        if self._heard_at is not None and now - self._heard_at > self._terms.seconds:
            return f"{holder} has said nothing for {now - self._heard_at:.0f} s"
        return None

    async def _give_back(self, url: str) -> None:
        """Release the lease, and keep the engine among those held: a run that takes it now ends this one."""
        engine = self._fleet.find(url)
        if engine is not None:
            with suppress(EngineError):
                await self._ask(engine.endpoint, "release")

    async def _each(
        self, step: Callable[[str], Awaitable[EngineTaken | None]], url: str
    ) -> EngineTaken | LeaseExpired | None:
        """The step at one engine. Its exception affects no other engine and no later try."""
        try:
            return await step(url)
        except Exception as error:
            what = f"the lease of the engine {url}: {type(error).__name__}: {error}"
            self._log(what)
            held = self._clock() - self._held.get(url, math.inf)
            if self._terms is None or held <= self._terms.seconds:
                return None
            expired = LeaseExpired(f"{what}. It has not been renewed for {held:.0f} s, and has expired. {self._next()}")
            expired.__cause__ = error
            return expired

    async def _keep(self, endpoint: EngineEndpoint) -> EngineTaken | None:
        """Why the run ends. A silent engine is the fleet's concern; only one that another run has taken ends this
        run."""
        with suppress(EngineError):
            answer = await self._ask(endpoint, "renew")
            if answer is not None and not answer.granted:
                self.lost.add(endpoint.url)
                return EngineTaken(
                    f"{answer.taken_by} has taken over the engine {endpoint.url}, which this run controlled; this run "
                    f"does not fight for it, and ends. {self._next()}"
                )
        return None

    async def _claim(self, endpoint: EngineEndpoint) -> None:
        """An engine that did not answer before, or came later."""
        url, refusal = endpoint.url, await self._acquire(endpoint)
        if refusal is not None and self._can_leave(url):
            self._log(f"{refusal}; this run goes on without it")
            self.lost.add(url)
            self._fleet.drain(url, refusal)

    async def _acquire(self, endpoint: EngineEndpoint, *, steal: bool = False) -> str | None:
        """Why the lease was not granted, or None: it was, or the engine knows none, or does not answer now."""
        with suppress(EngineError):
            answer = await self._ask(endpoint, "steal" if steal else "acquire")
            if answer is not None and answer.taken_by is not None and has_died(answer.taken_by):
                answer = await self._ask(endpoint, "steal", only_from=answer.taken_by.run)
            if answer is not None and not answer.granted:
                left = f", for another {answer.lease.expires_in:.0f} s unless it renews" if answer.lease else ""
                return f"the engine {endpoint.url} is leased by {answer.taken_by}{left}"
        return None

    async def _ask(
        self, endpoint: EngineEndpoint, action: Action, *, only_from: str | None = None
    ) -> Answer | None:
        """None: the engine knows no leases."""
        assert self._terms is not None
        terms, asked_at = self._terms, self._clock()
        answer = await ask_lease(self._client, endpoint, action, terms.holder, terms.seconds, only_from=only_from)
        if answer is not None and answer.granted and action != "release":
            self._held[endpoint.url] = asked_at
        return answer

    def _end(self, error: EngineTaken | LeaseExpired) -> None:
        if self._error is None:
            self._error = error
            self._log(str(error))
            self._failed.set()

    def _next(self) -> str:
        name = f" --run {self._terms.holder.name}" if self._terms else ""
        return f"Go on with `rltool train --resume{name}`, on engines that no other run uses or with --steal"
