"""Prefill and decode on different engines: one fills the KV cache of a prompt, another takes it over and samples.
Whoever sends a request sends it to both; each sample is a request of its own.

- vLLM, one after the other: the prefill is asked for one token, which is thrown away, and for the cache to be kept; its
  reply has its address (`kv_transfer_params`), which the decode request carries. vLLM's connectors (NIXL and others)
  agree on this much. A cache is fetched once; the prefill engine's prefix cache makes all but the first of a prompt
  cheap.
- SGLang, both at once: the two meet in a room (`bootstrap_host`, `bootstrap_port`, `bootstrap_room`) that the sender
  makes up. sglang-router does the same for requests that go through it.

Sources: vllm/entrypoints/scale_out/token_in_token_out and vllm/distributed/kv_transfer/kv_connector/v1/nixl of vLLM
0.32; sglang/srt/managers/io_struct.py and sglang/srt/disaggregation of SGLang 0.5.23.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from rltool.engines.client import EngineClient
from rltool.engines.dialects.protocol import Pairing
from rltool.engines.dialects.table import dialect
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet.fleet import Fleet, Member
from rltool.engines.fleet.state import State
from rltool.engines.replies import making_sense_of
from rltool.engines.types import (
    HALVES,
    SEED_MODULUS,
    TEXT_ALONE,
    Completion,
    GenerateRequest,
    HttpRequest,
    TokenStream,
)
from rltool.errors import EngineError, EngineRejected, UsageError
from rltool.processes.tasks import all_of

VLLM_PATH = "/inference/v1/generate"
"""vLLM's own route, for the prefill: rltool's route replies with the sample alone."""
TO_DECODE = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip
BOOTSTRAP_PORT = 8998
"""SGLang's own default."""
NOWHERE = "2.2.2.2"
"""The bootstrap host with which SGLang's own health check asks one half alone (its FAKE_BOOTSTRAP_HOST): a prefill
sends its cache nowhere, a decode samples from one that was never filled."""


class PrefillFailed(EngineError):
    """The first of the two engines failed."""


class CacheOutdated(EngineError):
    """A weight sync began meanwhile: the cache is, or may be, of other weights than those that sampled."""


def pairs(fleet: Fleet) -> dict[str, list[str]]:
    """URLs of the engines that may sample now, each with those that may prefill for it: [] where each does both.

    A KV cache is of the weights that filled it, and a sync reaches engines one after the other: both have the same.
    """
    members = fleet.members()
    serving = fleet.members(State.READY)
    if all(m.endpoint.role != "prefill" for m in members):
        return {m.url: [] for m in serving}
    first = [m for m in serving if m.endpoint.role == "prefill"]
    alike = {m.url: [p.url for p in first if p.version == m.version] for m in serving if m not in first}
    return {url: found for url, found in alike.items() if found}


async def generate(
    client: EngineClient, prefill: EngineEndpoint, decode: EngineEndpoint, request: GenerateRequest, *, timeout: float,
    may_decode: Callable[[], bool] = lambda: True, version: str | None = None, stream: TokenStream | None = None,
) -> list[Completion]:  # fmt: skip
    """request.n completions; each call is made once. stream: of a request with n = 1, receives its tokens as they come.

    timeout: seconds for both calls of a sample. CacheOutdated is raised where may_decode, asked between vLLM's two
    calls, fails, and where a sample has other weights than `version`, those of both when this was called.
    Raises what EngineClient.generate does; PrefillFailed for all that happens at the prefill engine but a refusal;
    UsageError for pictures.
    """
    if request.pictures:
        raise UsageError(f"pictures go to engines that sample alone: a prefill engine with another {TEXT_ALONE}")

    def sample(one: GenerateRequest) -> Coroutine[Any, Any, Completion]:
        if _pairing_of(decode) == "side_by_side":
            return _side_by_side(client, prefill, decode, one, timeout, version, stream)
        return _in_turn(client, prefill, decode, one, timeout, may_decode, version, stream)

    return await all_of(sample(one) for one in one_by_one(request))


async def generate_at(
    client: EngineClient, fleet: Fleet, engine: Member, request: GenerateRequest, *, timeout: float,
    attempts: int | None = None,
) -> list[Completion]:  # fmt: skip
    """request.n completions of one engine of the fleet, with one of its counterparts where it does not sample alone:
    one that holds the same weights. Raises as EngineClient.generate does; EngineError where no such one is there."""
    endpoint = engine.endpoint
    if samples_alone(endpoint):
        return await client.generate(endpoint, request, timeout=timeout, attempts=attempts)
    [wanted] = HALVES - {endpoint.role}
    there = [m for m in fleet.members(State.READY, State.PAUSED) if m.version == engine.version]
    other = next((m.endpoint for m in there if m.endpoint.role == wanted), None)
    if other is None:
        raise EngineError(f"{engine.url} samples only together with a {wanted} engine, and none holds the same weights")
    prefill, decode = (endpoint, other) if endpoint.role == "prefill" else (other, endpoint)
    # Both may be checked at once, each with the other: SGLang takes no id twice.
    return await generate(client, prefill, decode, request.again(), timeout=timeout)


async def generate_from_nothing(
    client: EngineClient, endpoint: EngineEndpoint, request: GenerateRequest, *, timeout: float
) -> None:
    """Ask an engine that does not sample alone, once: only that it answers counts. Raises as
    EngineClient.generate does."""
    for http in dialect(endpoint.dialect or "").generate(request):
        await _once(client, endpoint, _meeting(http, NOWHERE, endpoint.bootstrap_port), timeout)


def samples_alone(endpoint: EngineEndpoint) -> bool:
    """Those that are asked in turn all do, in any role."""
    return endpoint.role not in HALVES or _pairing_of(endpoint) != "side_by_side"


