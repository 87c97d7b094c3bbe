"""Which engine has the least to do, without looking at all of them for every request. Pure."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable

Entry = tuple[int, int, int, str]


class Loads:
    """requests, sessions: of each engine, by URL; total: of all requests.

    Candidates are in two heaps, by their requests and by these and their sessions. An entry that is no longer true is
    dropped when it comes to the top, so that a request costs the logarithm of their number: with a look at each,
    hundreds of engines with their own number of requests cost its square.
    """

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.sessions: Counter[str] = Counter()
        self.total = 0
        self._order: dict[str, int] = {}
        self._heaps: dict[bool, list[Entry]] = {False: [], True: []}

    def add(self, url: str, *, requests: int = 0, sessions: int = 0) -> None:
        """So many more; fewer where they are negative."""
        self.requests[url] += requests
        self.sessions[url] += sessions
        self.total += requests
        if url in self._order:
            for by_sessions, heap in self._heaps.items():
                heapq.heappush(heap, self._entry(url, by_sessions=by_sessions))
                if len(heap) > 8 * len(self._order) + 64:
                    self._rebuild(by_sessions)

    def choose_among(self, urls: Iterable[str]) -> None:
        """The candidates from now on."""
        self._order = {url: place for place, url in enumerate(urls)}
        for by_sessions in self._heaps:
            self._rebuild(by_sessions)

    def least(self, *, by_sessions: bool, avoid: str | None = None) -> str:
        """The candidate with the fewest requests, by_sessions: of these with the fewest sessions, of these the first.
        avoid: taken only if it is alone. IndexError without a candidate."""
        heap, aside = self._heaps[by_sessions], None
        while True:
            top = heap[0]
            if top != self._entry(top[3], by_sessions=by_sessions):
                heapq.heappop(heap)
            elif top[3] == avoid and len(self._order) > 1:
                aside = heapq.heappop(heap)
            else:
                break
        if aside is not None:
            heapq.heappush(heap, aside)
        return top[3]

    def _entry(self, url: str, *, by_sessions: bool) -> Entry:
        return self.requests[url], self.sessions[url] if by_sessions else 0, self._order[url], url

    def _rebuild(self, by_sessions: bool) -> None:
        self._heaps[by_sessions] = [self._entry(url, by_sessions=by_sessions) for url in self._order]
        heapq.heapify(self._heaps[by_sessions])
