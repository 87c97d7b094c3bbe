"""The engines of one model as everything that works with them shares them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rltool.engines.client import EngineClient
from rltool.engines.fleet.fleet import Fleet


@dataclass(frozen=True)
class EngineSet:
    """Owned by one event loop. fleet: each engine's endpoint, info and state; engines join and leave it at any await.
    log: one line for the user."""

    fleet: Fleet
    client: EngineClient
    log: Callable[[str], None] = print

    @property
    def clock(self) -> Callable[[], float]:
        """The fleet's, which `sent_at` of every fact is measured by."""
        return self.fleet.clock
