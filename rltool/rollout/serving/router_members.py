"""The router's worker list follows the fleet: by comparing the two, never by remembering what was once asked for.

A router has an owner of its own. It is restarted with an empty list; workers are added from outside;
a registration fails. So each look asks the router whom it has, and asks for what is missing:

- READY engines belong in. A PAUSED or ASLEEP one is left as it is: it is back in a moment.
- Every other engine of the fleet is taken out. Before the first weight sync of the run nothing is generated, so no one
  is moved for having none of our weights yet.
- An engine that fell out of READY is taken out even if it is READY again by the time of the look. sglang-router's
  circuit breaker keeps requests from a worker for 60 s after failures, reports nothing, and is reset only with the
  worker.
- A worker that is no engine of the fleet holds unknown weights. It is taken out, or the run is ended.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol
from urllib.parse import urlsplit

from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet.engine_set import EngineSet
from rltool.engines.fleet.fleet import Member, State, Transition
from rltool.engines.fleet.state import QUIET
from rltool.errors import EngineError, EngineUnreachable, TrainingStopped
from rltool.router.workers import Worker

REMOVE_SECONDS = 10.0
"""For workers to leave the list: until then they may be sent requests, so a change of the fleet waits."""
ADD_SECONDS = 5.0
"""For new workers to be in the list and healthy. Waiting spares the first requests a 503; it is no condition."""
REGISTRATION_SECONDS = 60.0
"""A registration that has not come about by then is asked for again."""
POLL_SECONDS = 0.1

Foreign = Literal["remove", "refuse"]


class WorkerList(Protocol):
    """The router's side (rltool/router/workers.py: RouterWorkers)."""

    url: str

    async def workers(self) -> list[Worker]: ...
    async def add(self, engine: EngineEndpoint) -> str: ...
    async def remove(self, worker: Worker) -> None: ...
    async def why_not_added(self, job: str) -> str: ...


def engine_of(url: str) -> str:
    """The engine behind a worker's URL: without the @RANK of a data-parallel replica; localhost is 127.0.0.1."""
    base, at, rank = url.rstrip("/").rpartition("@")
    parts = urlsplit(base if at and rank.isdigit() else url)
    host = "127.0.0.1" if parts.hostname == "localhost" else parts.netloc.rpartition(":")[0]
    return f"{parts.scheme}://{host}:{parts.port}"


def foreign_workers(workers: Sequence[Worker], urls: Collection[str]) -> list[Worker]:
    """Those that are none of these engines."""
    known = {engine_of(url) for url in urls}
    return [worker for worker in workers if engine_of(worker.url) not in known]


@dataclass(frozen=True)
class Changes:
    """What keeps the router's list from following the fleet."""

    add: tuple[str, ...]
    remove: tuple[Worker, ...]
    foreign: tuple[Worker, ...]


def compare(workers: Sequence[Worker], members: Sequence[Member], *, begun: bool, renew: Collection[str]) -> Changes:
    """begun: there has been a weight sync. renew: engines to be taken out even if they are READY, or of the fleet no
    more."""
    listed = {engine_of(worker.url) for worker in workers}
    unwanted = {engine_of(url) for url in (*renew, *(m.url for m in members if not _may_stay(m, begun)))}
    return Changes(
        add=tuple(m.url for m in members if m.state is State.READY and engine_of(m.url) not in listed),
        remove=tuple(worker for worker in workers if engine_of(worker.url) in unwanted),
        foreign=tuple(foreign_workers(workers, [*renew, *(m.url for m in members)])),
    )


def _may_stay(member: Member, begun: bool) -> bool:
    if member.takes_weights and not begun:
        return member.state not in (State.SUSPECT, State.DEAD, State.DRAINING)
    return member.state is State.READY or member.state in QUIET


@dataclass(frozen=True)
class _Registration:
    asked_at: float
    job: str