def _pairing_of(endpoint: EngineEndpoint) -> Pairing | None:
    return None if endpoint.dialect is None else dialect(endpoint.dialect).pairing


def one_by_one(request: GenerateRequest) -> list[GenerateRequest]:
    """The samples of a request as requests of their own, with the seeds that they would have had."""
    if request.n == 1:
        return [request]

    def sample(index: int) -> GenerateRequest:
        seed = None if request.seed is None else (request.seed + index) % SEED_MODULUS
        return replace(request, n=1, request_id=f"{request.request_id}-{index:04d}", seed=seed)

    return [sample(index) for index in range(request.n)]


async def _once(client: EngineClient, engine: EngineEndpoint, request: HttpRequest, timeout: float) -> Any:
    return await client.request(
        engine.url, request, key=engine.present_key(), timeout=timeout, retry=True, attempts=1
    )


async def _prefill(client: EngineClient, engine: EngineEndpoint, request: HttpRequest, timeout: float) -> Any:
    try:
        return await _once(client, engine, request, timeout)
    except EngineRejected:
        raise
    except EngineError as error:
        raise PrefillFailed(str(error)) from error


# -- vLLM


async def _in_turn(
    client: EngineClient, prefill: EngineEndpoint, decode: EngineEndpoint, request: GenerateRequest, timeout: float,
    may_decode: Callable[[], bool], version: str | None, stream: TokenStream | None,
) -> Completion:  # fmt: skip
    engine_dialect = dialect(decode.dialect or "", plugin=bool(decode.plugin))
    loop = asyncio.get_running_loop()
    ends = loop.time() + timeout
    [second] = engine_dialect.generate(request)
    first = await _prefill(client, prefill, prefill_request(second), timeout)
    if not may_decode():
        raise CacheOutdated(f"{prefill.url} or {decode.url} left service between prefill and decode")

    def with_cache(http: HttpRequest) -> HttpRequest:
        return decode_request(http, first)

    # A request that is on its way when a sync begins is not there to be aborted, and finds the cache after it.
    check = _check(version, prefill, decode)
    return await _decoded(client, decode, request, with_cache, max(ends - loop.time(), 0.001), check, stream)


async def _decoded(
    client: EngineClient, decode: EngineEndpoint, request: GenerateRequest,
    with_cache: Callable[[HttpRequest], HttpRequest], timeout: float, check: Callable[[Completion], None],
    stream: TokenStream | None,
) -> Completion:  # fmt: skip
    """The sample of the engine that decodes, as a stream where it has them. with_cache: adds where the cache is."""
    engine_dialect = dialect(decode.dialect or "", plugin=bool(decode.plugin))
    streamed = engine_dialect.stream(request) if stream is not None else None
    if stream is not None and streamed is not None:
        return await client.stream(decode, request, stream, timeout=timeout, asked=with_cache(streamed), check=check)
    [http] = engine_dialect.generate(request)
    done = await _once(client, decode, with_cache(http), timeout)
    with making_sense_of(f"generation at {decode.url}"):
        [completion] = engine_dialect.parse_generate(request, [done])
    check(completion)
    if stream is not None:
        stream.take(completion)
    return completion


def prefill_request(decode: HttpRequest) -> HttpRequest:
    """vLLM's first call, for the body of the second."""
    sampling = decode.body["sampling_params"] | {"n": 1, "max_tokens": 1}
    sampling.pop("min_tokens", None)
    body = decode.body | {"sampling_params": sampling, "kv_transfer_params": TO_DECODE}
    return HttpRequest("POST", VLLM_PATH, body)


def decode_request(decode: HttpRequest, reply: Any) -> HttpRequest:
    """vLLM's second call, with the first reply's kv_transfer_params. PrefillFailed where it has none."""
    found = reply.get("kv_transfer_params") if isinstance(reply, Mapping) else None
    if not isinstance(found, Mapping) or not found.get("do_remote_prefill"):
        raise PrefillFailed(
            f"the prefill engine did not return its KV cache's address (kv_transfer_params: {found!r}): was it started "
            "without --kv-transfer-config?"
        )
    return replace(decode, body=decode.body | {"kv_transfer_params": dict(found)})


# -- SGLang


async def _side_by_side(
    client: EngineClient, prefill: EngineEndpoint, decode: EngineEndpoint, request: GenerateRequest, timeout: float,
    version: str | None, stream: TokenStream | None,
) -> Completion:  # fmt: skip
    [both] = dialect(decode.dialect or "").generate(request)
    both = _meeting(both, urlsplit(prefill.url).hostname, prefill.bootstrap_port)
    room = {name: both.body[name] for name in ROOM}

    def there(http: HttpRequest) -> HttpRequest:
        return replace(http, body=http.body | room)

    check = _check(version, prefill, decode)
    _, completion = await all_of(
        [
            _prefill(client, prefill, both, timeout),
            _decoded(client, decode, request, there, timeout, check, stream),
        ]
    )
    return completion


def _check(version: str | None, prefill: EngineEndpoint, decode: EngineEndpoint) -> Callable[[Completion], None]:
    """CacheOutdated for a sample, or a piece of one, that was sampled with other weights."""

    def check(completion: Completion) -> None:
        if version is not None and any(span.version != version for span in completion.versions):
            raise CacheOutdated(
                f"{decode.url} sampled with other weights than those that {prefill.url} was asked with"
            )

    return check


ROOM = ("bootstrap_host", "bootstrap_port", "bootstrap_room")


def _meeting(request: HttpRequest, host: str | None, port: int | None) -> HttpRequest:
    """In a room of its own; a room is a 63-bit number."""
    room = dict(zip(ROOM, (host, port or BOOTSTRAP_PORT, secrets.randbits(63)), strict=True))
    return replace(request, body=request.body | room)
