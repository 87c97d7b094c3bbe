"""Where generation goes: the engines that serve, or a router in front of them.

The fleet decides which engines serve. A request that fails at one engine (5xx, broken connection, no answer within its
deadline) is a fact for the fleet and is sent to another, from where it began; one whose engine is taken out of service
meanwhile is withdrawn and sent again at once, for a wedged engine would never answer it. A request that three engines
failed on is failed: it may be what breaks them. While none serves, as during a weight sync, requests wait; how long
that may last is the fleet's owner's matter (deadlines.engines). Behind a router the router chooses; which worker failed
is known where our plugin's reply names it, else every serving engine has to answer a canary request, and another
failure of the same request counts against it once they have.

Requests of a session stay at the engine that had the one before, whose prefix cache they can use, while it has a slot
for them; a new session goes to the engine with the fewest requests, then the fewest sessions. Behind a router the
session is a header, which its policy "manual" follows.

Where engines have the role "prefill", each request goes to one of them and to one of the others, which takes over its
KV cache (engines/fleet/disaggregation.py).

Every completion's weight versions are judged on arrival. One that this run cannot train on is never returned: its
engine is reported stale, the event is counted, and the request is sent again.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from rltool.engines.adapters import adapter_name, lacks_adapter
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet import disaggregation
from rltool.engines.fleet.disaggregation import CacheOutdated, PrefillFailed
from rltool.engines.fleet.engine_set import EngineSet
from rltool.engines.fleet.fleet import Member, State
from rltool.engines.replies import says_paused
from rltool.engines.types import ROUTING_KEY_HEADER, TEXT_ALONE, Completion, GenerateRequest, TokenStream, VersionSpan
from rltool.engines.weight_version import WeightVersion
from rltool.errors import EngineError, EngineRejected, EngineTimedOut, EngineUnreachable, UsageError
from rltool.processes.tasks import beside
from rltool.rollout.serving.fair_queue import FairQueue
from rltool.rollout.serving.loads import Loads

RETRY_SECONDS = 0.2
"""Pause after a failed attempt, doubled with each up to sixteen times: an engine that refuses everything, or a router
that is away, must not be asked in a tight loop."""
ABORT_SECONDS = 5.0
"""For one engine to take an abort. A hung engine does not keep the others' requests running:
these requests are sent concurrently."""
POISONOUS_AFTER = 3
"""Failures of one request, each at an engine that works for others."""
ROUTERS_OWN = frozenset({429, 502, 503, 504})
"""Statuses that are the router's own: it has no worker, reaches none, or is full."""
SESSIONS = 65536
"""How many of them are remembered, the newest: a run's conversations are far fewer at a time."""
KEEPS_REQUESTS = frozenset({State.READY, State.PAUSED, State.DRAINING})
"""States in which an engine brings its requests to their end."""


class VersionJudge(Protocol):
    """What the data plane asks of the run's versions (rollout/serving/versions.py)."""

    published: int | None

    def adapter(self) -> WeightVersion | None:
        """Of the adapter that a request has to name; None: of none."""
        ...

    def refusal(self, version: str) -> str | None:
        """Why tokens of this version are not trained on, or None."""
        ...

    def is_behind(self, version: str, published: int) -> bool:
        """Whether an engine that sampled with this version has missed a sync that `published` names."""
        ...


def _all_of(completion: Completion, version: WeightVersion) -> Completion:
    spans = (VersionSpan(str(version), 0, len(completion.token_ids)),) if completion.token_ids else ()
    return replace(completion, versions=spans)


class _NotItsFault(EngineError):
    """A failure that is not the request's fault: the engine holds the wrong weights, or is paused."""


class BrokenStream(EngineError):
    """A stream that ended before its time, of whose tokens the client has some, and that cannot be taken up."""


class PoisonousRequest(EngineError):
    """A request that several engines failed on, one after another, while they served others."""


