"""Where generation goes: the engines that serve, or a router in front of them. One request, one deadline, wherever it
ends up.

The fleet says who serves. A request that fails at one engine (5xx, broken connection) is a fact for the fleet and is
sent to another; while nobody serves, as during a weight sync, requests wait. Both within the request's deadline. Behind
a router the router chooses, and which worker failed is not known here.

Every completion's weight versions are judged on arrival. One that this run cannot train on is never returned: its
engine is reported stale, the event is counted, and the request is sent again.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from rltool.engines.client import EngineClient
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet import Fleet
from rltool.engines.types import Completion, GenerateRequest
from rltool.errors import EngineError, EngineRejected, EngineUnreachable

RETRY_SECONDS = 0.2
"""Pause after a failed attempt: one engine that refuses everything must not be asked in a tight loop."""
ABORT_SECONDS = 5.0
"""For one engine to take an abort. A hung engine does not keep the others' requests running:
they are told side by side."""


class VersionJudge(Protocol):
    """What the data plane asks of the run's versions (rollout/versions.py)."""

    published: int | None

    def refusal(self, version: str) -> str | None:
        """Why tokens of this version are not trained on, or None."""
        ...

    def is_behind(self, version: str, published: int) -> bool:
        """Whether an engine that sampled with this version has missed a sync that `published` names."""
        ...


@dataclass(frozen=True)
class Attempt:
    """Where a request is sent now. engine: whom a failure is attributed to; None behind a router."""

    endpoint: EngineEndpoint
    engine: str | None


