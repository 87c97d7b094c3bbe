"""Whose turn is next, where requests of several kinds wait for slots. Pure."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, order=True)
class Ticket:
    """turn: the lowest is next; number: of equal turns the earlier."""

    turn: int
    number: int


class FairQueue(Generic[T]):
    """First come, first served among requests of one kind; kinds that both wait take turns, one request each.

    This is start-time fair queueing (Goyal et al. 1996) with equal weights: a kind that was idle begins at the present
    turn, so ten thousand requests that wait already hold up another kind's first one by a single request.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Ticket, T]] = []
        self._numbers = itertools.count()
        self._last: dict[str, int] = defaultdict(int)  # turn of the newest ticket of each kind
        self._now = 0  # turn of the newest ticket that was served

    def __len__(self) -> int:
        return len(self._heap)

    def ticket(self, kind: str) -> Ticket:
        """The place of a new request, which keeps it however often it has to wait again."""
        self._last[kind] = max(self._last[kind], self._now) + 1
        return Ticket(self._last[kind], next(self._numbers))

    def push(self, ticket: Ticket, item: T) -> None:
        heapq.heappush(self._heap, (ticket, item))  # no two have one ticket

    def pop(self) -> T:
        ticket, item = heapq.heappop(self._heap)
        self._now = max(self._now, ticket.turn)
        return item