@dataclass(frozen=True, eq=False)
class Attempt:
    """Where a request is sent now. engine: as it was then; None behind a router. prefill: the engine that fills its KV
    cache where that is another. answered_by: boot ids of the processes that answered, where their replies have it."""

    endpoint: EngineEndpoint
    engine: Member | None
    sent_at: float
    prefill: Member | None = None
    answered_by: set[str] = field(default_factory=set)

    @property
    def engines(self) -> list[Member]:
        """The engines that the request is known to be at."""
        return [engine for engine in (self.engine, self.prefill) if engine is not None]


@dataclass
class Trace:
    """Where a request went. engine: address that answered it, a router's where there is one; failures: of the attempts
    before, in order."""

    engine: str | None = None
    failures: list[EngineError] = field(default_factory=list)


class DataPlane:
    """Owned by one event loop.

    router: the address that generation goes through, or None. requests_per_engine: in flight at once, per serving
    engine; `limit` overrides it. min_serving: with fewer engines no request is sent. judge: None accepts every version
    (no trainer takes part). deadline: seconds for a request at one engine (deadlines.generate); waiting for its turn is
    not part of it. observed_version(engine URL, version, sent_at): called with a version that is refused.
    """

    def __init__(
        self,
        engines: EngineSet,
        *,
        router: EngineEndpoint | None,
        requests_per_engine: int,
        deadline: float,
        min_serving: int = 1,
        judge: VersionJudge | None = None,
        observed_version: Callable[[str, str | None, float], None] = lambda *_: None,
    ) -> None:
        self._client, self._fleet, self._clock, self.router = engines.client, engines.fleet, engines.clock, router
        self._per_engine, self._deadline, self._judge = requests_per_engine, deadline, judge
        self._min_serving = min_serving
        self._observed_version = observed_version
        self.limit: int | None = None
        self.counts: Counter[str] = Counter()
        """Events since the start: failed_requests, withdrawn_requests, poisonous_requests, refused_foreign,
        refused_unpublished, stale_engine."""
        self._loads = Loads()
        """Requests in flight at each engine, or at the router, and the sessions that it is the home of."""
        self._seen: int | None = None
        """Revision of the fleet that `_able` and the candidates of `_loads` are of."""
        self._able: dict[str, list[str]] = {}
        self._prefilling: Counter[str] = Counter()
        self._adapters: Counter[str] = Counter()
        """How many requests name each adapter."""
        self._homes: OrderedDict[str, tuple[str, str | None]] = OrderedDict()
        """Session -> engine and prefill engine of its newest request."""
        self._sending: dict[Attempt, asyncio.Future[list[Completion]]] = {}
        self._paused_since: dict[str, float] = {}
        """Address -> when it first refused a request for a pause, since it last answered one."""
        self._withdrawn: dict[Attempt, bool] = {}
        """Attempts that were cancelled, and whether their engine failed on them."""
        self._failed_engines: set[str] = set()
        self._ids: dict[str, tuple[int | None, list[str], list[str]]] = {}
        """Of each request in flight its group, its names at engines, and those that have it: [] behind a router."""
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()
        """A cancelled request is dropped when its turn comes."""
        self._granted = 0
        """Requests whose turn has come and which have not run since: their slots are taken."""

    @property
    def in_flight(self) -> int:
        """Requests that are with an engine or the router now."""
        return self._loads.total

    def in_flight_at(self, url: str) -> int:
        """Requests that are with this engine; unknown behind a router."""
        return self._loads.requests[url]

    def samples_with(self, adapter: str) -> bool:
        """Whether a request that is in flight names it."""
        return self._adapters[adapter] > 0

    def changed(self) -> None:
        """The fleet, the endpoints or the limit changed: requests that wait look again, and requests at engines that
        left service are withdrawn, to be sent again.

        Behind a router it is not known which of them are at an engine that has failed: all are sent again.
        """
        states = {member.url: member.state for member in self._fleet.members()}
        failed = {url for url, state in states.items() if state in (State.SUSPECT, State.DEAD)}
        newly_failed, self._failed_engines = failed - self._failed_engines, failed
        for attempt, task in list(self._sending.items()):
            involved = [engine.url for engine in attempt.engines]
            left = any(states.get(url) not in KEEPS_REQUESTS for url in involved) if involved else newly_failed
            if left and attempt not in self._withdrawn and not task.done():
                self.counts["withdrawn_requests"] += 1
                self._withdrawn[attempt] = not failed.isdisjoint(involved)
                task.cancel()
        self._grant()

    def forget(self, session: str) -> None:
        """The session has ended."""
        home = self._homes.pop(session, None)
        if home is not None:
            self._loads.add(home[0], sessions=-1)

    def settle(self, session: str, url: str) -> None:
        """The engine that had the session's newest request, perhaps from another process: the next goes there if it
        can."""
        if url in self._choices() and self._homes.get(session, ("",))[0] != url:
            self.forget(session)
            self._homes[session] = url, None
            self._loads.add(url, sessions=1)

    async def generate(
        self,
        request: GenerateRequest,
        *,
        group: int | None = None,
        trace: Trace | None = None,
        stream: TokenStream | None = None,
    ) -> list[Completion]:
        """request.n completions by an engine that serves. group: a number under which `abort` finds the request; None:
        it is of an evaluation. Where requests of groups and of an evaluation wait for a slot, they take turns. trace:
        filled in while the request is in flight. stream: of a request with n = 1, receives its tokens as they come;
        where an engine fails within it, what has come is returned as an aborted response.

        EngineRejected at once for a 4xx: repeating it cannot help. PoisonousRequest when it has failed three times,
        with the last failure and the state of every engine. UsageError for pictures behind a router, which drops them.
        """
        if request.pictures and self.router is not None:
            raise UsageError(f"rltool sends pictures to engines directly: a router {TEXT_ALONE}")
        counted: dict[str, float] = {}
        """Engines that this request has failed at, and when that last counted against it."""
        avoid: str | None = None
        trace = trace or Trace()
        failures = tries = 0
        while True:
            kind = "evaluation" if group is None else "rollout"
            attempt = await self._acquire(kind, avoid=avoid, session=request.session)
            try:
                completions = await self._attempt(attempt, request, group, stream)
                trace.engine = attempt.endpoint.url
                return completions
            except EngineRejected:
                raise
            except EngineError as error:
                trace.failures.append(error)
                withdrawn = attempt in self._withdrawn
                at_fault = attempt.prefill if isinstance(error, PrefillFailed) else attempt.engine
                avoid = at_fault.url if at_fault is not None else None
                suspects = self._suspects(attempt, error)
                if suspects and all(self._has_worked_since(counted.get(url), url) for url in suspects):
                    failures += 1
                    counted |= dict.fromkeys(suspects, self._clock())
                if stream is not None and stream.token_ids:
                    return [self._what_came(attempt, stream, error)]
                if failures >= POISONOUS_AFTER:
                    self.counts["poisonous_requests"] += 1
                    raise PoisonousRequest(
                        f"failed {failures} times at engines that serve other requests; {self._describe(error)}"
                    ) from error
            finally:
                self._withdrawn.pop(attempt, None)
                self._release(attempt)
            if not withdrawn:
                await asyncio.sleep(RETRY_SECONDS * 2 ** min(tries, 4))
            tries += 1
            request = request.again()

    async def abort(self, groups: Collection[int] | None = None, *, at: str | None = None) -> dict[str, str]:
        """Abort this run's requests (those of `groups`) at every engine (that of URL `at`), directly: a router forwards
        no abort. They return with what they have, finish_reason "abort". Returns URL -> reason for failures.

        Each engine is sent the ids of what it has: all to all would be the square of a fleet. Behind a router it is
        not known who has what, so there every engine is sent all; an unknown id is ignored.
        """
        ids: defaultdict[str | None, list[str]] = defaultdict(list)
        for group, names, urls in self._ids.values():
            if groups is None or group in groups:
                for url in urls or (None,):
                    ids[url] += names
        anywhere = ids.pop(None, [])
        failures: dict[str, str] = {}

        async def abort(url: str, endpoint: EngineEndpoint) -> None:
            try:
                await self._client.abort(endpoint, [*anywhere, *ids[url]], timeout=ABORT_SECONDS)
            except EngineError as error:
                failures[url] = str(error)

        members = [m for m in self._fleet.members() if at in (None, m.url) and (anywhere or m.url in ids)]
        await asyncio.gather(*(abort(member.url, member.endpoint) for member in members))
        return failures

    # -- the rest is private

    async def _acquire(self, kind: str, *, avoid: str | None, session: str) -> Attempt:
        """A slot, in the order in which requests of this kind came. avoid: the engine that has just failed this one,
        taken only if it is alone."""
        ticket = self._waiting.ticket(kind)
        while True:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.push(ticket, turn)
            self._grant()
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():  # the turn that this request will not take
                    self._granted -= 1
                    self._grant()
                raise
            self._granted -= 1
            attempt = self._pick(avoid, session)
            if attempt is not None:
                self._loads.add(attempt.endpoint.url, requests=1)
                if attempt.prefill is not None:
                    self._prefilling[attempt.prefill.url] += 1
                return attempt

    def _free(self) -> int:
        """Requests that may be sent now."""
        able = len(self._choices())
        return self._limit(able) - self.in_flight - self._granted if able >= self._min_serving else 0

    def _limit(self, able: int) -> int:
        """Requests that this many engines may have in all."""
        return self.limit if self.limit is not None else self._per_engine * able

    def _choices(self) -> dict[str, list[str]]:
        """Each request asks for them several times, and fleets of hundreds change far more rarely."""
        if self._seen != self._fleet.revision:
            self._seen, self._able = self._fleet.revision, disaggregation.pairs(self._fleet)
            self._loads.choose_among(self._able)
        return self._able

    def _pick(self, avoid: str | None, session: str) -> Attempt | None:
        if self._free() <= 0:
            return None
        if self.router is not None:
            return Attempt(self.router, None, self._clock())
        choices = self._choices()
        home, first_home = self._homes.get(session, (None, None))
        share = self._limit(len(choices)) / len(choices)

        def first_rank(candidate: str) -> tuple[bool, bool, int]:
            return candidate == avoid, candidate != first_home, self._prefilling[candidate]

        stays = home in choices and home != avoid and self._loads.requests[home] < share
        url = home if home is not None and stays else self._loads.least(by_sessions=bool(session), avoid=avoid)
        first = min(choices[url], key=first_rank, default=None)
        if session:
            self.forget(session)
            self._homes[session] = url, first
            self._loads.add(url, sessions=1)
            if len(self._homes) > SESSIONS:
                self.forget(next(iter(self._homes)))
        engine, prefill = self._fleet.member(url), self._fleet.member(first) if first is not None else None
        return Attempt(engine.endpoint, engine, self._clock(), prefill)

    def _release(self, attempt: Attempt) -> None:
        self._loads.add(attempt.endpoint.url, requests=-1)
        if attempt.prefill is not None:
            self._prefilling[attempt.prefill.url] -= 1
        self._grant()

    def _grant(self) -> None:
        free = self._free()
        while free > 0 and self._waiting:
            turn = self._waiting.pop()
            if not turn.done():
                turn.set_result(None)
                self._granted += 1
                free -= 1

    def _what_came(self, attempt: Attempt, stream: TokenStream, error: EngineError) -> Completion:
        """Of a stream that `error` has ended: its tokens are with the client, so they cannot be sampled anew."""
        stream.finish_reason = "abort"
        came = stream.completion()
        if sum(span.end - span.start for span in came.versions) != len(came.token_ids):
            raise BrokenStream(
                f"a stream broke off after {len(came.token_ids)} tokens, and with which weights they were sampled is "
                f"not known: {error}"
            ) from error
        try:
            self._judge_versions(attempt, [came], None)
        except EngineError as refused:
            raise BrokenStream(f"within a stream: {refused}") from error
        return came

    async def _attempt(
        self, attempt: Attempt, request: GenerateRequest, group: int | None, stream: TokenStream | None
    ) -> list[Completion]:
        """One request to one address, in a task of its own, so that it can be withdrawn."""
        async with beside(self._send(attempt, request, group, stream)) as (task,):
            self._sending[attempt] = task
            try:
                await asyncio.wait((task,))
            finally:
                del self._sending[attempt]
                # The fleet has it already; if the caller is gone by then, asyncio would log an unread exception.
                task.add_done_callback(lambda sent: sent.cancelled() or sent.exception())
        if attempt in self._withdrawn and task.cancelled():
            kind = EngineUnreachable if self._withdrawn[attempt] else _NotItsFault
            raise kind(f"{attempt.endpoint.url} was taken out of service while it had the request")
        return task.result()

    async def _send(
        self, attempt: Attempt, request: GenerateRequest, group: int | None, stream: TokenStream | None
    ) -> list[Completion]:
        published = self._judge.published if self._judge else None
        version = self._judge.adapter() if self._judge else None
        if version is not None:  # anew at each attempt: no sequence has tokens of two
            request = replace(request, adapter=adapter_name(version))
            if stream is not None:
                stream.version = str(version)
        with self._named(attempt, request, group), self._sampling_with(request.adapter):
            try:
                completions = await self._generate(attempt, request, stream)
            except EngineRejected as error:
                if version is None or not lacks_adapter(error, request.adapter):
                    raise
                self._lost_adapter(attempt, version)
                raise _NotItsFault(f"{attempt.endpoint.url} has no adapter {request.adapter}") from error
            except CacheOutdated as error:
                raise _NotItsFault(str(error)) from error
            except EngineError as error:
                if says_paused(error) and self._may_be_paused(attempt.endpoint.url):
                    raise _NotItsFault(str(error)) from error
                known = error.named("deadlines.generate") if isinstance(error, EngineTimedOut) else error
                self._failed(attempt, known)
                raise known from error.__cause__
        if version is not None:  # what an engine reports is of the model that the adapter is beside
            completions = [_all_of(completion, version) for completion in completions]
        self._judge_versions(attempt, completions, published)
        for url in self._engines(attempt):
            self._fleet.request_succeeded(url, sent_at=attempt.sent_at)
        self._paused_since.pop(attempt.endpoint.url, None)
        return completions

    def _may_be_paused(self, url: str) -> bool:
        """Whether a pause can be this long: a request that waits in a paused engine has failed after the deadline."""
        return self._clock() - self._paused_since.setdefault(url, self._clock()) < self._deadline

    async def _generate(
        self, attempt: Attempt, request: GenerateRequest, stream: TokenStream | None
    ) -> list[Completion]:
        """Elsewhere is tried next, so one attempt here is enough."""
        engine, prefill = attempt.engine, attempt.prefill
        if engine is None or prefill is None:
            headers = {ROUTING_KEY_HEADER: request.session} if request.session else None
            if stream is not None:
                whole = await self._client.stream(
                    attempt.endpoint, request, stream, timeout=self._deadline, answered_by=attempt.answered_by,
                    headers=headers,
                )  # fmt: skip
                return [whole]
            return await self._client.generate(
                attempt.endpoint, request, timeout=self._deadline, attempts=1, answered_by=attempt.answered_by,
                headers=headers,
            )  # fmt: skip
        return await disaggregation.generate(
            self._client, prefill.endpoint, engine.endpoint, request, timeout=self._deadline, stream=stream,
            may_decode=lambda: self._is_unmoved(engine) and self._is_unmoved(prefill),
            version=str(engine.version) if engine.version is not None else None,
        )  # fmt: skip

    def _is_unmoved(self, engine: Member) -> bool:
        """Whether it has been in the same state since then."""
        now = self._fleet.find(engine.url)
        return now is not None and now.since == engine.since

    def _engines(self, attempt: Attempt, error: EngineError | None = None) -> list[str]:
        """Who had the request, as far as that is known; who is at fault for an error."""
        known = [engine.url for engine in attempt.engines]
        if len(known) == 2 and error is not None:
            return [known[isinstance(error, PrefillFailed)]]
        return known or [member.url for member in self._fleet.members() if member.boot_id in attempt.answered_by]

    def _suspects(self, attempt: Attempt, error: EngineError) -> list[str]:
        """Engines at which the request may have failed by its own fault: none where that proves nothing about the
        request, all that serve where a router has passed on a failure and hides whose it is."""
        if isinstance(error, _NotItsFault):
            return []
        is_the_routers = isinstance(error, EngineUnreachable) or getattr(error, "status", None) in ROUTERS_OWN
        return self._engines(attempt, error) or ([] if is_the_routers else list(self._fleet.serving()))

    def _has_worked_since(self, moment: float | None, url: str) -> bool:
        """Whether the engine has brought a request to its end since then; so it has where there is no such moment."""
        engine = self._fleet.find(url)
        ended = engine.last_success_at if engine is not None else None
        return moment is None or (ended is not None and ended > moment)

    def _failed(self, attempt: Attempt, error: EngineError) -> None:
        self.counts["failed_requests"] += 1
        engines = self._engines(attempt, error)
        for url in engines:
            self._fleet.request_failed(url, str(error), sent_at=attempt.sent_at)
        if not engines:
            self._fleet.request_lost()

    def _judge_versions(self, attempt: Attempt, completions: Sequence[Completion], published: int | None) -> None:
        if self._judge is None:
            return
        engines = [attempt.engine.url] if attempt.engine is not None else self._engines(attempt)
        for version in {span.version for completion in completions for span in completion.versions}:
            reason = self._judge.refusal(version)
            if reason is not None:
                self.counts[f"refused_{reason}"] += 1
                for url in engines:
                    self._observed_version(url, version, attempt.sent_at)
                self._report_stale(engines, attempt, f"sampled with {version}: {reason}")
                raise _NotItsFault(
                    f"{attempt.endpoint.url} sampled with weights {version}, which this run cannot train on ({reason})"
                )
            if published is not None and self._judge.is_behind(version, published):
                self.counts["stale_engine"] += 1
                self._report_stale(engines, attempt, f"sampled with {version} after the sync to step {published}")

    def _lost_adapter(self, attempt: Attempt, version: WeightVersion) -> None:
        """One that requests name still: its engine was started again. An earlier one may have been unloaded."""
        if self._judge is not None and self._judge.adapter() == version:
            self.counts["stale_engine"] += 1
            reason = f"has lost the adapter of {version}"
            self._report_stale(self._engines(attempt), attempt, reason)

    @contextmanager
    def _sampling_with(self, adapter: str) -> Iterator[None]:
        self._adapters[adapter] += 1
        try:
            yield
        finally:
            self._adapters[adapter] -= 1

    def _report_stale(self, engines: Sequence[str], attempt: Attempt, reason: str) -> None:
        for url in engines:
            self._fleet.version_refused(url, reason, sent_at=attempt.sent_at)

    @contextmanager
    def _named(self, attempt: Attempt, request: GenerateRequest, group: int | None) -> Iterator[None]:
        parts = disaggregation.one_by_one(request) if attempt.prefill else [request]
        names = [name for part in parts for name in self._client.request_ids(attempt.endpoint, part)]
        self._ids[request.request_id] = (group, names, [engine.url for engine in attempt.engines])
        try:
            yield
        finally:
            self._ids.pop(request.request_id, None)

    def _describe(self, failure: EngineError) -> str:
        states = (
            "; ".join(f"{m.url} is {m.state.value} ({m.reason})" for m in self._fleet.members()) or "there is no engine"
        )
        return f"last failure: {failure}; {states}"
