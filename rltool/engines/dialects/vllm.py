"""The vLLM dialect (0.32, 0.33): token ids in and out over /inference/v1/generate, and vLLM's routes for reinforcement
learning.

Sources: vllm/entrypoints/scale_out/token_in_token_out, vllm/entrypoints/rl/online. The command line is in
vllm_launch.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rltool.engines.dialects.inspection import VllmInspection
from rltool.engines.dialects.protocol import (
    MEMORY_TAGS,
    Adapts,
    Controls,
    Feature,
    Generates,
    MemoryTag,
    PauseMode,
    SleepLevel,
    Versions,
    check_expansion,
    in_waking_order,
)
from rltool.engines.dialects.routed_experts import from_npy
from rltool.engines.dialects.sampling_mask import find_mask, logprobs_of
from rltool.engines.dialects.vllm_launch import MAX_N_PER_REQUEST, VllmLaunching
from rltool.engines.plugin import routes, sglang_api
from rltool.engines.replies import failure_within
from rltool.engines.types import (
    SEED_MODULUS,
    Completion,
    Drafts,
    EngineCounters,
    EngineInfo,
    EngineLoad,
    GenerateRequest,
    HttpRequest,
    Lease,
    Tally,
    TokenStream,
    VersionSpan,
    json_list,
    json_object,
)
from rltool.errors import EngineError, MissingLogprobs, UsageError

GENERATE_PATH = sglang_api.VLLM_PATH
ABORT_PATH = routes.ABORT_PATH
"""Not /abort_requests, vLLM's route for reinforcement learning: given an empty list, that one aborts every client's
requests."""
REQUEST_ID_PREFIX = "generate-tokens-"
"""What vLLM puts before the request_id of a body (ServingTokens.serve_tokens): the id that an abort must name."""
LOAD_METRICS = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
"""v1/metrics/loggers.py. They are set after every step of the scheduler, so those of a paused engine stand still. Each
of the n samples of a request counts for itself."""

PREFIX_CACHE_METRICS = ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")
"""v1/metrics/loggers.py, in tokens."""
SPECULATION_METRICS = ("vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_draft_tokens_total")
"""v1/spec_decode/metrics.py; only there where the server speculates."""


class VllmDialect(VllmInspection, VllmLaunching, Adapts, Controls, Generates):
    """See rltool.engines.dialects.protocol."""

    name = "vllm"
    label = "vLLM"
    versions = Versions(
        oldest=(0, 29), newest=(0, 33), exact=(0, 32),
        since={Feature.VERSION_SPANS: (0, 32), Feature.VERSION_OF_REPLY: (0, 32)},
    )  # fmt: skip
    detected_by = ("/version", "version")
    with_plugin = "rltool.engines.dialects.vllm_arrays:ArrayVllmDialect"
    pairing = "in_turn"
    sampling_masks = True
    health_reports_death = True
    generate_path = GENERATE_PATH

    # -- generation

    def generate(self, request: GenerateRequest) -> list[HttpRequest]:
        return [self._generate_chunk(request, start, count) for start, count in sample_chunks(request)]

    def _generate_chunk(self, request: GenerateRequest, start: int, count: int) -> HttpRequest:
        sampling = request.sampling
        parameters: dict[str, Any] = {
            "n": count,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": sampling.ignore_eos,
            # 0: the sampled token's own, no alternatives
            "logprobs": logprobs_of(sampling.top_k) if sampling.return_sampling_mask else 0,
            "detokenize": False,
        }
        if sampling.stop:
            parameters |= {"stop": list(sampling.stop), "detokenize": True}
        if sampling.min_tokens:
            parameters["min_tokens"] = sampling.min_tokens
        if request.seed is not None:
            # vLLM seeds sample i of a request with seed + i (v1/engine/parallel_sampling.py).
            parameters["seed"] = (request.seed + start) % SEED_MODULUS
        body = {
            "request_id": _request_id(request, start),
            "token_ids": list(request.prompt_ids),
            "sampling_params": parameters,
        }
        if request.adapter:
            body["model"] = request.adapter
        if request.pictures:
            parts = [{"type": "image_url", "url": picture.url} for picture in request.pictures]
            body |= {"token_ids": request.unexpanded, "content_parts": parts, "return_token_ids": True}
        return HttpRequest("POST", self.generate_path, body)

    def stream(self, request: GenerateRequest) -> HttpRequest | None:
        if request.n > 1 or request.routing is not None or request.sampling.return_sampling_mask:
            return None
        http = self._generate_chunk(request, 0, 1)
        return replace(http, body=http.body | {"stream": True})

    def parse_event(self, request: GenerateRequest, event: Any, so_far: TokenStream) -> Completion:
        if "error" in event:
            raise failure_within(self.generate_path, event["error"], begun=bool(so_far.token_ids))
        if not so_far.token_ids:
            check_expansion(request, event.get("prompt_token_ids"))
        [choice] = event["choices"]
        choice = choice | {"finish_reason": choice.get("finish_reason") or "abort"}
        # A server with an earlier plugin streams in vLLM's own form.
        of_plugin = isinstance(choice["token_ids"], str)
        return self.parse_choice(choice, False) if of_plugin else parse_choice(choice, False)

    def request_ids(self, request: GenerateRequest) -> list[str]:
        return [_request_id(request, start) for start, _ in sample_chunks(request)]

    def parse_generate(self, request: GenerateRequest, replies: list[Any]) -> list[Completion]:
        completions: list[Completion] = []
        for (_, count), reply in zip(sample_chunks(request), replies, strict=True):
            choices = json_list(json_object(reply).get("choices"))
            if choices is None or len(choices) != count:
                found = "no" if choices is None else len(choices)
                raise EngineError(f"{self.generate_path} returned {found} choices where {count} samples were asked for")
            check_expansion(request, reply.get("prompt_token_ids"))
            for choice in sorted(choices, key=lambda choice: choice["index"]):
                completion = self.parse_choice(choice, request.sampling.return_sampling_mask)
                completion = replace(completion, cached_tokens=_cached_tokens(reply), drafts=_drafts(choice, reply))
                completions.append(with_routed_experts(completion, choice, request))
        return completions

    def parse_choice(self, choice: Mapping[str, Any], with_mask: bool) -> Completion:
        return parse_choice(choice, with_mask)

    # -- probing

    def probe(self) -> Mapping[str, HttpRequest]:
        return {
            "version": HttpRequest("GET", "/version"),
            "models": HttpRequest("GET", "/v1/models"),
            "world_size?": HttpRequest("GET", "/get_world_size"),
            "weights?": HttpRequest("GET", "/weight_info"),
            "paused?": HttpRequest("GET", "/is_paused"),
            "plugin?": HttpRequest("GET", "/rltool/info"),
            "server?": HttpRequest("GET", "/server_info", query={"config_format": "json"}),
        }

    def parse_probe(self, replies: Mapping[str, Any]) -> EngineInfo:
        if replies["world_size?"] is None or replies["weights?"] is None:
            raise EngineError(
                "this vLLM server does not offer its control routes (/get_world_size, /weight_info): start it with "
                "`rltool serve-engines`, or with VLLM_SERVER_DEV_MODE=1 in its environment"
            )
        models = replies["models"]["data"]
        if not models:
            raise EngineError("this vLLM server lists no model under /v1/models")
        # A LoRA adapter is listed as a further model with a parent: the first one is the base model.
        model = models[0]
        plugin = replies["plugin?"]
        facts = plugin if plugin is not None else _facts_of_stock_server(replies["server?"])
        config = json_object(facts.get("model_config"))
        return EngineInfo(
            dialect=self.name,
            engine_version=replies["version"]["version"],
            model_id=model["id"],
            world_size=replies["world_size?"]["world_size"],
            max_model_len=model.get("max_model_len"),
            vocab_size=facts.get("vocab_size"),
            dtype=facts.get("dtype"),
            weight_backend=facts.get("weight_backend"),
            weight_version=replies["weights?"]["weight_version"],
            boot_id=facts.get("boot_id"),
            plugin=plugin is not None,
            device=facts.get("device"),
            paused=json_object(replies["paused?"]).get("is_paused"),
            lease=Lease.from_json(facts.get("lease")),
            model_config=config,
            model_path=model.get("root"),
            sleep_levels=(1, 2) if facts.get("sleep_mode") else (),
            max_logprobs=facts.get("max_logprobs"),
            task=facts.get("task"),
            routed_experts=facts.get("routed_experts"),
            exact=facts.get("exact"),
            plugin_protocol=facts.get("plugin_protocol"),
            lora_rank=facts.get("lora_rank"),
            lora_slots=facts.get("lora_slots"),
        )

    def health(self) -> HttpRequest:
        return HttpRequest("GET", "/health")

    def load(self) -> HttpRequest:
        return HttpRequest("GET", "/metrics")

    def parse_load(self, reply: Any) -> EngineLoad:
        running, waiting, usage = (_gauge(reply, name) for name in LOAD_METRICS)
        return EngineLoad(running=round(sum(running)), waiting=round(sum(waiting)), kv_cache_usage=max(usage))

    def counters(self) -> HttpRequest:
        return self.load()

    def parse_counters(self, reply: Any) -> EngineCounters:
        return EngineCounters(_tally(reply, *PREFIX_CACHE_METRICS), _tally(reply, *SPECULATION_METRICS))

    # -- control plane

    def pause(self, mode: PauseMode) -> list[HttpRequest]:
        return [HttpRequest("POST", "/pause", query={"mode": mode})]

    def resume(self) -> list[HttpRequest]:
        return [HttpRequest("POST", "/resume")]

    def abort(self, request_ids: Sequence[str]) -> list[HttpRequest]:
        """One request. An id stands for all n samples of its request, whether it came by GENERATE_PATH or by the
        plugin's /generate.

        vLLM answers before it has aborted (a task of the server does it), and unknown ids change nothing.
        """
        if not request_ids:
            return []
        return [
            HttpRequest(
                "POST", ABORT_PATH, {"request_ids": [REQUEST_ID_PREFIX + request_id for request_id in request_ids]}
            )
        ]

    def sleep(self, level: SleepLevel, tags: Sequence[MemoryTag] = MEMORY_TAGS) -> list[HttpRequest]:
        """The cache alone goes by a route of its own (since 0.32), which wants an engine that is paused."""
        match in_waking_order(tags):
            case ["kv_cache"]:
                return [*self.pause("abort"), HttpRequest("POST", "/release_kv_cache_memory")]
            case ["weights"]:
                raise UsageError("vLLM frees its weights only together with its KV cache: name both tags")
            case _:
                pass
        return [HttpRequest("POST", "/sleep", query={"level": str(level), "mode": "abort"})]

    def wake(self, tags: Sequence[MemoryTag] = MEMORY_TAGS) -> list[HttpRequest]:
        """The one that completes its memory resumes the scheduler as well (v1/engine/core.py, wake_up)."""
        return [HttpRequest("POST", "/wake_up", query={"tags": tag}) for tag in in_waking_order(tags)]

    def reload(self, model: str | None) -> list[HttpRequest]:
        return [HttpRequest("POST", "/collective_rpc", {"method": "reload_weights"})]

    def not_sent_fp8(self, info: EngineInfo, backend: str | None, *, sleeps: bool) -> str | None:
        if info.weight_backend != "rltool":
            return "takes FP8 through rltool's plugin alone: start it with --weight-backend rltool"
        return None

    def leave_transfer(self, group: str) -> list[HttpRequest]:
        return [HttpRequest("POST", "/shutdown_weight_transfer_engine")]

    # -- adapters

    def load_adapter(self, name: str, directory: str) -> HttpRequest:
        return HttpRequest("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": directory})

    def unload_adapter(self, name: str) -> HttpRequest:
        """Requests that run with it go on with it: the workers keep it until its place is needed."""
        return HttpRequest("POST", "/v1/unload_lora_adapter", {"lora_name": name}, tolerate=(404,))

    def no_expert_adapters(self, info: EngineInfo) -> str | None:
        """On a CPU it has no kernel for them; rltool's plugin has (rltool.engines.plugin.patches)."""
        if info.device == "cpu" and not info.plugin:
            return "has no kernel for them on a CPU: start it with `rltool serve-engines --lora-rank`"
        return None