class DataPlane:
    """Owned by one event loop. endpoints: of the fleet's members, by URL, dialects known; a live view: engines come and
    go.

    router: the address that generation goes through, or None. requests_per_engine: in flight at once, per serving
    engine; `limit` overrides it. judge: None accepts every version (no trainer takes part). deadline: seconds for a
    request, waiting included.
    """

    def __init__(
        self,
        client: EngineClient,
        fleet: Fleet,
        endpoints: Mapping[str, EngineEndpoint],
        *,
        router: EngineEndpoint | None,
        requests_per_engine: int,
        deadline: float,
        judge: VersionJudge | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._fleet, self._endpoints, self._router = client, fleet, endpoints, router
        self._per_engine, self._deadline, self._judge, self._clock = requests_per_engine, deadline, judge, clock
        self.limit: int | None = None
        self.counts: Counter[str] = Counter()
        """Events since the start: failed_requests, refused_foreign, refused_unpublished, stale_engine."""
        self._in_flight: Counter[str] = Counter()
        self._ids: dict[str, tuple[int | None, list[str]]] = {}
        self._tickets = itertools.count()
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        """A heap: requests in the order in which they came. A cancelled one is dropped when its turn comes."""
        self._granted = 0
        """Requests whose turn has come and which have not run since: their slots are taken."""

    @property
    def in_flight(self) -> int:
        """Requests that are with an engine or the router now."""
        return self._in_flight.total()

    def in_flight_at(self, url: str) -> int:
        """Requests that are with this engine; behind a router nobody here knows."""
        return self._in_flight[url]

    def changed(self) -> None:
        """The fleet, the endpoints or the limit changed: requests that wait look again."""
        self._grant()

    async def generate(self, request: GenerateRequest, *, group: int | None = None) -> list[Completion]:
        """request.n completions by an engine that serves. group: a number under which `abort` finds the request.

        EngineRejected at once for a 4xx: repeating it cannot help. EngineUnreachable when the deadline
        (deadlines.generate) passes, with the last failure and the state of every engine.
        """
        failure: EngineError | None = None
        attempt: Attempt | None = None
        sent_at: float | None = None
        try:
            async with asyncio.timeout(self._deadline):
                while True:
                    attempt = await self._acquire(avoid=attempt.engine if attempt else None)
                    sent_at = self._clock()
                    try:
                        completions = await self._send(attempt, request, group)
                    except EngineRejected:
                        raise
                    except EngineError as error:
                        failure = error
                    else:
                        return completions
                    finally:
                        self._release(attempt)
                    sent_at = None
                    await asyncio.sleep(RETRY_SECONDS)
        except TimeoutError as error:
            if attempt is not None and sent_at is not None:
                failure = EngineUnreachable(
                    f"{attempt.endpoint.url} had the request for {self._clock() - sent_at:.1f} s and did not answer"
                )
                self._failed(attempt, failure, sent_at)
            raise EngineUnreachable(
                f"no completion within deadlines.generate = {self._deadline:g} s; {self._describe(failure)}"
            ) from error

    async def abort(self, groups: Collection[int] | None = None, *, at: str | None = None) -> dict[str, str]:
        """Abort this run's requests (those of `groups`) at every engine (that of URL `at`), directly: a router forwards
        no abort. They return with what they have, finish_reason "abort". Returns URL -> reason for failures.

        Every engine is told all ids: which of them a router sent where is not known, and an unknown id is ignored.
        """
        ids = [name for group, names in self._ids.values() if groups is None or group in groups for name in names]
        if not ids:
            return {}
        failures: dict[str, str] = {}

        async def abort(url: str, endpoint: EngineEndpoint) -> None:
            try:
                await self._client.abort(endpoint, ids, timeout=ABORT_SECONDS)
            except EngineError as error:
                failures[url] = str(error)

        # One without a dialect never served.
        known = [
            (url, endpoint)
            for url, endpoint in self._endpoints.items()
            if endpoint.dialect is not None and at in (None, url)
        ]
        await asyncio.gather(*(abort(url, endpoint) for url, endpoint in known))
        return failures

    # -- the rest is private

    async def _acquire(self, *, avoid: str | None) -> Attempt:
        """A slot, in the order in which requests came. avoid: the engine that has just failed this one,
        taken only if it is alone."""
        ticket = next(self._tickets)
        while True:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (ticket, turn))
            self._grant()
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():  # the turn that this request will not take
                    self._granted -= 1
                    self._grant()
                raise
            self._granted -= 1
            attempt = self._pick(avoid)
            if attempt is not None:
                self._in_flight[attempt.endpoint.url] += 1
                return attempt

    def _free(self) -> int:
        """Requests that may be sent now."""
        serving = len(self._fleet.serving())
        limit = self.limit if self.limit is not None else self._per_engine * serving
        return limit - self.in_flight - self._granted if serving else 0

    def _pick(self, avoid: str | None) -> Attempt | None:
        if self._free() <= 0:
            return None
        if self._router is not None:
            return Attempt(self._router, None)
        url = min(self._fleet.serving(), key=lambda candidate: (candidate == avoid, self._in_flight[candidate]))
        return Attempt(self._endpoints[url], url)

    def _release(self, attempt: Attempt) -> None:
        self._in_flight[attempt.endpoint.url] -= 1
        self._grant()

    def _grant(self) -> None:
        free = self._free()
        while free > 0 and self._waiting:
            _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                self._granted += 1
                free -= 1

    async def _send(self, attempt: Attempt, request: GenerateRequest, group: int | None) -> list[Completion]:
        sent_at, published = self._clock(), self._judge.published if self._judge else None
        with self._named(attempt, request, group):
            try:
                # The deadline around all attempts is the caller's; elsewhere is tried next, so one attempt here is
                # enough.
                attempts = None if attempt.engine is None else 1
                completions = await self._client.generate(
                    attempt.endpoint, request, timeout=self._deadline, attempts=attempts
                )
            except EngineRejected:
                raise
            except EngineError as error:
                self._failed(attempt, error, sent_at)
                raise
        self._judge_versions(attempt, completions, published, sent_at)
        if attempt.engine is not None:
            self._fleet.request_succeeded(attempt.engine, sent_at=sent_at)
        return completions

    def _failed(self, attempt: Attempt, error: EngineError, sent_at: float) -> None:
        self.counts["failed_requests"] += 1
        if attempt.engine is not None:
            self._fleet.request_failed(attempt.engine, str(error), sent_at=sent_at)

    def _judge_versions(
        self, attempt: Attempt, completions: Sequence[Completion], published: int | None, sent_at: float
    ) -> None:
        if self._judge is None:
            return
        for version in {span.version for completion in completions for span in completion.versions}:
            reason = self._judge.refusal(version)
            if reason is not None:
                self.counts[f"refused_{reason}"] += 1
                self._report_stale(attempt, f"sampled with {version}: {reason}", sent_at)
                raise EngineError(
                    f"{attempt.endpoint.url} sampled with weights {version}, which this run cannot train on ({reason})"
                )
            if published is not None and self._judge.is_behind(version, published):
                self.counts["stale_engine"] += 1
                self._report_stale(attempt, f"sampled with {version} after the sync to step {published}", sent_at)

    def _report_stale(self, attempt: Attempt, reason: str, sent_at: float) -> None:
        if attempt.engine is not None:
            self._fleet.version_refused(attempt.engine, reason, sent_at=sent_at)

    @contextmanager
    def _named(self, attempt: Attempt, request: GenerateRequest, group: int | None) -> Iterator[None]:
        endpoint = attempt.endpoint
        self._ids[request.request_id] = (group, self._client.request_ids(endpoint, request))
        try:
            yield
        finally:
            self._ids.pop(request.request_id, None)

    def _describe(self, failure: EngineError | None) -> str:
        states = (
            "; ".join(f"{m.url} is {m.state.value} ({m.reason})" for m in self._fleet.members()) or "there is no engine"
        )
        return f"{f'last failure: {failure}; ' if failure else ''}{states}"
