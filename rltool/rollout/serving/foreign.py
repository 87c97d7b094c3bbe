"""Another trainer's weights on an engine that this run has synced.

Only engines without rltool's plugin can come to this: the others are leased to one run (rollout/serving/lease.py). A
foreign version that an engine brings along proves nothing, it may be left over from a run that has ended; one that
replaces ours means that another trainer syncs this engine now. Once may be a mistake, so the
engine is synced again. The second time it is left to the other: two trainers that sync one engine in turns would both
wait for ever.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rltool.engines.weight_version import BadWeightVersion, WeightVersion

TIMES_TO_GIVE_UP = 2


@dataclass(frozen=True)
class Overwritten:
    """News: `url` has `version` in place of ours, for the `times`-th time in this run."""

    url: str
    version: WeightVersion
    times: int

    @property
    def given_up(self) -> bool:
        return self.times >= TIMES_TO_GIVE_UP

    def __str__(self) -> str:
        what = (
            f"another trainer uses the engine {self.url}: our weights there were replaced by those of run "
            f"{self.version.run} (version {self.version})"
        )
        if self.given_up:
            return f"{what}, for the second time; this run leaves the engine to it"
        return f"{what}; they are sent again once, after that this run leaves the engine to it"


class ForeignWeights:
    """Pure. run: ours. Engines are named by URL; times are the clock's."""

    def __init__(self, run: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._clock = run, clock
        self._synced_at: dict[str, float] = {}
        """Engines that hold our weights, as far as we know."""
        self._times: Counter[str] = Counter()

    def synced(self, urls: Iterable[str]) -> None:
        """They have just taken our weights."""
        now = self._clock()
        self._synced_at |= dict.fromkeys(urls, now)

    def observed_version(self, url: str, version: str | None, *, sent_at: float) -> Overwritten | None:
        """A probe or a completion, sent at `sent_at`, showed this version. News at most once for every sync.

        What was sent before our last sync there may still have what that sync has replaced.
        """
        synced_at = self._synced_at.get(url)
        if version is None or synced_at is None or sent_at < synced_at:
            return None
        try:
            found = WeightVersion.parse(version)
        except BadWeightVersion:  # a server that was restarted: no run's weights
            return None
        if found.run == self._run:
            return None
        del self._synced_at[url]
        self._times[url] += 1
        return Overwritten(url, found, self._times[url])