def with_routed_experts(completion: Completion, choice: Mapping[str, Any], request: GenerateRequest) -> Completion:
    """With those of its entry of `choices`, where they were asked for. EngineError where they are missing or wrong."""
    if request.routing is None or completion.finish_reason == "abort":
        return completion
    tokens = len(request.prompt_ids) + len(completion.token_ids) - 1
    return replace(completion, routed_experts=from_npy(choice.get("routed_experts"), request.routing, tokens=tokens))


def parse_choice(choice: Mapping[str, Any], with_mask: bool = False) -> Completion:
    """One entry of `choices`, with_mask: with its sampling mask. Raises MissingLogprobs also where vLLM's stand-in for
    a missing value is found."""
    token_ids = tuple(choice.get("token_ids") or ())
    content: Sequence[Any] = json_object(choice.get("logprobs")).get("content") or ()
    reason = choice.get("finish_reason")
    if reason not in ("stop", "length", "abort"):
        raise EngineError(f"{GENERATE_PATH} ended a sample with finish_reason {reason!r}")
    for position, (token_id, entry) in enumerate(zip(token_ids, content, strict=False)):
        if entry["token_id"] != token_id:
            raise EngineError(
                f"log-probability {position} is that of token {entry['token_id']}, the sampled token is {token_id}"
            )
        if entry["logprob"] is not None and entry["logprob"] <= sglang_api.MISSING_LOGPROB:
            raise MissingLogprobs(
                f"vLLM has no finite log-probability for sampled token {position} (it sent {entry['logprob']})"
            )
    spans = tuple(VersionSpan(s["version"], s["start"], s["end"]) for s in choice.get("weight_versions") or ())
    mask = None
    if with_mask and len(content) == len(token_ids):
        best = [[(found["token_id"], found["logprob"]) for found in entry["top_logprobs"]] for entry in content]
        mask = find_mask(best).checked()
    return Completion(token_ids, tuple(entry["logprob"] for entry in content), reason, spans, mask)


