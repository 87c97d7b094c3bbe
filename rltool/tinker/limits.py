"""What a client may have, in numbers and bytes, and the forms of what it sends: limits, counts and refusals."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rltool.errors import UsageError
from rltool.training.served import AdapterSpec

NO_SEQ = 2**63
TTL_SECONDS = (3600, 315_360_000)
"""What a checkpoint's time to live may be: an hour to ten years, as the client says."""


class Refused(Exception):
    """A call that is not accepted. status: of HTTP."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Limits:
    """Of each client. in_flight: calls without a result; samples: sampling requests in flight; queued_bytes: of both,
    and as many of the results that are kept; models; checkpoints: kept; body_bytes: of a request; rank: of an adapter,
    0: all weights are trained, None: either, of any rank. session_timeout: seconds without a request or heartbeat after
    which a session is idle: its models are evicted where others need their place."""

    in_flight: int = 256
    samples: int = 4096
    queued_bytes: int = 2**30
    models: int = 16
    checkpoints: int = 100
    body_bytes: int = 64 * 2**20
    rank: int | None = None
    session_timeout: float = 600.0


class Queued:
    """Bytes of the calls and sampling requests that have not ended, by client; `most` of one. Owned by one event
    loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.calls: Counter[str] = Counter()
        self.samples: Counter[str] = Counter()

    def demand(self, client: str, size: int) -> None:
        """Refused: 413 of what alone is too much, 429 of what will have room when others have ended."""
        calls, samples, limit = self.calls[client], self.samples[client], f"{self._most} bytes (--max-queued-bytes)"
        if size > self._most:
            raise Refused(413, f"the request has {size} bytes, and a client may have {limit} in all; send less at once")
        if calls + samples + size > self._most:
            raise Refused(
                429, f"the request has {size} bytes, {calls} bytes of calls and {samples} of samples have not ended, "
                f"and a client may have {limit} in all; wait for results"
            )  # fmt: skip

    def by_client(self) -> dict[str, int]:
        return dict(+(self.calls + self.samples))


class KeptResults:
    """Bytes of the results of calls that are kept, by client; `most` of one. Owned by one event loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: dict[str, tuple[OrderedDict[int, int], OrderedDict[int, int]]] = {}
        """Client -> sizes by number of the call, the oldest first: fetched, and not fetched yet."""
        self.bytes: Counter[str] = Counter()

    def add(self, client: str, number: int, size: int) -> list[int]:
        """Calls whose results are too many now: those that were fetched first, then the oldest. The newest stays."""
        fetched, fresh = self._held.setdefault(client, (OrderedDict(), OrderedDict()))
        fresh[number] = size
        self.bytes[client] += size
        out: list[int] = []
        while self.bytes[client] > self._most and len(fetched) + len(fresh) > 1:
            gone, freed = (fetched or fresh).popitem(last=False)
            self.bytes[client] -= freed
            out.append(gone)
        return out

    def fetch(self, client: str, number: int) -> None:
        fetched, fresh = self._held.get(client, ({}, {}))
        if number in fresh:
            fetched[number] = fresh.pop(number)

    def forget(self, but: Container[int]) -> None:
        for client, held in self._held.items():
            for sizes in held:
                for number in [each for each in sizes if each not in but]:
                    self.bytes[client] -= sizes.pop(number)

    def let_go(self, kind: str, size: int) -> dict[str, Any]:
        """In place of a result."""
        said = (
            f"ResultGone: the {kind} was carried out, and its result of {size} bytes was let go: newer results of this "
            f"client came before it was fetched, and {self._most} bytes of them are kept (--max-queued-bytes); fetch "
            "results as they come, or send less at once"
        )
        return {"error": said, "category": "server"}


def no_room(directory: Path, why: str | None) -> Refused:
    return Refused(503, f"the call was not accepted, for {directory} cannot be written: {why}; ask again")


def demand_rank(adapter: AdapterSpec | None, most: int | None) -> None:
    """most: as Limits.rank. UsageError."""
    if most is not None and (rank := adapter.rank if adapter else 0) > most:
        does = f"takes adapters up to rank {most}" if most else "trains all weights: ask for rank 0"
        raise UsageError(f"lora_config.rank is {rank}; this server {does}")
    if most and adapter is None:
        raise UsageError(
            f"lora_config.rank is 0; this server takes adapters up to rank {most}, and one that is started with "
            "--lora-rank 0 trains all weights"
        )


def follow(body: dict[str, Any], known: set[str]) -> None:
    """UsageError for a setting that would have no effect. Empty ones, and what people attach to a call, are none."""
    attached = {"type", "user_metadata"}
    odd = {key for key, value in body.items() if value not in (None, False, "", {}) and key not in known | attached}
    if body.get("optimizer_config") in (None, {"type": "adamw"}):
        odd.discard("optimizer_config")
    if odd:
        raise UsageError(f"{', '.join(sorted(odd))} is not supported by this server")


def ttl(seconds: object) -> int:
    low, high = TTL_SECONDS
    if isinstance(seconds, bool) or not isinstance(seconds, int) or not low <= seconds <= high:
        raise UsageError(f"ttl_seconds is {seconds!r}, expected an integer from {low} to {high}")
    return seconds


def size_of(body: Mapping[str, Any]) -> int:
    """Of a call, in bytes as they were sent, or nearly."""
    if (proto := body.get("proto")) is not None:
        return len(proto) * 3 // 4 - proto[-2:].count("=")
    return len(json.dumps(body, separators=(",", ":")))


def integer(value: object, what: str, why: str = "") -> int:
    """Bounded: names of files are made of it."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < NO_SEQ:
        raise UsageError(f"{what} is {str(value)[:40]}, expected an integer from 0 to 2**63 - 1{why}")
    return value
