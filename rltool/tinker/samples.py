"""Sampling requests of clients: begun when they are accepted, their results kept until they are old.

They are in no journal: a sample is no part of any state. After a restart of the server a client is told that its
request is gone (410), which the released client answers by asking again.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import secrets
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rltool.errors import EngineRejected, RltoolError, UsageError
from rltool.processes.tasks import Background
from rltool.rollout.serving.fair_queue import FairQueue
from rltool.tinker.sampling import SampleRequest, parse_sample
from rltool.tinker.service import Refused
from rltool.tinker.wire import SampleOutput, encode_samples

SAMPLE = "sample-"
"""Begins the ids of sampling requests."""
KEPT_RESULTS = 16384
"""Of all clients: a result that was asked for may be asked for again, where its answer was lost."""


class Sampling(Protocol):
    max_model_len: int
    at_once: int
    """Requests that it can work on side by side."""

    async def sample(self, asked: SampleRequest, weights: Path | None) -> SampleOutput: ...


@dataclass(frozen=True)
class _Asked:
    client: str
    key: tuple[str, str, int]
    digest: str
    task: asyncio.Task[dict[str, Any]]


class Turns:
    """Slots, for which clients take turns, one request each. Owned by one event loop."""

    def __init__(self, slots: int) -> None:
        self._free = slots
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue()

    @asynccontextmanager
    async def slot(self, client: str) -> AsyncIterator[None]:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.push(self._queue.ticket(client), turn)
        self._grant()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():  # else it never had one
                self._free += 1
                self._grant()

    def _grant(self) -> None:
        while self._free and len(self._queue):
            turn = self._queue.pop()
            if not turn.done():  # cancelled
                self._free -= 1
                turn.set_result(None)


class Samples:
    """Owned by one event loop. most: in flight, of each client; ended: called with client and sampled tokens of each
    request that engines have answered. `close` last."""

    def __init__(
        self, sampling: Sampling, *, vocab_size: int, most: int, ended: Callable[[str, int], None] = lambda *_: None
    ) -> None:
        self._on_ended = ended
        self._sampling, self._vocab_size, self._most = sampling, vocab_size, most
        self._turns = Turns(sampling.at_once)
        self._boot, self._count = secrets.token_hex(6), 0
        self._tasks = Background()
        self._asked: OrderedDict[str, _Asked] = OrderedDict()
        self._by_key: dict[tuple[str, str, int], str] = {}
        self.in_flight: Counter[str] = Counter()
        """By client."""
        self.ended, self.tokens = 0, 0
        """Requests that engines have answered, and the tokens that they sampled."""

    def begin(self, client: str, body: Mapping[str, Any], weights: Path | None) -> str:
        """The id of the request, in flight from now on. A repetition gives the id of the first. UsageError, Refused."""
        session, seq = body.get("sampling_session_id"), body.get("seq_id")
        if isinstance(seq, bool) or not isinstance(seq, int):
            raise UsageError(f"seq_id is {seq!r}, expected an integer: it makes a repetition known")
        key = (client, str(session), seq)
        digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        if key in self._by_key:
            number = self._by_key[key]
            if self._asked[number].digest != digest:
                raise UsageError(f"seq_id {seq} was a request of other content: it is used once")
            return number
        if self.in_flight[client] >= self._most:
            raise Refused(429, f"{self._most} sampling requests are in flight, the most that a client may have")
        asked = parse_sample(body, vocab_size=self._vocab_size, max_model_len=self._sampling.max_model_len)
        self._count += 1
        number = f"{SAMPLE}{self._boot}-{self._count}"
        self.in_flight[client] += 1
        task = self._tasks.start(self._sample(client, asked, weights), number, awaited=True)
        task.add_done_callback(lambda _: self.in_flight.subtract([client]))
        self._asked[number], self._by_key[key] = _Asked(client, key, digest, task), number
        self._forget()
        return number

    async def result(self, client: str, number: str, seconds: float) -> dict[str, Any] | None:
        """None: there is none after so long. Refused: 404 of another client's as of none, 410 of one that is gone."""
        asked = self._asked.get(number)
        if asked is None and not number.startswith(f"{SAMPLE}{self._boot}-"):
            raise Refused(410, f"request {number} is gone: the server was started again; ask once more")
        if asked is None or asked.client != client:
            raise Refused(404, f"there is no request {number!r}")
        await asyncio.wait((asked.task,), timeout=seconds)
        if not asked.task.done():
            return None
        if asked.task.cancelled():
            return {"error": "the request was cancelled", "category": "user"}
        return asked.task.result()

    def cancel(self, client: str, number: str) -> None:
        asked = self._asked.get(number)
        if asked is not None and asked.client == client:
            asked.task.cancel()

    async def close(self) -> None:
        await self._tasks.close()

    async def _sample(self, client: str, asked: SampleRequest, weights: Path | None) -> dict[str, Any]:
        try:
            async with self._turns.slot(client):
                output = await self._sampling.sample(asked, weights)
        except (UsageError, EngineRejected) as error:
            return {"error": str(error), "category": "user"}
        except RltoolError as error:
            return {"error": str(error), "category": "server"}
        tokens = sum(len(sequence.tokens) for sequence in output.sequences)
        self.ended += 1
        self.tokens += tokens
        self._on_ended(client, tokens)
        return {"proto": base64.b64encode(encode_samples(output)).decode()}

    def _forget(self) -> None:
        """The oldest that have ended."""
        while len(self._asked) > KEPT_RESULTS:
            number = next((number for number, asked in self._asked.items() if asked.task.done()), None)
            if number is None:
                return
            del self._by_key[self._asked.pop(number).key]
