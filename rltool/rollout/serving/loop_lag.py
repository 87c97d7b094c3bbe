"""How late the event loop runs: work that blocks it delays every answer,
and must not be taken for an engine's silence."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

INTERVAL = 0.1
KEPT = 600
"""One minute of measurements."""


class LoopLag:
    """Sleeps INTERVAL seconds again and again and keeps by how much it overslept."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: deque[tuple[float, float]] = deque(maxlen=KEPT)

    def worst_since(self, moment: float) -> float:
        """Seconds of the longest delay since `moment`, 0 where none was seen."""
        return max((lag for at, lag in self._seen if at >= moment), default=0.0)

    async def watch(self) -> None:
        """Until it is cancelled."""
        while True:
            due = self._clock() + INTERVAL
            await asyncio.sleep(INTERVAL)
            self._seen.append((self._clock(), max(0.0, self._clock() - due)))