def _cached_tokens(reply: Mapping[str, Any]) -> int | None:
    """With several samples of a prompt, vLLM reports the counts of the one that ended last."""
    details = json_object(json_object(reply.get("usage")).get("prompt_tokens_details"))
    return details.get("cached_tokens") if len(reply["choices"]) == 1 else None


def _drafts(choice: Mapping[str, Any], reply: Mapping[str, Any]) -> Drafts | None:
    """Of a server with --per-request-spec-decode-metrics: the plugin's route has them of each choice, vLLM's own of a
    reply with one."""
    found = choice.get("speculative_decoding") or json_object(reply.get("metrics")).get("speculative_decoding")
    return Drafts(found["num_spec_steps"], found["num_accepted_draft_tokens"]) if found else None


def sample_chunks(request: GenerateRequest) -> Iterator[tuple[int, int]]:
    """(first sample, samples) of each HTTP request: at most MAX_N_PER_REQUEST, and none across the end of the seeds.

    One at temperature 0, where vLLM refuses more.
    """
    start = 0
    while start < request.n:
        count = min(MAX_N_PER_REQUEST if request.sampling.temperature > 0 else 1, request.n - start)
        if request.seed is not None:
            count = min(count, SEED_MODULUS - (request.seed + start) % SEED_MODULUS)
        yield start, count
        start += count


