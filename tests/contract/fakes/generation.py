"""How a fake engine spends time: a batch of requests whose tokens come by the clock, and what pauses, aborts and
updates do to them.

Nothing runs per token: a request sleeps until it is done or something happens to the batch, and which of its tokens
came when, and so under which weights, is computed from the times. So thousands of slow requests cost a fake next to
nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

WAIT_SECONDS = 60.0


@dataclass(eq=False)
class Running:
    """One request: `samples` responses of at most `length` tokens side by side, the first token at its start, each next
    `token_seconds` later."""

    request_id: str
    prompt_length: int
    length: int
    token_seconds: float
    samples: int
    since: float | None = None
    stretches: list[tuple[float, float]] = field(default_factory=list)
    aborted: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def halt(self, now: float) -> None:
        if self.since is not None:
            self.stretches.append((self.since, now))
            self.since = None

    @property
    def started(self) -> bool:
        return self.since is not None or bool(self.stretches)

    def active(self, now: float) -> float:
        """Seconds in which it was generated."""
        return sum(end - start for start, end in self.stretches) + (now - self.since if self.since is not None else 0.0)

    def tokens(self, now: float) -> int:
        if not self.started:
            return 0
        return (
            self.length if self.token_seconds == 0 else min(self.length, 1 + int(self.active(now) / self.token_seconds))
        )

    def left(self, now: float) -> float | None:
        """Seconds until it is done; None while it is not generated."""
        return None if self.since is None else self.length * self.token_seconds - self.active(now)

    def moment(self, position: int) -> float:
        """When token `position` came. Only after `halt`."""
        seconds = position * self.token_seconds
        for start, end in self.stretches:
            if seconds <= end - start:
                return start + seconds
            seconds -= end - start
        return self.stretches[-1][1]


@dataclass(frozen=True)
class Generated:
    """What a request ended with: `states[i]` is the batch's state when token i came."""

    states: list[Any]
    aborted: bool


