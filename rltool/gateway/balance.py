"""Which engine a session's next turn goes to. Pure; the clock is a parameter.

A session stays on one engine, which has its prefix in the cache. A new one goes to the engine with the fewest turns in
progress. One that has failed gets nothing for a while, and its sessions go elsewhere.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence

REST_SECONDS = 10.0
"""How long an engine that failed is left alone: about what a health check would take to notice."""


class Balance:
    def __init__(self, engines: Sequence[str], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._engines, self._clock = tuple(engines), clock
        self._busy: Counter[str] = Counter()
        self._home: dict[str, str] = {}
        self._homes: Counter[str] = Counter()
        self._resting: dict[str, float] = {}

    def begin(self, session: str, avoid: Collection[str]) -> str:
        """The engine for a turn of this session, until `finish`. avoid: those that have just failed on it."""
        home = self._home.get(session)
        chosen = home if home is not None and self._rank(home, avoid) == (False, False) else self._best(avoid)
        if chosen != home:
            self.forget(session)
            self._home[session] = chosen
            self._homes[chosen] += 1
        self._busy[chosen] += 1
        return chosen

    def finish(self, engine: str, *, failed: bool) -> None:
        self._busy[engine] -= 1
        if failed:
            self._resting[engine] = self._clock() + REST_SECONDS
        else:
            self._resting.pop(engine, None)

    def forget(self, session: str) -> None:
        """The session has ended."""
        home = self._home.pop(session, None)
        if home is not None:
            self._homes[home] -= 1

    def _rank(self, engine: str, avoid: Collection[str]) -> tuple[bool, bool]:
        return engine in avoid, self._resting.get(engine, 0.0) > self._clock()

    def _best(self, avoid: Collection[str]) -> str:
        return min(
            self._engines,
            key=lambda engine: (*self._rank(engine, avoid), self._busy[engine], self._homes[engine]),
        )
