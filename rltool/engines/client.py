"""The one HTTP client of engines and routers, for every dialect.

Dialects build requests and parse replies; this client owns deadlines, retries, keys and error text. It
retries transport errors, 5xx and 429 of requests that may be repeated (generation, which is seeded, and probes), never
another 4xx, and never a control call: a weight update that was half done must not be started again blindly.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self

import aiohttp

from rltool.engines.dialects.checksums import Checksums
from rltool.engines.dialects.protocol import MEMORY_TAGS, Controls, Generates, Inspects, MemoryTag, SleepLevel
from rltool.engines.dialects.table import controls, detections, dialect, inspects, none_of_ours
from rltool.engines.dialects.vllm_arrays import ArrayVllmDialect
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fast_json import dumps
from rltool.engines.plugin.lease import RUN_HEADER
from rltool.engines.replies import events_of, making_sense_of, quote, read_body, read_reply
from rltool.engines.types import (
    BOOT_ID_HEADER,
    CONTROL_REPLY_BYTES,
    TOKEN_REPLY_BYTES,
    Completion,
    EngineCounters,
    EngineInfo,
    EngineLoad,
    GenerateRequest,
    HttpRequest,
    TokenScores,
    TokenStream,
)
from rltool.errors import EngineError, EngineRejected, EngineTimedOut, EngineUnreachable, UsageError
from rltool.processes.tasks import all_of

PROBE_SECONDS = 30.0
"""Deadline of one probe. vLLM's /server_info collects the environment of the host at its first call,
which takes seconds."""
HEALTH_SECONDS = 5.0
"""Deadline of one health check: it answers at once, or the server's event loop is stuck."""
CHECKSUMS_BYTES = 16 * CONTROL_REPLY_BYTES
"""Of an answer with a digest of every parameter of every rank."""
ABORTS_SIDE_BY_SIDE = 64
"""SGLang takes one id per request: a stop of 2,000 requests must not open 2,000 connections."""
ABORT_ATTEMPTS = 3
"""An engine that answers 500 to an abort does not hold up a stop for all of the policy's delays."""
KEEPALIVE_SECONDS = 2.0
"""Idle connections are dropped before uvicorn's 5 s do it, so that a request is not sent into a closing one."""


@dataclass(frozen=True)
class RetryPolicy:
    """When to send again. The request's deadline bounds it as well."""

    attempts: int = 6
    """One more than sglang-router's own five: a worker that died is out of the router's rotation by then."""
    first_delay: float = 0.2
    """Seconds; doubled each time. The sum, about 6 s, outlasts a router's restart, not an engine's:
    that is the fleet's matter."""
    longest_delay: float = 4.0

    def delay(self, attempt: int, rng: random.Random) -> float:
        """Seconds to wait after failed `attempt` (from 0): exponential,
        with jitter so that 64 clients do not return together."""
        return min(self.first_delay * 2**attempt, self.longest_delay) * rng.uniform(0.5, 1.0)