class Batch:
    """The requests that a fake engine holds, in order of arrival. `state` (its weights, its version) changes with
    `note`.

    slots: how many samples are generated at once, set before the first request; the others wait. None: all of them.
    kv_tokens: the size of the KV cache as the load tells it; a full one stops nobody.
    """

    def __init__(self, state: Any) -> None:
        self.slots: int | None = None
        self.kv_tokens = 1_000_000
        self.paused = False
        self._requests: dict[Running, None] = {}
        self._idle: dict[Running, None] = {}
        """Those of them that wait or are frozen."""
        self._busy = 0
        """Samples of the others."""
        self._history: list[tuple[float, Any]] = [(0.0, state)]

    @property
    def state(self) -> Any:
        return self._history[-1][1]

    def note(self, state: Any) -> None:
        """Tokens from now on come under `state`."""
        self._history.append((time.monotonic(), state))

    @property
    def running(self) -> int:
        """Samples that have tokens and want more: frozen ones count."""
        return sum(request.samples for request in list(self._requests) if request.started)

    @property
    def waiting(self) -> int:
        return sum(request.samples for request in list(self._requests) if not request.started)

    @property
    def kv_cache_usage(self) -> float:
        """The share of `kv_tokens` that the prompts and responses in generation take."""
        now = time.monotonic()
        started = [request for request in list(self._requests) if request.started]
        held = sum(request.prompt_length + request.samples * request.tokens(now) for request in started)
        return min(1.0, held / self.kv_tokens)

    async def generate(
        self, request_id: str, *, length: int, token_seconds: float, samples: int = 1, prompt_length: int = 0
    ) -> Generated:
        """Returns once the request is done or aborted; a cancellation (its client has gone) takes it out."""
        request = Running(request_id, prompt_length, length, token_seconds, samples)
        self._requests[request] = self._idle[request] = None
        try:
            self._begin_waiting()
            while not request.aborted:
                left = request.left(time.monotonic())
                if left is not None and left <= 0:
                    break
                request.changed.clear()
                try:
                    async with asyncio.timeout(left):
                        await request.changed.wait()
                except TimeoutError:
                    pass
        finally:
            now = time.monotonic()
            count = request.tokens(now)
            if request.since is not None:
                self._busy -= request.samples
            request.halt(now)
            del self._requests[request]
            self._idle.pop(request, None)
            self._begin_waiting()
        return Generated(self._states(request, count), request.aborted)

    def hurry(self) -> None:
        """What is being generated takes no more time."""
        for request in list(self._requests):
            request.token_seconds = 0.0
            request.changed.set()

    def tokens(self, request_id: str) -> int:
        """What this request has so far; 0 also of one that has ended."""
        now = time.monotonic()
        return next((r.tokens(now) for r in self._requests if r.request_id == request_id), 0)

    def so_far(self, request_id: str) -> list[Any]:
        """The batch's state at each token that this request has; [] also of one that has ended."""
        now = time.monotonic()
        for request in self._requests:
            if request.request_id == request_id and request.started:
                seen = replace(request, stretches=list(request.stretches))
                seen.halt(now)
                return self._states(seen, request.tokens(now))
        return []

    def holds(self, request_id: str) -> bool:
        return any(request.request_id == request_id for request in self._requests)

    def abort(self, request_ids: Collection[str]) -> None:
        """Those with exactly these ids; they end at the next turn of the event loop."""
        self._end([request for request in self._requests if request.request_id in request_ids])

    def abort_prefix(self, prefix: str) -> list[Running]:
        """Those whose ids begin so."""
        return self._end([request for request in self._requests if request.request_id.startswith(prefix)])

    async def abort_all(self) -> None:
        """Ends every request; returns once they have answered."""
        ended = self.abort_prefix("")
        while any(request in self._requests for request in ended):
            await asyncio.sleep(0.001)

    def freeze(self) -> None:
        """Nothing is generated and nothing new starts until `resume`."""
        self.paused = True
        for request in self._requests:
            request.halt(time.monotonic())
            request.changed.set()
        self._idle, self._busy = dict.fromkeys(self._requests), 0

    async def drain(self) -> None:
        """Starts nothing new; returns once nothing is being generated."""
        self.paused = True
        while self._busy:
            await asyncio.sleep(0.001)

    def resume(self) -> None:
        self.paused = False
        self._begin_waiting()

    def wait_running(self, samples: int) -> None:
        """From another thread: until so many samples are being generated."""
        deadline = time.monotonic() + WAIT_SECONDS
        while self.running < samples:
            if time.monotonic() > deadline:
                raise AssertionError(f"{self.running} samples are being generated, waited for {samples}")
            time.sleep(0.001)

    def _end(self, requests: list[Running]) -> list[Running]:
        for request in requests:
            request.aborted = True
            request.changed.set()
        return requests

    def _begin_waiting(self) -> None:
        while self._idle and not self.paused:
            request = next(iter(self._idle))
            if self.slots is not None and self._busy and self._busy + request.samples > self.slots:
                return
            del self._idle[request]
            self._busy += request.samples
            request.since = time.monotonic()
            request.changed.set()

    def _states(self, request: Running, count: int) -> list[Any]:
        if not count:
            return []
        if request.stretches[0][0] >= self._history[-1][0]:  # nothing has changed since it began
            return [self.state] * count
        moments = [request.moment(position) for position in range(count)]
        return [next(state for since, state in reversed(self._history) if since <= moment) for moment in moments]


def version_spans(versions: list[str]) -> list[dict[str, Any]]:
    """Both engines' weight_versions: one span for each run of equal versions."""
    spans: list[dict[str, Any]] = []
    for position, version in enumerate(versions):
        if not spans or spans[-1]["version"] != version:
            spans.append({"version": version, "start": position, "end": position})
        spans[-1]["end"] = position + 1
    return spans
