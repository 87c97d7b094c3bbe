"""What an engine's HTTP interface and command line look like to rltool: data, and pure functions from typed values to
requests and back.

A dialect performs no I/O and imports no engine package, so it is tested without a network. `client.py` does the I/O for
all. It has one to four parts: every dialect Generates; Controls, Inspects and Launches are there for the engines that
rltool sends weights to, looks into, and starts. It is a class that inherits the parts it has (vllm.py, sglang.py), and
`dialects.py` hands out the part that is asked for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from rltool.config.serve import Device, EngineLaunch
from rltool.engines.dialects.checksums import Checksums, ParameterLayout
from rltool.engines.types import (
    Completion,
    EngineCounters,
    EngineInfo,
    EngineLoad,
    GenerateRequest,
    HttpRequest,
    TokenScores,
    TokenStream,
    json_list,
    json_object,
)
from rltool.errors import EngineError, PicturesDiffer

PauseMode = Literal["keep", "wait", "abort"]
SleepLevel = Literal[1, 2]
"""1: the weights are kept in the host's memory. 2: they are dropped, and the engine needs a whole update before its KV
cache wakes."""
MemoryTag = Literal["weights", "kv_cache"]
MEMORY_TAGS: tuple[MemoryTag, ...] = ("weights", "kv_cache")
"""What takes GPU memory, in the order in which it must come back."""


def in_waking_order(tags: Sequence[MemoryTag]) -> list[MemoryTag]:
    """Raises ValueError where nothing is named: to both engines that means everything."""
    if not tags or not set(tags) <= set(MEMORY_TAGS):
        raise ValueError(f"memory tags are one or both of {', '.join(MEMORY_TAGS)}, not {list(tags)}")
    return [tag for tag in MEMORY_TAGS if tag in tags]


def config_of(model: Path) -> Mapping[str, Any]:
    """Of a Hugging Face directory; empty where it cannot be read: the engine reports what is wrong with it."""
    try:
        return json_object(json.loads((model / "config.json").read_text()))
    except (OSError, ValueError):
        return {}


def check_expansion(request: GenerateRequest, found: Any) -> None:
    """PicturesDiffer unless the prompt ids that an engine returns, `found`, are those that the trainer has, where the
    prompt has pictures."""
    if not request.pictures:
        return
    ids = json_list(found)
    if ids is None:
        raise PicturesDiffer(
            "the engine does not say to which tokens it expanded the pictures of a prompt: it, or a router before it, "
            "does not know them"
        )
    if ids == list(request.prompt_ids):
        return
    lengths = f"{len(ids)} tokens, the trainer's {len(request.prompt_ids)}"
    raise PicturesDiffer(
        f"the engine expanded a prompt with {len(request.pictures)} pictures to {lengths}: it has another image "
        "processor or other settings of it (preprocessor_config.json, --mm-processor-kwargs, --mm-process-config)"
    )


Version = tuple[int, ...]


class Feature(StrEnum):
    """What some of the supported versions have and others lack."""

    VERSION_SPANS = "version spans"  # a reply names the weights that sampled which of its tokens
    VERSION_OF_REPLY = "version of a reply"  # a reply names the weights that were there when it was made
    STARTING_VERSION = "starting version"  # /server_info keeps the weight version that the server was started with


@dataclass(frozen=True)
class Versions:
    """Which versions of an engine rltool works with. oldest and newest are inclusive, and what follows the newest
    (0.33.1, 0.5.23.post1) belongs to it. since: the first version with a feature; one that is not named is in none.
    exact: the newest that algorithm.exact was compared with; None: no version of the engine computes so.

    What a server shows by itself (a route that is not there answers 404) is probed, and does not stand here.
    """

    oldest: Version
    newest: Version
    since: Mapping[Feature, Version] = field(default_factory=dict[Feature, Version])
    exact: Version | None = None


Pairing = Literal["in_turn", "side_by_side"]
"""How a prefill and a decode engine are asked for one sample (engines/fleet/disaggregation.py). in_turn: the prefill
first, and its reply goes into the request to the decode; each of them can also sample alone. side_by_side: both at
once, and they find each other; neither samples alone, and a router may stand in front of them."""


@runtime_checkable
class Generates(Protocol):
    """What every dialect has: it samples, and the server can be asked what it is."""

    name: str
    """Its name in rltool.config.serve.ENGINES."""
    label: str
    """Its name in messages."""
    versions: Versions
    detected_by: tuple[str, str]
    """(route, field): a GET that only this kind of engine, of those after it in ENGINES, answers with that field."""
    with_plugin: str = ""
    """Import path of the dialect of servers with rltool's plugin; "": the same."""
    routable: bool = False
    """It answers SGLang's /generate, so sglang-router can send it requests."""
    pairing: Pairing | None = None
    """None: it has no prefill and decode engines."""
    sampling_masks: bool = False
    """Whether it returns the tokens that top_p and top_k left to choose from."""
    replicas_share_seed: bool = False
    """Data-parallel replicas of one server may draw the same random numbers (EngineInfo.own_seeds: not with seeds of
    their own for each request)."""
    health_reports_death: bool = False
    """The server outlives what generates in it, and then answers 503 on /health (engines/fleet/liveness.py)."""

    # -- generation
    def generate(self, request: GenerateRequest) -> list[HttpRequest]:
        """The HTTP requests that together yield request.n samples (one request where the engine can do n with
        seeds)."""
        ...

    def parse_generate(self, request: GenerateRequest, replies: list[Any]) -> list[Completion]:
        """Exactly request.n completions, or EngineError / MissingLogprobs."""
        ...

    def stream(self, request: GenerateRequest) -> HttpRequest | None:
        """What yields one sample as server-sent events, for `parse_event`; None where this kind of server, or this
        request, has none."""
        return None

    def parse_event(self, request: GenerateRequest, event: Any, so_far: TokenStream) -> Completion:
        """What an event brings: its tokens and log-probabilities alone, and the versions of all tokens so far where the
        server says them; finish_reason "abort" where it is not the last. so_far: what came before. Raises what
        parse_generate does, and EngineRejected for a request that is refused within its stream."""
        raise EngineError("this kind of server is not asked for streams")

    def request_ids(self, request: GenerateRequest) -> list[str]:
        """The ids under which the HTTP requests of `generate` run at an engine, also behind a router: what `abort`
        takes."""
        ...

    def abort(self, request_ids: Sequence[str]) -> list[HttpRequest]:
        """End exactly these requests, given by the ids of `request_ids`, at one engine; all of them may be sent side by
        side.

        An id that is not there is harmless, so the same list goes to every engine, and for no ids nothing is sent. A
        request that is ended, waiting or running, answers with the tokens that it has and finish_reason "abort". A
        request that arrives after the abort, or that the server has not yet let in, is not ended by it: who waits
        for the end repeats the abort.
        """
        ...

    # -- probing
    def probe(self) -> Mapping[str, HttpRequest]:
        """Named read-only requests; replies go to parse_probe. A key that ends in '?' may answer 404 (reply None)."""
        ...

    def parse_probe(self, replies: Mapping[str, Any]) -> EngineInfo: ...

    def health(self) -> HttpRequest: ...

    def load(self) -> HttpRequest:
        """How much the engine has to do; cheap enough to be asked every second. The reply goes to parse_load."""
        ...

    def parse_load(self, reply: Any) -> EngineLoad: ...

    def counters(self) -> HttpRequest:
        """What the engine has counted of its own work. The reply goes to parse_counters."""
        return self.load()

    def parse_counters(self, reply: Any) -> EngineCounters:
        return EngineCounters()


