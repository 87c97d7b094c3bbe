"""Requests to and replies from an engine, of any dialect. Token ids in, token ids out; no text."""

from __future__ import annotations

import math
import uuid
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, cast

from rltool.engines.dialects.sampling_mask import SamplingMask
from rltool.errors import MissingLogprobs

FinishReason = Literal["stop", "length", "abort"]
EngineRole = Literal["regular", "prefill", "decode"]
HALVES: frozenset[EngineRole] = frozenset({"prefill", "decode"})

SEED_MODULUS = 2**31
"""Seeds of requests and samples lie below it: what both engines take."""

TEXT_ALONE = "takes text alone (no images, video, audio or files)"
"""For messages: token ids are all that a GenerateRequest has."""
UNROUTED = {"B": 255, "h": 32767}
"""In the place of experts that no engine chose, by array's type code: the largest value."""


def json_object(value: Any) -> dict[str, Any]:
    """An object of a reply; {} for anything else, which lacks what is looked for in it."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def json_list(value: Any) -> list[Any] | None:
    """A list of a reply; None for anything else."""
    return cast("list[Any]", value) if isinstance(value, list) else None


@dataclass(frozen=True)
class SamplingParams:
    """How to sample one response. temperature 0 is greedy; top_k -1 keeps all tokens. stop: texts that end a response,
    for engines that decode; min_tokens: minimum response length; engines mask stop tokens until then.
    return_sampling_mask: which tokens top_p and top_k left to choose from; needs top_k above 0."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    return_sampling_mask: bool = False


@dataclass(frozen=True)
class Routing:
    """Of each token `top_k` of `experts` in each of `layers` layers but the `dense` ones (indices from 0), which have
    no experts. Those have places in replies all the same: what engines leave there means nothing."""

    layers: int
    top_k: int
    experts: int
    dense: tuple[int, ...] = ()

    @property
    def per_token(self) -> int:
        return self.layers * self.top_k

    @property
    def code(self) -> Literal["B", "h"]:
        """array's type code of the smallest integers that hold every expert and UNROUTED."""
        return "B" if self.experts <= UNROUTED["B"] else "h"


@dataclass(frozen=True)
class RoutedExperts:
    """choices: of one token after the other, of each layer by layer, UNROUTED in dense ones; per_token: how many of one
    token."""

    choices: array[int]
    per_token: int

    @property
    def tokens(self) -> int:
        return len(self.choices) // self.per_token

    def without_last(self, tokens: int) -> RoutedExperts:
        """All but those of the last tokens."""
        return RoutedExperts(self.choices[: len(self.choices) - tokens * self.per_token], self.per_token)

    def padded(self, tokens: int) -> array[int]:
        """choices padded with UNROUTED to this many tokens. ValueError where that is fewer than it has."""
        missing = tokens * self.per_token - len(self.choices)
        if missing < 0:
            raise ValueError(f"experts of {self.tokens} tokens, and the sample has {tokens}")
        code = self.choices.typecode
        return self.choices + array(code, [UNROUTED[code]]) * missing


class Picture(NamedTuple):
    """Of a prompt. at: index of the first of its `tokens` placeholders; url: data URL of its file."""

    at: int
    tokens: int
    url: str


CONTROL_REPLY_BYTES = 16 * 1024 * 1024
"""More than any answer to a control call, a probe or a question to a driver has: a server that sends more is none of
ours, and shall not fill the memory of who asked."""
TOKEN_REPLY_BYTES = 1024
"""Of one token in an answer: its id, log-probability and text, in the widest form that an engine has. Generous."""
NUMBER_REPLY_BYTES = 16
"""Of one integer in such an answer."""