def _values(text: Any, name: str) -> list[float]:
    """The values of a metric in Prometheus' text format, one for each data-parallel engine of the server."""
    lines = text.splitlines() if isinstance(text, str) else ()
    return [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((name + "{", name + " "))]


def _tally(text: Any, hits: str, total: str) -> Tally | None:
    """Over all data-parallel engines; None where the server does not count this."""
    counted = _values(text, total)
    return Tally(sum(_values(text, hits)), sum(counted)) if counted else None


def _gauge(text: Any, name: str) -> list[float]:
    values = _values(text, name)
    if not values:
        raise EngineError(f"/metrics has no {name}: was this vLLM server started with --disable-log-stats?")
    return values


def _request_id(request: GenerateRequest, start: int) -> str:
    return request.request_id if start == 0 else f"{request.request_id}-{start}"


def _facts_of_stock_server(reply: Any) -> dict[str, Any]:
    """What /server_info?config_format=json of an unmodified server (in dev mode) returns; {} where it does not answer.

    The HF config in it is text: the class's name followed by JSON, for pydantic cannot dump it.
    """
    config = json_object(json_object(reply).get("vllm_config"))
    if not config:
        return {}
    model = json_object(config.get("model_config"))
    text = model.get("hf_text_config") or model.get("hf_config") or ""
    hf_config: dict[str, Any] = {}
    if isinstance(text, str) and "{" in text:
        try:
            hf_config = json.loads(text[text.index("{") :])
        except ValueError:
            hf_config = {}  # the text is cut or has changed: then the vocabulary stays unknown, which preflight names
    return {
        "vocab_size": hf_config.get("vocab_size"),
        "dtype": str(model["dtype"]).removeprefix("torch.") if "dtype" in model else None,
        "weight_backend": json_object(config.get("weight_transfer_config")).get("backend"),
        "routed_experts": json_object(config.get("aux_output_config")).get("enable_return_routed_experts"),
        "sleep_mode": model.get("enable_sleep_mode"),
        "max_logprobs": model.get("max_logprobs"),
        "model_config": hf_config,
        **lora_facts(json_object(config.get("lora_config"))),
    }


def lora_facts(lora: Mapping[str, Any]) -> dict[str, Any]:
    """lora: of vLLM's LoRAConfig, {} where adapters are not enabled."""
    slots = [lora[name] for name in ("max_loras", "max_cpu_loras") if lora.get(name)]
    return {"lora_rank": lora.get("max_lora_rank", 0), "lora_slots": min(slots, default=0)}