@runtime_checkable
class Controls(Protocol):
    """An engine that rltool pauses, puts to sleep, and sends weights. Each list is sent in order, all must answer
    2xx."""

    def pause(self, mode: PauseMode) -> list[HttpRequest]: ...

    def resume(self) -> list[HttpRequest]: ...

    def sleep(self, level: SleepLevel, tags: Sequence[MemoryTag] = MEMORY_TAGS) -> list[HttpRequest]:
        """Abort what runs, hold back what comes, and free the GPU memory of `tags`.

        EngineInfo.sleep_levels holds what the server was started for. Raises UsageError for tags that this kind of
        engine frees only together with others.
        """
        ...

    def wake(self, tags: Sequence[MemoryTag] = MEMORY_TAGS) -> list[HttpRequest]:
        """Take the memory of `tags`, which must be asleep, again.

        The engine generates as soon as its KV cache is awake. So after level 2: wake the weights, update them, wake the
        cache; and nothing in between may resume the engine.
        """
        ...

    def reload(self, model: str | None) -> list[HttpRequest]:
        """Load the weights again from where the server read them, `model` (EngineInfo.model_path): after level 2, while
        its weights are awake and its cache is not."""
        ...

    def not_sent_fp8(self, info: EngineInfo, backend: str | None, *, sleeps: bool) -> str | None:
        """Why an engine that serves FP8 cannot be sent it; None: it can. backend: of rltool.weights.transport, None
        where none was found; sleeps: its weights are released between two syncs."""
        return None

    def leave_transfer(self, group: str) -> list[HttpRequest]:
        """Leave a weight-transfer group and close an update that was left open, by us or by a trainer that died,
        whatever the transport was. No error if there is no such group. The other steps of a transfer are in
        rltool.weights."""
        ...


