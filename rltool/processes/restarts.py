"""How often, and after which pauses, a process that has died is started again."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

LONGEST_PAUSE = 60.0
"""Seconds before a restart, at most."""


@dataclass(frozen=True)
class RestartPolicy:
    """most: restarts of one process; it has all of them again once it has lived for `forget` seconds since the last.
    backoff: seconds before the first, doubled with each that follows, LONGEST_PAUSE at most."""

    most: int
    backoff: float = 1.0
    forget: float = 600.0


class RestartBudget:
    """How long to wait before a process is started again, and when not to any more; by its name. Pure but for its
    clock."""

    def __init__(self, policy: RestartPolicy, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._policy, self._clock = policy, clock
        self._used: dict[str, int] = {}
        self._started_at: dict[str, float] = {}

    def died(self, name: str) -> float | None:
        """Seconds to wait, counting one restart; None: it has none left."""
        if self._clock() - self._started_at.get(name, self._clock()) >= self._policy.forget:
            self._used[name] = 0
        used = self._used.get(name, 0)
        if used >= self._policy.most:
            return None
        self._used[name] = used + 1
        self._started_at.pop(name, None)  # it does not live again before `started`
        return min(LONGEST_PAUSE, self._policy.backoff * 2**used)

    def started(self, name: str) -> None:
        """It lives from now on."""
        self._started_at[name] = self._clock()

    def used(self, name: str) -> int:
        return self._used.get(name, 0)