class EngineClient:
    """Async context manager. Connections are unlimited: how many requests are in flight is the caller's decision, and a
    queue hidden in the connector (100 by default in aiohttp) would eat into deadlines unseen.

    run: id of the run that asks, sent with every request: an engine that is leased takes control calls of its holder
    alone (plugin/lease.py)."""

    def __init__(
        self, *, retry: RetryPolicy | None = None, rng: random.Random | None = None, run: str | None = None
    ) -> None:
        self.retry = retry or RetryPolicy()
        self.run_id = run
        self._rng = rng or random.Random()
        self._reusing: aiohttp.ClientSession | None = None
        self._fresh: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        no_timeout = aiohttp.ClientTimeout(total=None)  # the deadline spans all attempts, so it is kept here
        self._reusing = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS), timeout=no_timeout,
            json_serialize=_json,
        )  # fmt: skip
        # A control call is sent once: it must not die with a kept-alive connection that the server is just closing.
        self._fresh = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=no_timeout
        )
        return self

    async def __aexit__(self, *exception: object) -> None:
        for session in (self._reusing, self._fresh):
            if session is not None:
                await session.close()
        self._reusing = self._fresh = None

    async def request(
        self,
        base_url: str,
        request: HttpRequest,
        *,
        key: str | None = None,
        timeout: float,
        retry: bool,
        attempts: int | None = None,
        again: Callable[[], HttpRequest] | None = None,
        answered_by: set[str] | None = None,
        headers: Mapping[str, str] | None = None,
        limit: int = CONTROL_REPLY_BYTES,
    ) -> Any:
        """The reply to `request`: decoded JSON, the text where it is not JSON, None where it is empty.

        again: makes what is sent in its place at each further attempt. answered_by: receives the boot ids of the
        processes that answered, errors included, where their replies have it. headers: further ones, for a router.
        limit: bytes of the reply; a larger one is EngineUnreachable, and read no further.

        `timeout`: seconds for all attempts together. Raises EngineRejected (4xx), EngineUnreachable (no answer in time
        or no connection), EngineError (5xx to the end). With `retry` false the request is sent once; with it true at
        most `attempts` times, None meaning the policy's number.
        """
        what = f"{request.method} {base_url}{request.path}"
        attempts = (attempts or self.retry.attempts) if retry else 1
        failure: EngineError | None = None
        cause: BaseException | None = None
        tried = 0
        try:
            async with asyncio.timeout(timeout):
                for attempt in range(attempts):
                    tried = attempt + 1
                    try:
                        return await self._send(
                            base_url, request, key, what, reuse=retry, answered_by=answered_by, headers=headers,
                            limit=limit,
                        )  # fmt: skip
                    except _Temporary as error:
                        failure, cause = error.failure, error.__cause__
                        if tried < attempts:
                            request = again() if again is not None else request
                            await asyncio.sleep(self.retry.delay(attempt, self._rng))
        except TimeoutError as error:
            before = f"; before that: {failure}" if failure else ""
            raise EngineTimedOut(
                f"{what}: no answer within {timeout:g} s (attempt {tried} of {attempts}){before}"
            ) from error
        assert failure is not None
        # The error itself, not a new one of its type: that would lose its attributes, or want arguments that are not
        # here.
        failure.args = (f"{failure} (gave up after {tried} attempt{'s' if tried > 1 else ''})",)
        raise failure from cause

    async def _send(
        self,
        base_url: str,
        request: HttpRequest,
        key: str | None,
        what: str,
        *,
        reuse: bool,
        answered_by: set[str] | None,
        headers: Mapping[str, str] | None,
        limit: int,
    ) -> Any:
        try:
            async with self._sent(
                base_url, request, key, reuse=reuse, answered_by=answered_by, headers=headers
            ) as response:
                status, body = response.status, await read_body(response, what, limit)
        except (aiohttp.ClientError, OSError) as error:
            raise _Temporary(EngineUnreachable(f"{what}: {type(error).__name__}: {quote(str(error))}")) from error
        try:
            return read_reply(what, request, status, body)
        except EngineRejected:
            raise
        except EngineError as error:
            raise _Temporary(error) from None

    @asynccontextmanager
    async def _sent(
        self,
        base_url: str,
        request: HttpRequest,
        key: str | None,
        *,
        reuse: bool,
        answered_by: set[str] | None,
        headers: Mapping[str, str] | None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        session = self._reusing if reuse else self._fresh
        if session is None:
            raise RuntimeError("EngineClient is used outside `async with`")
        sent = dict(headers or {}) | ({"Authorization": f"Bearer {key}"} if key else {})
        if self.run_id is not None:
            sent[RUN_HEADER] = self.run_id
        async with session.request(
            request.method,
            base_url + request.path,
            json=request.body,
            params=request.query,
            headers=sent,
            allow_redirects=False,
        ) as response:
            if answered_by is not None and BOOT_ID_HEADER in response.headers:
                answered_by.add(response.headers[BOOT_ID_HEADER])
            yield response

    async def generate(
        self,
        endpoint: EngineEndpoint,
        request: GenerateRequest,
        *,
        timeout: float,
        attempts: int | None = None,
        answered_by: set[str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> list[Completion]:
        """request.n completions of one prompt, from an engine or through a router (ModelEndpoints.data_endpoint()).

        attempts: how often each HTTP request is sent at most; None: by the client's RetryPolicy. A caller that
        knows other engines tries once here and then elsewhere: attempts=1. answered_by, headers: as in `request`.

        Where the dialect needs several HTTP requests they run side by side; the first failure cancels the others, which
        makes the engine abort them. Each further attempt has ids of its own (GenerateRequest.again).
        """
        engine_dialect = _dialect_of(endpoint)
        key = endpoint.present_key()
        replies = await all_of(
            self.request(
                endpoint.url,
                http,
                key=key,
                timeout=timeout,
                retry=True,
                attempts=attempts,
                again=lambda index=index: engine_dialect.generate(request.again())[index],
                answered_by=answered_by,
                headers=headers,
                limit=request.reply_bytes,
            )
            for index, http in enumerate(engine_dialect.generate(request))
        )
        with making_sense_of(f"generation at {endpoint.url}"):
            if request.routing is not None or request.sampling.return_sampling_mask:  # much of each token
                return await asyncio.to_thread(engine_dialect.parse_generate, request, replies)
            return engine_dialect.parse_generate(request, replies)

    async def stream(
        self,
        endpoint: EngineEndpoint,
        request: GenerateRequest,
        stream: TokenStream,
        *,
        timeout: float,
        answered_by: set[str] | None = None,
        headers: Mapping[str, str] | None = None,
        asked: HttpRequest | None = None,
        check: Callable[[Completion], None] = lambda _: None,
    ) -> Completion:
        """One completion, passed to `stream` as its tokens come; all at once where this endpoint has no streams. Sent
        once. Raises what `generate` does, also after some tokens have come. asked: what is sent in place of the
        dialect's own request for a stream; check: raises for a piece that is not to reach `stream`."""
        engine_dialect = _dialect_of(endpoint)
        http = asked or engine_dialect.stream(request)
        if http is None:
            [whole] = await self.generate(
                endpoint, request, timeout=timeout, attempts=1, answered_by=answered_by, headers=headers
            )
            stream.take(whole)
            return whole
        what = f"{http.method} {endpoint.url}{http.path}"
        key = endpoint.present_key()
        try:
            async with asyncio.timeout(timeout), self._sent(
                endpoint.url, http, key, reuse=True, answered_by=answered_by, headers=headers
            ) as response:
                if response.status >= 300:
                    read_reply(what, http, response.status, await read_body(response, what, CONTROL_REPLY_BYTES))
                async for event in events_of(response, what, request.reply_bytes):
                    with making_sense_of(f"the stream of {endpoint.url}"):
                        piece = engine_dialect.parse_event(request, event, stream)
                    check(piece)
                    stream.take(piece)
                    if len(stream.token_ids) > request.sampling.max_tokens:
                        raise EngineError(f"{what}: a stream with more than max_tokens")
        except TimeoutError as error:
            raise EngineTimedOut(f"{what}: no answer within {timeout:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnreachable(f"{what}: {type(error).__name__}: {quote(str(error))}") from error
        return stream.completion()

    def request_ids(self, endpoint: EngineEndpoint, request: GenerateRequest) -> list[str]:
        """What `abort` must be given to end `generate(endpoint, request)`,
        at the engine that the router chose."""
        return _dialect_of(endpoint).request_ids(request)

    async def abort(self, engine: EngineEndpoint, request_ids: Sequence[str], *, timeout: float) -> None:
        """End exactly these requests at one engine (never a router); ids that it does not have are harmless.

        `generate` then returns what they have, with finish_reason "abort". That comes a moment after this has returned.
        The first failure is raised after all ids were sent, within `timeout` seconds for all.
        """
        key = engine.present_key()
        slots = asyncio.Semaphore(ABORTS_SIDE_BY_SIDE)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout

        async def send(http: HttpRequest) -> None:
            async with slots:
                left = max(round(deadline - loop.time(), 3), 0.001)
                # Aborting twice is aborting once.
                await self.request(engine.url, http, key=key, timeout=left, retry=True, attempts=ABORT_ATTEMPTS)

        requests = _dialect_of(engine).abort(request_ids)
        for outcome in await asyncio.gather(*map(send, requests), return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    async def run(self, endpoint: EngineEndpoint, requests: Sequence[HttpRequest], *, timeout: float) -> list[Any]:
        """Send control calls in order, each once; `timeout` is for all of them.
        The first that fails ends it by raising."""
        key = endpoint.present_key()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        replies = []
        for http in requests:
            left = max(deadline - loop.time(), 0.001)
            replies.append(await self.request(endpoint.url, http, key=key, timeout=left, retry=False))
        return replies

    async def sleep(
        self,
        engine: EngineEndpoint,
        level: SleepLevel,
        tags: Sequence[MemoryTag] = MEMORY_TAGS,
        *,
        timeout: float,
    ) -> None:
        """Abort what the engine runs, and free its GPU memory; see Controls.sleep."""
        await self.run(engine, _controls(engine).sleep(level, tags), timeout=timeout)

    async def wake(self, engine: EngineEndpoint, tags: Sequence[MemoryTag] = MEMORY_TAGS, *, timeout: float) -> None:
        """Take the memory back; see Controls.wake."""
        await self.run(engine, _controls(engine).wake(tags), timeout=timeout)

    async def probe(self, endpoint: EngineEndpoint, *, timeout: float = PROBE_SECONDS) -> EngineInfo:
        """Ask a live engine what it is. An endpoint without a dialect is asked for that first.
        Changes nothing there."""
        if endpoint.dialect is None:
            name = await self.detect_dialect(endpoint.url, endpoint.present_key(), timeout=timeout)
            endpoint = endpoint.model_copy(update={"dialect": name})
        engine_dialect = _dialect_of(endpoint)
        key = endpoint.present_key()

        async def ask(name: str, http: HttpRequest) -> Any:
            try:
                return await self.request(endpoint.url, http, key=key, timeout=timeout, retry=True)
            except EngineRejected as error:
                if name.endswith("?") and error.status == 404:
                    return None
                raise

        questions = dict(engine_dialect.probe())
        replies = await asyncio.gather(*(ask(name, http) for name, http in questions.items()))
        with making_sense_of(f"the probe of {endpoint.url}"):
            return engine_dialect.parse_probe(dict(zip(questions, replies, strict=True)))

    async def detect_dialect(self, url: str, key: str | None, *, timeout: float = PROBE_SECONDS) -> str:
        """The kind of engine at `url`, by a route that only this kind has. Raises UsageError if it is none of ours."""
        for name, (path, field) in detections().items():
            try:
                reply = await self.request(url, HttpRequest("GET", path), key=key, timeout=timeout, retry=True)
            except EngineRejected as error:
                if error.status != 404:
                    raise
                continue
            if isinstance(reply, dict) and field in reply:
                return name
        raise none_of_ours(url)

    async def health(self, endpoint: EngineEndpoint, *, timeout: float = HEALTH_SECONDS) -> None:
        """Return if the engine reports that it is healthy, else raise EngineError with the reason. Sent once."""
        http = _dialect_of(endpoint).health()
        await self.request(endpoint.url, http, key=endpoint.present_key(), timeout=timeout, retry=False)

    async def load(self, endpoint: EngineEndpoint, *, timeout: float = HEALTH_SECONDS) -> EngineLoad:
        """How much one engine has to do. Sent once: a number that comes late is worth nothing."""
        engine_dialect = _dialect_of(endpoint)
        reply = await self.request(
            endpoint.url, engine_dialect.load(), key=endpoint.present_key(), timeout=timeout, retry=True, attempts=1
        )
        with making_sense_of(f"the load of {endpoint.url}"):
            return engine_dialect.parse_load(reply)

    async def counters(self, endpoint: EngineEndpoint, *, timeout: float) -> EngineCounters:
        """What one engine has counted of its own work. Sent once."""
        engine_dialect = _dialect_of(endpoint)
        reply = await self.request(
            endpoint.url, engine_dialect.counters(), key=endpoint.present_key(), timeout=timeout, retry=True, attempts=1
        )
        with making_sense_of(f"the counters of {endpoint.url}"):
            return engine_dialect.parse_counters(reply)

    async def checksums(
        self, endpoint: EngineEndpoint, *, timeout: float, adapter: str = ""
    ) -> Checksums | None:
        """Digests of what the engine holds, or of this adapter; None where it has none to give, as of adapters all have
        but rltool's plugin. Reads all weights: seconds for a large model."""
        engine_dialect = _inspects(endpoint)
        if not adapter:
            request = engine_dialect.checksums()
        elif isinstance(engine_dialect, ArrayVllmDialect):
            request = engine_dialect.adapter_checksums(adapter)
        else:
            return None
        reply = await self.request(
            endpoint.url, request, key=endpoint.present_key(), timeout=timeout, retry=False, limit=CHECKSUMS_BYTES
        )
        with making_sense_of(f"the checksums of {endpoint.url}"):
            return engine_dialect.parse_checksums(reply)

    async def score(
        self, endpoint: EngineEndpoint, token_ids: Sequence[int], *, timeout: float, adapter: str = ""
    ) -> tuple[float, ...]:
        """Log-probabilities of all tokens but the first, each after those before it, at temperature 1. adapter: as of
        a GenerateRequest."""
        engine_dialect = _inspects(endpoint)
        reply = await self.request(
            endpoint.url, engine_dialect.score(token_ids, adapter=adapter), key=endpoint.present_key(),
            timeout=timeout, retry=True, limit=_score_bytes(token_ids, 0),
        )  # fmt: skip
        with making_sense_of(f"the scores of {endpoint.url}"):
            return engine_dialect.parse_score(token_ids, reply)

    async def score_topk(
        self, endpoint: EngineEndpoint, token_ids: Sequence[int], topk: int, *, timeout: float, adapter: str = ""
    ) -> TokenScores:
        """`score`, and the `topk` most probable tokens in the place of each."""
        engine_dialect = _inspects(endpoint)
        reply = await self.request(
            endpoint.url, engine_dialect.score(token_ids, topk, adapter), key=endpoint.present_key(), timeout=timeout,
            retry=True, limit=_score_bytes(token_ids, topk),
        )  # fmt: skip
        with making_sense_of(f"the scores of {endpoint.url}"):
            return engine_dialect.parse_topk(token_ids, reply, topk)

    async def classify(
        self, endpoint: EngineEndpoint, token_ids: Sequence[int], *, use_activation: bool, timeout: float,
        attempts: int | None = None,
    ) -> tuple[float, ...]:  # fmt: skip
        """One score for each label, from an engine of a classifier (never a router); see Inspects.classify. attempts:
        as in `request`."""
        engine_dialect = _inspects(endpoint)
        http = engine_dialect.classify(token_ids, use_activation=use_activation)
        reply = await self.request(
            endpoint.url, http, key=endpoint.present_key(), timeout=timeout, retry=True, attempts=attempts
        )
        with making_sense_of(f"the classification of {endpoint.url}"):
            return engine_dialect.parse_classify(reply)


def _json(body: Any) -> str:
    return dumps(body).decode()


def _score_bytes(token_ids: Sequence[int], topk: int) -> int:
    return CONTROL_REPLY_BYTES + len(token_ids) * (1 + topk) * TOKEN_REPLY_BYTES


class _Temporary(Exception):
    """A failure that may pass; `failure` is what the user reads if it does not."""

    def __init__(self, failure: EngineError) -> None:
        super().__init__(str(failure))
        self.failure = failure


def _dialect_of(endpoint: EngineEndpoint) -> Generates:
    return dialect(_name_of(endpoint), plugin=endpoint.plugin)


def _controls(endpoint: EngineEndpoint) -> Controls:
    try:
        return controls(_name_of(endpoint), plugin=endpoint.plugin)
    except UsageError as error:
        raise error.with_context(before=f"{endpoint.url} ") from error


def _inspects(endpoint: EngineEndpoint) -> Inspects:
    try:
        return inspects(_name_of(endpoint), plugin=endpoint.plugin)
    except UsageError as error:
        raise error.with_context(before=f"{endpoint.url} ") from error


def _name_of(endpoint: EngineEndpoint) -> str:
    if endpoint.dialect is None:
        raise RuntimeError(f"the dialect of {endpoint.url} is not known yet: probe it first")
    return endpoint.dialect