@runtime_checkable
class Adapts(Protocol):
    """An engine that takes adapters (LoRA) under names while it serves. A name stands for one adapter for ever: engines
    find cached keys and values by it."""

    def load_adapter(self, name: str, directory: str) -> HttpRequest:
        """directory: in peft's format, as the engine sees it. An error where the name is taken."""
        ...

    def unload_adapter(self, name: str) -> HttpRequest:
        """No error where it has none of this name."""
        ...

    def no_expert_adapters(self, info: EngineInfo) -> str | None:
        """Why it samples with no adapters of experts; None: it does."""
        ...


@runtime_checkable
class Inspects(Protocol):
    """What an engine reports of its weights, and of texts that it scores."""

    digests_by_device: bool = False
    """Equal parameters have other digests on a GPU than on a CPU."""

    def checksums(self) -> HttpRequest:
        """Digests of the parameters that the engine holds. A version that has none answers 404, which is tolerated."""
        ...

    def parse_checksums(self, reply: Any) -> Checksums | None:
        """None where the engine has none."""
        ...

    def layout(self, info: EngineInfo, ranks: int, fallback_dtype: str) -> ParameterLayout | str:
        """How this engine keeps its parameters, for digests that are worked out beside it; or why they prove nothing.

        ranks: over which its checksums are; fallback_dtype: of an engine that does not report its own.
        """
        ...

    def score(self, token_ids: Sequence[int], topk: int = 0, adapter: str = "") -> HttpRequest:
        """Ask for the log-probabilities of given tokens, each after those before it. The reply goes to parse_score.
        topk: also of the topk most probable tokens at each place; then the reply goes to parse_topk. adapter: as of a
        GenerateRequest."""
        ...

    def parse_score(self, token_ids: Sequence[int], reply: Any) -> tuple[float, ...]:
        """Natural logs at temperature 1 of all tokens but the first. Raises EngineError, MissingLogprobs."""
        ...

    def parse_topk(self, token_ids: Sequence[int], reply: Any, topk: int) -> TokenScores:
        """As parse_score, with the most probable tokens."""
        ...

    # -- classification, of engines that were started for it (task = classify)
    def classify(self, token_ids: Sequence[int], *, use_activation: bool) -> HttpRequest:
        """Ask for the scores of a text, one for each label. use_activation: the model's sigmoid or softmax behind its
        head. The reply goes to parse_classify. Raises UsageError for what this kind of engine cannot do."""
        ...

    def parse_classify(self, reply: Any) -> tuple[float, ...]:
        """In the order of the labels. Raises EngineError where one is no finite number."""
        ...


@dataclass(frozen=True)
class ParallelFlags:
    """The flags of an engine's sizes, each by all of its names. within_tensor: with this flag data-parallel replicas
    live on the ranks of the tensor-parallel group, and take no GPUs of their own."""

    tensor: tuple[str, ...] = ()
    pipeline: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    within_tensor: str | None = None


