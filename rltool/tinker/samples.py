"""Sampling requests of clients: begun when they are accepted, their results kept until they are old.

They are in no journal: a sample is no part of any state. After a restart of the server, and where the result is kept no
more, a poll gets 410, after which the released client sends the request again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rltool.errors import EngineRejected, RltoolError, UsageError
from rltool.processes.tasks import Background
from rltool.rollout.serving.fair_queue import FairQueue
from rltool.tinker.limits import Limits, Queued, Refused
from rltool.tinker.sampling import SampleRequest, parse_sample
from rltool.tinker.wire import SampleOutput, encode_samples

SAMPLE = "sample-"
"""Begins the ids of sampling requests."""
KEPT_RESULTS, KEPT_BYTES = 16384, 256 * 2**20
"""Of all clients: a result that was fetched may be asked for again, where its answer was lost."""

logger = logging.getLogger(__name__)


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
    """Owned by one event loop. most: in flight, of each client; queued: where their bytes are counted beside those of
    calls; ended: called with client and sampled tokens of each request that engines have answered. `close` last."""

    def __init__(
        self, sampling: Sampling, *, vocab_size: int, most: int, queued: Queued | None = None,
        ended: Callable[[str, int], None] = lambda *_: None,
    ) -> None:  # fmt: skip
        self._on_ended, self._queued = ended, queued or Queued(Limits.queued_bytes)
        self._sampling, self._vocab_size, self._most = sampling, vocab_size, most
        self._turns = Turns(sampling.at_once)
        self._boot, self._count = secrets.token_hex(6), 0
        self._tasks = Background()
        self._asked: dict[str, _Asked] = {}
        self._done: tuple[OrderedDict[str, int], OrderedDict[str, int]] = OrderedDict(), OrderedDict()
        """Those that have ended, with the bytes of their results, the oldest first: fetched, and not fetched yet."""
        self._by_key: dict[tuple[str, str, int], str] = {}
        self._bytes = 0
        self.in_flight: Counter[str] = Counter()
        """By client."""
        self.ended, self.tokens = 0, 0
        """Requests that engines have answered, and the tokens that they sampled."""

    def begin(self, client: str, body: Mapping[str, Any], weights: Callable[[], Path | None]) -> str:
        """The id of the request, in flight from now on. A repetition gives the id of the first, whatever has become of
        the weights. UsageError, Refused, errors of weights()."""
        session, seq = body.get("sampling_session_id"), body.get("seq_id")
        if isinstance(seq, bool) or not isinstance(seq, int):
            raise UsageError(f"seq_id is {seq!r}, expected an integer: it makes a repetition known")
        key = (client, str(session), seq)
        text = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
        digest = hashlib.sha256(text).hexdigest()
        if key in self._by_key:
            number = self._by_key[key]
            if self._asked[number].digest != digest:
                raise UsageError(f"seq_id {seq} was a request of other content: it is used once")
            return number
        if self.in_flight[client] >= self._most:
            raise Refused(429, f"{self._most} sampling requests are in flight, the most that a client may have")
        self._queued.demand(client, len(text))
        asked = parse_sample(body, vocab_size=self._vocab_size, max_model_len=self._sampling.max_model_len)
        directory = weights()
        self._count += 1
        number = f"{SAMPLE}{self._boot}-{self._count}"
        self.in_flight[client] += 1
        self._queued.samples[client] += len(text)
        task = self._tasks.start(self._sample(client, asked, directory), number, awaited=True)
        self._asked[number], self._by_key[key] = _Asked(client, key, digest, task), number
        task.add_done_callback(partial(self._end, client, number, len(text)))
        return number

    async def result(self, client: str, number: str, seconds: float) -> dict[str, Any] | None:
        """None: there is none after so long. Refused: 404 of another client's as of none, 410 of one that is gone."""
        asked = self._asked.get(number)
        boot, _, count = number.removeprefix(SAMPLE).partition("-")
        if asked is None and boot != self._boot:
            raise Refused(410, f"request {number} is gone: the server was started again; ask once more")
        if asked is None and count.isdecimal() and len(count) < 19 and int(count) <= self._count:
            raise Refused(410, f"request {number} is gone: its result is kept no more; ask once more")
        if asked is None or asked.client != client:
            raise Refused(404, f"there is no request {number!r}")
        await asyncio.wait((asked.task,), timeout=seconds)
        if not asked.task.done():
            return None
        fetched, fresh = self._done
        if number in fresh:
            fetched[number] = fresh.pop(number)
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
            proto = encode_samples(output)
        except (UsageError, EngineRejected) as error:
            return {"error": str(error), "category": "user"}
        except RltoolError as error:
            return {"error": str(error), "category": "server"}
        except Exception as error:  # raised at each poll, it would be polled for ever
            logger.exception("a sampling request of %s", client)
            return {"error": f"{type(error).__name__}: {error}", "category": "server"}
        tokens = sum(len(sequence.tokens) for sequence in output.sequences)
        self.ended += 1
        self.tokens += tokens
        self._on_ended(client, tokens)
        return {"proto": proto}

    def _end(self, client: str, number: str, size: int, task: asyncio.Task[dict[str, Any]]) -> None:
        """Takes out the oldest results that are too many, those that were fetched first."""
        self.in_flight[client] -= 1
        self._queued.samples[client] -= size
        fetched, fresh = self._done
        result = {} if task.cancelled() else task.result()
        fresh[number] = len(result.get("proto", b""))
        self._bytes += fresh[number]
        while len(fetched) + len(fresh) > KEPT_RESULTS or (self._bytes > KEPT_BYTES and len(fetched) + len(fresh) > 1):
            gone, size = (fetched or fresh).popitem(last=False)
            self._bytes -= size
            del self._by_key[self._asked.pop(gone).key]