class RouterMembers:
    """away: engines that an earlier attempt may have left in the list,
    and that are not in the fleet yet. on_refused: called once, with the error that ends the run, where `foreign` is
    "refuse". counts: added, removed, foreign, failures."""

    def __init__(
        self, router: WorkerList, engines: EngineSet, *, foreign: Foreign = "remove", away: Collection[str] = (),
        on_refused: Callable[[TrainingStopped], None] = lambda error: None,
    ) -> None:  # fmt: skip
        self._router, self._fleet, self._clock, self._log = router, engines.fleet, engines.clock, engines.log
        self._foreign, self._on_refused = foreign, on_refused
        self.counts: Counter[str] = Counter()
        self.unreachable_since: float | None = None
        """When the router first gave no answer of those looks that are without one; None: it gave one at the last."""
        self._renew = set(away)
        self._registrations: dict[str, _Registration] = {}
        self._refused = False
        self._trouble: str | None = None
        self._lock = asyncio.Lock()

    @property
    def url(self) -> str:
        """Of the router."""
        return self._router.url

    def note(self, transition: Transition) -> None:
        """An engine's state has changed. One that may not serve now is renewed at the next look, whatever it is by
        then."""
        if transition.after not in QUIET | {State.READY, State.STARTING}:
            self._renew.add(transition.url)

    async def reconcile(self) -> None:
        """Have the router's list follow the fleet. Returns when no unwanted worker is in it, or logs why not.

        A router that fails is logged once and asked again at the next look. Bounded: REMOVE_SECONDS and one call.
        """
        async with self._lock:
            try:
                await self._follow()
            except EngineError as error:
                self.counts["failures"] += 1
                silent = isinstance(error, EngineUnreachable)
                self.unreachable_since = (self.unreachable_since or self._clock()) if silent else None
                self._log_once(f"router {self._router.url}: {error}")
            else:
                self.unreachable_since = None
                if self._trouble is not None:
                    self._log(f"router {self._router.url}: its workers are those of the fleet again")
                    self._trouble = None

    async def _follow(self) -> None:
        started = self._clock()
        asked: set[str] = set()
        while True:
            workers = await self._router.workers()
            self._forget_what_is_done(workers)
            changes = compare(
                workers, self._fleet.members(), begun=self._fleet.version is not None, renew=self._renew
            )
            foreign = self._unwelcome(changes.foreign)
            leaving = [*changes.remove, *foreign]
            for worker in foreign:
                if worker.id not in asked:
                    self.counts["foreign"] += 1
                    self._log(f"router {self._router.url}: removing {worker.url}, which is no engine of this run")
            await asyncio.gather(*(self._remove(worker) for worker in leaving if worker.id not in asked))
            asked.update(worker.id for worker in leaving)
            await asyncio.gather(*(self._add(url) for url in changes.add))
            waited = self._clock() - started
            if leaving and waited >= REMOVE_SECONDS:
                names = ", ".join(worker.url for worker in leaving)
                raise EngineError(f"it did not remove {names} within {REMOVE_SECONDS:g} s")
            if not leaving and not self._is_registering():
                return
            await asyncio.sleep(POLL_SECONDS)

    def _forget_what_is_done(self, workers: Sequence[Worker]) -> None:
        listed = {engine_of(worker.url) for worker in workers}
        healthy = {engine_of(worker.url) for worker in workers if worker.healthy}
        serving = self._fleet.serving()
        self._renew = {url for url in self._renew if engine_of(url) in listed}
        for url in list(self._registrations):
            if engine_of(url) in healthy or url not in serving:
                del self._registrations[url]

    def _is_registering(self) -> bool:
        """A registration is in progress; a long one keeps no other waiting."""
        now = self._clock()
        return any(now - registration.asked_at < ADD_SECONDS for registration in self._registrations.values())

    async def _add(self, url: str) -> None:
        pending = self._registrations.get(url)
        if pending is not None:
            if self._clock() - pending.asked_at < REGISTRATION_SECONDS:
                return
            self.counts["failures"] += 1
            why = await self._router.why_not_added(pending.job)
            self._log_once(f"router {self._router.url} has not taken {url} in {REGISTRATION_SECONDS:g} s: {why}")
        engine = self._fleet.find(url)
        if engine is not None:
            self._registrations[url] = _Registration(self._clock(), await self._router.add(engine.endpoint))
            self.counts["added"] += 1

    async def _remove(self, worker: Worker) -> None:
        self.counts["removed"] += 1
        await self._router.remove(worker)

    def _unwelcome(self, foreign: Sequence[Worker]) -> Sequence[Worker]:
        """The foreign workers that are to be removed: all, or none and the run ends."""
        if self._foreign == "remove" or not foreign:
            return foreign
        if not self._refused:
            self._refused = True
            self.counts["foreign"] += len(foreign)
            self._on_refused(TrainingStopped(refusal(self._router.url, foreign)))
        return ()

    def _log_once(self, trouble: str) -> None:
        """Once, however often it happens in a row."""
        if trouble != self._trouble:
            self._trouble = trouble
            self._log(trouble)


def refusal(router: str, foreign: Sequence[Worker]) -> str:
    """Why a run with engines.foreign_workers = "refuse" does not go on, and what to do."""
    names = ", ".join(worker.url for worker in foreign)
    return (
        f"the router {router} has workers that are no engines of this run: {names}. It would send requests to them, "
        "and their weights are unknown here. Take them out (`rltool router remove`), give them to the run "
        '(`rltool engines add`, at the start --rollout-external), or set engines.foreign_workers = "remove"'
    )
