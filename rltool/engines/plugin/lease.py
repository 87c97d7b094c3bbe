"""Which run may control this engine: one at a time, for as long as it renews its lease. No I/O, no vllm.

Generation is open to all clients: an evaluation may sample from an engine in training. Routes that change the engine
for all (pause, resume, weights, prefix cache) are the holder's alone while there is one. Ending requests by their ids
is not among them: the ids are random, so who knows one has sent it.

A lease expires by itself, because a run that is killed gives nothing back. A run that lost it to another remembers
nothing of that by itself, so the table does: its renewals and control calls are refused, also after the other has
gone, until it takes the lease anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from rltool.engines.types import Holder, Lease

LEASE_PATH = "/rltool/lease"
RUN_HEADER = "X-Rltool-Run"
"""Names the run that sends a request, by its id."""

Action = Literal["acquire", "steal", "renew", "release"]

LONGEST_SECONDS = 86400.0
REMEMBERED = 64
"""Runs that lost the lease, of which the last ones are remembered."""


@dataclass(frozen=True)
class Answer:
    """lease: the one that stands now, or None. Not granted: `taken_by` is who holds the lease, or took it."""

    granted: bool
    lease: Lease | None
    taken_by: Holder | None = None


class LeaseTable:
    """The lease of one engine. Owned by one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._holder: Holder | None = None
        self._until = 0.0
        self._lost: dict[str, Holder] = {}
        """Run -> who took the lease from it."""

    def lease(self) -> Lease | None:
        left = self._until - self._clock()
        return Lease(self._holder, left) if self._holder is not None and left > 0 else None

    def acquire(self, holder: Holder, seconds: float, *, steal: bool = False, only_from: str | None = None) -> Answer:
        """For a run that starts. The lease of the same run, which an earlier attempt of it left, is its own.

        only_from: steal from this run, and from no other that may have the lease by now.
        """
        lease = self.lease()
        if lease is not None and lease.holder.run != holder.run:
            if not steal or only_from not in (None, lease.holder.run):
                return Answer(False, lease, lease.holder)
            self._lost[lease.holder.run] = holder
            while len(self._lost) > REMEMBERED:
                del self._lost[next(iter(self._lost))]
        self._lost.pop(holder.run, None)
        return self._grant(holder, seconds)

    def renew(self, holder: Holder, seconds: float) -> Answer:
        """For a run that had the lease: one that merely expired, or went with the server's process, is granted
        again."""
        lease = self.lease()
        thief = self._lost.get(holder.run)
        if thief is not None:
            return Answer(False, lease, thief)
        if lease is not None and lease.holder != holder:
            return Answer(False, lease, lease.holder)
        return self._grant(holder, seconds)

    def release(self, holder: Holder) -> Answer:
        """Give it back; a lease that another process holds by now stays."""
        if self._holder == holder:
            self._holder = None
        return Answer(True, self.lease())

    def refusal(self, run: str | None) -> str | None:
        """Why a control call of `run` (None: not named) is refused, or None."""
        lease = self.lease()
        thief = self._lost.get(run or "")
        if thief is not None:
            return f"this engine was taken over by {thief}"
        if lease is None or lease.holder.run == run:
            return None
        return (
            f"this engine is leased by {lease.holder}, for another {lease.expires_in:.0f} s unless it renews the "
            "lease; other runs may generate, but not control it"
        )

    def _grant(self, holder: Holder, seconds: float) -> Answer:
        self._holder, self._until = holder, self._clock() + seconds
        return Answer(True, Lease(holder, seconds))


def answer(table: LeaseTable, body: Any) -> tuple[int, dict[str, Any]]:
    """(status, JSON) of POST LEASE_PATH {"action", "holder": {...}, "seconds", "only_from": run or null}.

    200 {"granted", "lease", "taken_by"} also where it is not granted: that is an answer, not a failure.
    """
    try:
        action, holder, seconds = _parse(body)
    except (TypeError, ValueError) as error:
        return 400, {"error": f"POST {LEASE_PATH}: {error}"}
    match action:
        case "renew":
            found = table.renew(holder, seconds)
        case "release":
            found = table.release(holder)
        case _:
            found = table.acquire(holder, seconds, steal=action == "steal", only_from=body.get("only_from"))
    return 200, asdict(found)


def refused(table: LeaseTable, run: str | None) -> dict[str, Any] | None:
    """The JSON of the 409 that a control call of `run` gets, or None where it may pass."""
    reason = table.refusal(run)
    if reason is None:
        return None
    lease = table.lease()
    return {"error": reason, "lease": asdict(lease) if lease else None}


def _parse(body: Any) -> tuple[Action, Holder, float]:
    if not isinstance(body, Mapping) or body.get("action") not in get_args(Action):
        raise ValueError(f"'action' must be one of {', '.join(get_args(Action))}")
    given = body.get("holder")
    if not isinstance(given, Mapping):
        raise ValueError("'holder' must be an object with run, name, host and pid")
    holder = Holder(**given)
    if not all(isinstance(text, str) and 0 < len(text) <= 300 for text in (holder.run, holder.name, holder.host)):
        raise ValueError("run, name and host of 'holder' must be non-empty texts")
    if type(holder.pid) is not int or not isinstance(holder.machine, str) or len(holder.machine) > 300:
        raise ValueError("pid of 'holder' must be a whole number, its machine a text")
    seconds = body.get("seconds", 0.0)
    if type(seconds) not in (int, float) or not 0 <= seconds <= LONGEST_SECONDS:
        raise ValueError(f"'seconds' must be a number up to {LONGEST_SECONDS:g}")
    return body["action"], holder, float(seconds)
