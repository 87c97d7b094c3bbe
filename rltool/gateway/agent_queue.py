"""Episodes for agents on other hosts: who waits for a worker, who has one, what came of it. Pure but for the clock.

The trainer puts an episode in and asks for its outcome; a worker takes one, sends heartbeats, and reports. An
episode is given out once: where its worker falls silent it has failed, and the trainer tries again in a new session.
Episodes whose trainer stopped asking are dropped: those of a dead trainer are not run.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rltool.gateway.errors import NotFound

SILENCE_SECONDS = 30.0
"""After which a silent worker or trainer counts as gone. Both send something every few seconds."""


@dataclass
class QueuedEpisode:
    """task: as agents get it. asked: when the trainer last asked for it; heard: when its worker was last heard of,
    None: it waits for one. outcome: {"reward": ...} or {"failed": reason}."""

    id: str
    task: Mapping[str, Any]
    asked: float
    heard: float | None = None
    worker: str = ""
    outcome: Mapping[str, Any] | None = None


class AgentQueue:
    """clock: seconds, of any beginning."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._episodes: dict[str, QueuedEpisode] = {}
        self.counts: Counter[str] = Counter()
        """Events since the start: queued, taken, finished, silent (their workers), dropped."""

    @property
    def waiting(self) -> int:
        return sum(episode.heard is None for episode in self._episodes.values())

    # -- the trainer's side

    def put(self, episode_id: str, task: Mapping[str, Any]) -> None:
        """Putting one in twice changes nothing."""
        if episode_id not in self._episodes:
            self._episodes[episode_id] = QueuedEpisode(episode_id, task, self._clock())
            self.counts["queued"] += 1

    def outcome(self, episode_id: str) -> Mapping[str, Any] | None:
        """None while there is none. NotFound for an episode that is not here (any more)."""
        episode = self._find(episode_id)
        now = episode.asked = self._clock()
        if episode.outcome is None and episode.heard is not None and now - episode.heard > SILENCE_SECONDS:
            episode.outcome = {"failed": f"its worker {episode.worker} has fallen silent"}
            self.counts["silent"] += 1
        return episode.outcome

    def withdraw(self, episode_id: str) -> None:
        """The trainer has its outcome, or wants none. NotFound as in `outcome`."""
        del self._episodes[self._find(episode_id).id]

    # -- a worker's side

    def take(self, worker: str) -> QueuedEpisode | None:
        """The one that has waited longest, None where none waits."""
        self.drop_forgotten()
        for episode in self._episodes.values():
            if episode.heard is None:
                episode.heard, episode.worker = self._clock(), worker
                self.counts["taken"] += 1
                return episode
        return None

    def alive(self, episode_id: str) -> None:
        """NotFound where the worker is to end it: it is not wanted any more."""
        episode = self._find(episode_id)
        if episode.outcome is not None:
            raise NotFound(f"episode {episode_id[:64]!r} has an outcome already")
        episode.heard = self._clock()

    def finish(self, episode_id: str, outcome: Mapping[str, Any]) -> None:
        """NotFound as in `alive`: it comes too late."""
        self.alive(episode_id)
        self._episodes[episode_id].outcome = outcome
        self.counts["finished"] += 1

    def _find(self, episode_id: str) -> QueuedEpisode:
        episode = self._episodes.get(episode_id)
        if episode is None:
            raise NotFound(f"there is no episode {episode_id[:64]!r} here: it was withdrawn, or the gateway restarted")
        return episode

    def drop_forgotten(self) -> None:
        """Those that no trainer has asked for of late. To be called now and then, where there are no workers too."""
        oldest = self._clock() - SILENCE_SECONDS
        forgotten = [episode.id for episode in self._episodes.values() if episode.asked < oldest]
        for episode_id in forgotten:
            del self._episodes[episode_id]
        self.counts["dropped"] += len(forgotten)