@dataclass(frozen=True)
class GenerateRequest:
    """`n` samples of one prompt. Sample i is seeded with seed + i (mod SEED_MODULUS); request_id is a uuid4 hex, so of
    fixed length. continues: the last tokens of prompt_ids, this many, begin the response; not sent to engines. routing:
    the model's, where completions are to have routed_experts. session: requests of one conversation, which share
    prefixes, have an equal one, and go to one engine where that can be; "": of none. adapter: the name of the adapter
    that all of its tokens are sampled with, "": the model alone. pictures: of the prompt, in order; an engine that puts
    other tokens in the place of one has failed."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    request_id: str
    n: int = 1
    seed: int | None = None
    continues: int = 0
    routing: Routing | None = None
    session: str = ""
    adapter: str = ""
    pictures: tuple[Picture, ...] = ()

    @property
    def unexpanded(self) -> list[int]:
        """prompt_ids with one placeholder for each picture, for an engine to expand."""
        found, end = list[int](), 0
        for picture in self.pictures:
            found += self.prompt_ids[end : picture.at + 1]
            end = picture.at + picture.tokens
        return [*found, *self.prompt_ids[end:]]

    @property
    def reply_bytes(self) -> int:
        """More than an answer to this has."""
        sampled = self.sampling.max_tokens
        numbers = sampled * self.sampling.top_k if self.sampling.return_sampling_mask else 0
        if self.routing is not None:
            numbers += (len(self.prompt_ids) + sampled) * self.routing.per_token
        tokens = len(self.prompt_ids) + sampled
        return CONTROL_REPLY_BYTES + self.n * (tokens * TOKEN_REPLY_BYTES + numbers * NUMBER_REPLY_BYTES)

    def again(self) -> GenerateRequest:
        """The same with an id of its own: an engine whose caller has gone may notice that seconds later, and until then
        SGLang answers 400 to the id that it still works on."""
        return replace(self, request_id=uuid.uuid4().hex)


@dataclass(frozen=True)
class TokenScores:
    """Of given tokens, all but the first, each after those before it; in nats at temperature 1.

    logprobs: of the tokens; topk_ids ("i") and topk_logprobs ("f"): of the k most probable tokens in the place of each,
    the most probable first, place after place; -1 and -inf where an engine gave fewer.
    """

    logprobs: tuple[float, ...]
    topk_ids: array[int]
    topk_logprobs: array[float]


@dataclass(frozen=True)
class VersionSpan:
    """Response tokens [start, end) were sampled from weights of this version."""

    version: str
    start: int
    end: int


class Drafts(NamedTuple):
    """Forward passes that verified draft tokens, and how many draft tokens they accepted in all."""

    passes: int
    accepted: int

    def plus(self, other: Drafts) -> Drafts:
        return Drafts(self.passes + other.passes, self.accepted + other.accepted)


@dataclass(frozen=True)
class Completion:
    """One sampled response.

    token_ids: the response alone, with the stop token if the model emitted one; logprobs: natural logs under the
    sampling distribution at the sampling temperature, one per token; versions: spans that cover the response (empty if
    the engine does not report them); sampling_mask: with a place for each token, None where none was asked for;
    routed_experts: of all tokens of prompt and response but the last, where the request has `routing`; None without,
    and of an aborted response: its continuation brings those of all its tokens. cached_tokens: of the prompt, those
    that the engine found in its prefix cache; drafts: of speculative decoding; None where the engine does not report
    them for this sample alone. columns: further fields of algorithms/fields.py by name, values of token_ids, token
    after token. Raises MissingLogprobs if the two lists differ in length or a value is not finite.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    versions: tuple[VersionSpan, ...] = ()
    sampling_mask: SamplingMask | None = None
    routed_experts: RoutedExperts | None = None
    cached_tokens: int | None = None
    drafts: Drafts | None = None
    columns: Mapping[str, array[Any]] = field(default_factory=dict)

    def brought(self, name: str) -> Any:
        """What it has of a field; None: nothing."""
        return self.columns.get(name, getattr(self, name, None))

    def first(self, tokens: int) -> Completion:
        """The response up to these tokens, as one that stopped there. cached_tokens and drafts are not known of it."""
        spans = [span for span in self.versions if span.start < tokens]
        mask, experts, size = self.sampling_mask, self.routed_experts, len(self.token_ids)
        return Completion(
            self.token_ids[:tokens], self.logprobs[:tokens], "stop",
            tuple(VersionSpan(span.version, span.start, min(span.end, tokens)) for span in spans),
            sampling_mask=None if mask is None else mask.first(tokens),
            routed_experts=None if experts is None else experts.without_last(size - tokens),
            columns={name: values[: len(values) // size * tokens] for name, values in self.columns.items()},
        )  # fmt: skip

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs):
            raise MissingLogprobs(
                f"the engine returned {len(self.token_ids)} tokens and {len(self.logprobs)} log-probabilities"
            )
        bad = next((i for i, value in enumerate(self.logprobs) if value is None or not math.isfinite(value)), None)
        if bad is not None:
            raise MissingLogprobs(f"log-probability {bad} of {len(self.logprobs)} is {self.logprobs[bad]}")


@dataclass
class TokenStream:
    """What has come so far of a reply that is streamed. heard: called with each piece: its tokens and log-probabilities
    alone, and the versions of all tokens so far. version: of all tokens, where the request names an adapter."""

    heard: Callable[[Completion], None]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: tuple[VersionSpan, ...] = ()
    finish_reason: FinishReason = "abort"
    version: str | None = None

    def take(self, piece: Completion) -> None:
        if not piece.token_ids and piece.finish_reason == "abort" and not piece.versions:
            return
        self.token_ids.extend(piece.token_ids)
        self.logprobs.extend(piece.logprobs)
        self.versions = piece.versions or self.versions
        self.finish_reason = piece.finish_reason
        if piece.token_ids:
            self.heard(piece)

    def completion(self) -> Completion:
        """Of all that has come: as one that was aborted, where its end has not."""
        size = len(self.token_ids)
        spans = [VersionSpan(s.version, s.start, min(s.end, size)) for s in self.versions if s.start < size]
        if self.version is not None and size:
            spans = [VersionSpan(self.version, 0, size)]
        return Completion(tuple(self.token_ids), tuple(self.logprobs), self.finish_reason, tuple(spans))


@dataclass(frozen=True)
class HttpRequest:
    """What a dialect asks the client to send. `body` is JSON; `query` goes into the URL.

    tolerate: HTTP statuses that are an answer here and no failure, such as the 400 for closing what is not open. The
    reply is then the status, as an int.
    """

    method: Literal["GET", "POST", "DELETE"]
    path: str
    body: Any = None
    query: dict[str, str] = field(default_factory=dict)
    tolerate: tuple[int, ...] = ()


@dataclass(frozen=True)
class Holder:
    """A run that controls an engine, by its id; name, host and pid (of its driver) are for the people who read it.

    machine: where that pid means something (engines.lease.this_machine), "" where that is not known.
    """

    run: str
    name: str
    host: str
    pid: int
    machine: str = ""

    def __str__(self) -> str:
        return f"run {self.name} (pid {self.pid} on {self.host})"


@dataclass(frozen=True)
class Lease:
    """expires_in: seconds from when the engine was asked, unless the holder renews it."""

    holder: Holder
    expires_in: float

    @classmethod
    def from_json(cls, reply: Mapping[str, Any] | None) -> Lease | None:
        """As the plugin reports it (dataclasses.asdict, or null)."""
        return cls(Holder(**reply["holder"]), reply["expires_in"]) if reply else None


@dataclass(frozen=True)
class EngineInfo:
    """What a probe of a live engine found. Nothing here is assumed; None means that this engine does not report it."""

    dialect: str
    engine_version: str
    model_id: str
    world_size: int
    max_model_len: int | None
    vocab_size: int | None
    dtype: str | None
    weight_backend: str | None
    weight_version: str | None
    boot_id: str | None
    plugin: bool
    device: str | None = None
    """cpu or cuda."""
    paused: bool | None = None
    lease: Lease | None = None
    """Of the run that controls the engine; None too where the engine knows no leases."""
    model_config: dict[str, Any] = field(default_factory=dict)
    dp_size: int = 1
    """Data-parallel replicas behind its one address, where reported."""
    own_seeds: bool | None = None
    """Whether the seed of a request is honoured; None if not reported, as by vLLM, which honours it."""
    model_path: str | None = None
    """Where the server read its model: a directory of its own host, or a name on a hub."""
    sleep_levels: tuple[int, ...] = ()
    """At which levels (dialect.SleepLevel) it can sleep; () also if not reported."""
    role: EngineRole | None = None
    bootstrap_port: int | None = None
    """Of an SGLang prefill engine: where decode engines ask it for KV caches."""
    routed_experts: bool | None = None
    """Whether it returns the experts that its router chose; None if not reported."""
    exact: bool | None = None
    """Whether it computes as algorithm.exact needs (`serve-engines --exact`); None if not reported."""
    task: str | None = None
    """generate, classify, or another one of vLLM's; None if not reported (a stock vLLM)."""
    max_logprobs: int | None = None
    """How many tokens of one place a vLLM server gives the log-probabilities of, -1: of all."""
    plugin_protocol: int | None = None
    """rltool.engines.plugin.info.PLUGIN_PROTOCOL there; None without the plugin, or with one that reports none."""
    lora_rank: int | None = None
    """The largest of an adapter that it takes; 0: it takes none; None if not reported."""
    lora_slots: int | None = None
    """How many adapters it holds at a time."""


INCOMPLETE_VERSION = "incomplete"
"""The weight version after an update that failed half-way: partially updated weights match no version."""

ROUTING_KEY_HEADER = "X-SMG-Routing-Key"
"""Request header: sglang-router with policy `manual` keeps equal ones on one worker."""

BOOT_ID_HEADER = "x-rltool-boot-id"
"""Response header of servers with rltool's plugin: which process answered, also behind a router."""


@dataclass(frozen=True)
class EngineLoad:
    """What one engine has to do at this moment, over all its data-parallel replicas.

    running: samples in its batches; waiting: samples that it has accepted and not started, or put back for lack of
    space; kv_cache_usage: the used share of the KV cache, in [0, 1], of the fullest replica.
    """

    running: int
    waiting: int
    kv_cache_usage: float


@dataclass(frozen=True)
class Tally:
    """Counts since the server's start: `hits` of `total`."""

    hits: float
    total: float


@dataclass(frozen=True)
class EngineCounters:
    """An engine's own counters. Each is a Tally, or a share in [0, 1] of its last batches where the engine
    has no counts, or None if not reported.

    prefix_cache: prompt tokens found in the prefix cache; speculation: draft tokens that were accepted.
    """

    prefix_cache: Tally | float | None = None
    speculation: Tally | float | None = None


@dataclass(frozen=True)
class TensorMeta:
    """One tensor of the weight stream: HF name, torch dtype name without "torch." (e.g. "float32"), shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


Bucket = tuple[TensorMeta, ...]
"""Tensors sent together. Their bytes travel back to back as one flat uint8 tensor, in this order, contiguous,
unpadded."""