@dataclass(frozen=True)
class MemoryFlags:
    """fraction: the flag of the engine's part of a GPU's memory; None: it has none. of_free: that part is of what is
    free when it starts, not of the whole. kv_cache: a flag with which it does not measure at its start how much is left
    for its KV cache; kv_cache_depends: others that change how large that has to be. sleep: flags with which it can
    sleep; (): it cannot. keep_weights: further flags, for a sleep that keeps the weights in the host's memory."""

    fraction: str | None = None
    of_free: bool = False
    kv_cache: str | None = None
    kv_cache_depends: tuple[str, ...] = ()
    sleep: tuple[str, ...] = ()
    keep_weights: tuple[str, ...] = ()


@dataclass(frozen=True)
class Installation:
    """module: what must be importable in the engine's Python. packages: the distributions of which one brings it;
    extra: rltool's own, which installs it. note, cpu_fix, apart: as in rltool.doctor.Need, where {newest} in apart is
    the newest version that rltool knows. loads_rltool: it loads rltool's plugin, which must be of this version
    there."""

    module: str
    packages: tuple[str, ...]
    extra: str = ""
    note: str = ""
    cpu_fix: str = ""
    apart: tuple[str, str] | None = None
    loads_rltool: bool = False


@runtime_checkable
class Launches(Protocol):
    """An engine that rltool starts."""

    temporary_in: str
    """The variable by which a server learns where to put its sockets."""
    worker_title: str = ""
    """How it titles the processes that generate (setproctitle), from its beginning; "": as any other."""
    installation: Installation
    parallel: ParallelFlags = ParallelFlags()
    memory: MemoryFlags = MemoryFlags()
    tokenizer_flags: tuple[str, ...] = ()
    """Beginnings of flags with which the tokenizer is elsewhere than in the model's directory, or not wanted."""
    quantizes: bool = False
    """Whether it quantises the weights that it loads (EngineLaunch.quantization), or reads them in FP8."""
    biased_heads: tuple[str, ...] = ()
    """Classifiers, by architecture, whose head it gives a bias that their checkpoints may lack."""

    def argv(self, launch: EngineLaunch) -> list[str]: ...

    def environment(self, launch: EngineLaunch) -> dict[str, str]: ...

    def max_logprobs(self, flags: Sequence[str]) -> float:
        """How many tokens a server with these flags gives the log-probabilities of in one place; inf: all. Raises
        UsageError for a value that is no number."""
        return math.inf

    def takes_rendezvous_port(self, flags: Sequence[str], replicas: int) -> bool:
        """Whether its command line is to name the port of torch.distributed's store (EngineLaunch.rendezvous_port).
        flags: the user's. replicas: data-parallel size outside of the tensor-parallel ranks."""
        return False

    def no_adapters(self, device: Device) -> str | None:
        """Why it takes no adapters there; None: it does."""
        return None

    def no_fp8(self, device: Device, model: Path) -> str | None:
        """Why it does not serve this model in FP8 that a trainer sends, on this device; None: it does."""
        return "that is implemented for vLLM and SGLang"

    def no_fp8_after_sleep(self, backend: str | None) -> str | None:
        """Why one that sleeps between two syncs cannot be sent FP8 over `backend` of rltool.weights.transport, of which
        None is unknown; None: it can. No sentence without the engine's name before it."""
        return None

    def not_exact(self, device: Device, model: Path) -> str | None:
        """Why the trainer cannot compute with its kernels (algorithm.exact), on this device; None: it can."""
        return "that is implemented for vLLM"

    def no_routed_experts(self, device: Device) -> str | None:
        """Why it cannot return the experts that its router chose, on this device; None: it can."""
        return "it has no such flag; use another engine"

    def too_long(self, launch: EngineLaunch, model_config: Mapping[str, Any]) -> str | None:
        """Why it will refuse launch.max_model_len, by the model's config.json; None where it will not, or cannot be
        known to."""
        return None
