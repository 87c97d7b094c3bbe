"""The SGLang dialect (0.5.17 to 0.5.23). Also that of sglang-router, and of vLLM servers with rltool's plugin.

Sources: sglang/srt/entrypoints/http_server.py (routes), managers/io_struct.py (bodies), managers/scheduler.py (pauses),
managers/scheduler_components/weight_updater.py (weight updates), utils/auth.py (which routes the key guards: all but
health).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rltool.engines.dialects.inspection import NO_SUCH_ROUTE, SglangInspection
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
from rltool.engines.dialects.routed_experts import from_int32
from rltool.engines.dialects.sglang_launch import NO_FP8_ON_CPU, NO_LATENT_FP8, SglangLaunching
from rltool.engines.dialects.supported import has
from rltool.engines.replies import failure_within
from rltool.engines.types import (
    SEED_MODULUS,
    Completion,
    Drafts,
    EngineCounters,
    EngineInfo,
    EngineLoad,
    EngineRole,
    GenerateRequest,
    HttpRequest,
    TokenStream,
    VersionSpan,
    json_list,
    json_object,
)
from rltool.errors import EngineError, MissingLogprobs, UsageError

GENERATE_PATH = "/generate"

BOOT_VERSION = re.compile(r"boot-([0-9a-f]{32})")
"""The weight version that our launch line gives a new server. /server_info shows it for as long as the process lives
(supported.Feature.STARTING_VERSION)."""

NOT_READY = 503
"""/ready of a server that is paused."""

IDLE_SECONDS = 30
"""How long the server waits for aborted requests to leave its batch: one forward pass, or the prefill of one long
prompt."""

MEMORY: dict[MemoryTag, tuple[str, ...]] = {"weights": ("weights",), "kv_cache": ("kv_cache", "cuda_graph")}
"""SGLang's own tags. CUDA graphs are of no use without the cache."""

TASKS = {True: "generate", False: "classify"}
"""By is_generation. SGLang does not distinguish classifiers from embedding models."""

ACCEPTED_DRAFTS = ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num")
"""Names of one number in meta_info (_calculate_spec_decoding_metrics), the newest first."""


class SglangDialect(SglangInspection, SglangLaunching, Adapts, Controls, Generates):
    """See rltool.engines.dialects.protocol."""

    name = "sglang"
    label = "SGLang"
    # Probed instead: /ready (0.5.20), /begin_weight_update and /end_weight_update (0.5.21, and mandatory there).
    versions = Versions(
        oldest=(0, 5, 17),
        newest=(0, 5, 23),
        since={
            Feature.VERSION_SPANS: (0, 5, 19),
            Feature.VERSION_OF_REPLY: (0, 5, 17),
            Feature.STARTING_VERSION: (0, 5, 18),
        },
    )
    detected_by = ("/model_info", "model_path")
    with_plugin = "rltool.engines.dialects.routed_vllm:RoutedVllmDialect"
    routable = True
    pairing = "side_by_side"
    replicas_share_seed = True

    # -- generation

    def generate(self, request: GenerateRequest) -> list[HttpRequest]:
        """One HTTP request per sample.

        Not one with n: a seeded server (--enable-deterministic-inference) gives all n samples of a request the one
        seed, so that they come out identical, and sglang-router takes one prompt and one set of parameters. The
        prompt's cache is shared all the same. Without that flag SGLang ignores seeds, and its samples differ by its own
        random state.
        """
        return [self._generate_one(request, index) for index in range(request.n)]

    def _generate_one(self, request: GenerateRequest, index: int) -> HttpRequest:
        sampling = request.sampling
        if sampling.ignore_eos and sampling.stop_token_ids:
            # It would ignore these too (schedule_batch.py, _check_token_based_finish), where vLLM stops at them.
            raise UsageError(
                "SGLang stops at no token at all under ignore_eos: leave out ignore_eos or the stop_token_ids"
            )
        if sampling.return_sampling_mask:
            raise UsageError("SGLang and sglang-router do not return the tokens that top_p and top_k leave")
        # An unknown parameter is a 500 of SGLang, and sglang-router drops what it does not know: only these.
        parameters: dict[str, Any] = {
            "max_new_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": sampling.ignore_eos,
        }
        if sampling.stop:
            parameters["stop"] = list(sampling.stop)
        if sampling.min_tokens:
            parameters["min_new_tokens"] = sampling.min_tokens
        if request.seed is not None:
            parameters["sampling_seed"] = (request.seed + index) % SEED_MODULUS
        body = {
            "rid": _request_id(request, index),
            "input_ids": list(request.prompt_ids),
            "sampling_params": parameters,
            "return_logprob": True,
        }
        if request.routing is not None:
            body["return_routed_experts"] = True
        if request.adapter:
            body["lora_path"] = request.adapter
        if request.pictures:
            # One placeholder is one picture, in token ids as in text (multimodal/processors/base_processor.py,
            # build_input_ids); return_prompt_token_ids has the reply hold what they became (managers/
            # tokenizer_manager.py).
            body |= {
                "input_ids": request.unexpanded,
                "image_data": [picture.url for picture in request.pictures],
                "return_prompt_token_ids": True,
            }
        return HttpRequest("POST", GENERATE_PATH, body)

    def request_ids(self, request: GenerateRequest) -> list[str]:
        return [_request_id(request, index) for index in range(request.n)]

    def parse_generate(self, request: GenerateRequest, replies: list[Any]) -> list[Completion]:
        if len(replies) != request.n:
            raise EngineError(f"{GENERATE_PATH} gave {len(replies)} replies where {request.n} samples were asked for")
        for reply in replies:
            check_expansion(request, _one(reply).get("prompt_token_ids"))
        return [with_routed_experts(parse_reply(reply), reply, request) for reply in replies]

    def stream(self, request: GenerateRequest) -> HttpRequest | None:
        if request.n > 1 or request.routing is not None:
            return None
        [http] = self.generate(request)
        return replace(http, body=http.body | {"stream": True})

    def parse_event(self, request: GenerateRequest, event: Any, so_far: TokenStream) -> Completion:
        """output_ids and output_token_logprobs are those of the whole response so far, or with
        --incremental-streaming-output the new ones; of an abort that comes while it waits, the last once more.
        completion_tokens counts all of them."""
        if "error" in event:
            raise failure_within(GENERATE_PATH, event["error"], begun=bool(so_far.token_ids))
        meta, token_ids, came = event["meta_info"], event["output_ids"], len(so_far.token_ids)
        end: Mapping[str, Any] = meta.get("finish_reason") or {"type": "abort"}
        if (end.get("status_code") or 0) >= 400:
            refused = {"message": end.get("message"), "code": end["status_code"]}
            raise failure_within(GENERATE_PATH, refused, begun=came > 0)
        if not came:
            check_expansion(request, event.get("prompt_token_ids"))
        size = max(meta["completion_tokens"], len(token_ids))
        new, is_whole = size - came, len(token_ids) == size
        if new < 0 or (new and not is_whole and len(token_ids) != new):
            raise EngineError(f"{GENERATE_PATH} sent {len(token_ids)} tokens of {size} behind the first {came}")
        if is_whole and token_ids[:came] != so_far.token_ids:
            raise EngineError(f"{GENERATE_PATH} changed tokens of a stream that it had sent")
        entries: Sequence[Any] = meta.get("output_token_logprobs") or ()
        if len(entries) != len(token_ids) and new:
            raise MissingLogprobs(f"{GENERATE_PATH} sent {len(token_ids)} tokens, {len(entries)} log-probabilities")
        latest = len(token_ids) - new
        spans = _spans(meta, size) if meta.get("finish_reason") else _spans_so_far(meta, size, so_far)
        return _completion(token_ids[latest:], entries[latest:] if new else (), end, spans, meta)

    # -- probing

    def probe(self) -> Mapping[str, HttpRequest]:
        return {
            "model": HttpRequest("GET", "/model_info"),
            "models": HttpRequest("GET", "/v1/models"),
            "server": HttpRequest("GET", "/server_info"),
            "ready": HttpRequest("GET", "/ready", tolerate=(NO_SUCH_ROUTE, NOT_READY)),
        }

    def parse_probe(self, replies: Mapping[str, Any]) -> EngineInfo:
        model, server = json_object(replies["model"]), json_object(replies["server"])
        if not model or "tp_size" not in server:
            raise EngineError("this server's /model_info or /server_info is not SGLang's")
        # With attention data parallelism the replicas live on the ranks of the tensor-parallel group.
        replicas = 1 if server.get("enable_dp_attention") else server["dp_size"]
        models = replies["models"]["data"]
        return EngineInfo(
            dialect=self.name,
            engine_version=server["version"],
            model_id=server["served_model_name"],  # in /model_info, a load from disk replaces it by the directory
            world_size=server["tp_size"] * server["pp_size"] * replicas,
            dp_size=server["dp_size"],
            own_seeds=server.get("enable_deterministic_inference"),
            max_model_len=models[0].get("max_model_len") if models else None,
            vocab_size=None,  # not reported by SGLang
            dtype=server["dtype"] if server["dtype"] != "auto" else None,
            weight_backend="sglang",
            weight_version=model["weight_version"],
            boot_id=_boot_id(server),
            plugin=False,
            device=server.get("device"),
            paused=None if replies["ready"] == NO_SUCH_ROUTE else replies["ready"] == NOT_READY,
            model_config={"model_type": model["model_type"], "architectures": model["architectures"]},
            model_path=server.get("model_path") or model.get("model_path"),  # the latter follows updates from disk
            sleep_levels=_sleep_levels(server),
            role=_role(server),
            bootstrap_port=server.get("disaggregation_bootstrap_port") if _role(server) == "prefill" else None,
            task=TASKS[model["is_generation"]] if "is_generation" in model else None,
            routed_experts=server.get("enable_return_routed_experts"),
            **_lora_facts(server),
        )

    def health(self) -> HttpRequest:
        # Not /health: that generates a token by default, takes a second, and fails while paused.
        # A server before 0.5.20, which has no such route, is alive if it answers.
        return HttpRequest("GET", "/ready", tolerate=(NO_SUCH_ROUTE,))

    def load(self) -> HttpRequest:
        return HttpRequest("GET", "/v1/loads", query={"include": "core"})

    def parse_load(self, reply: Any) -> EngineLoad:
        loads = json_list(json_object(reply).get("loads"))
        if not loads:
            raise EngineError(f"/v1/loads has no data-parallel rank: {json.dumps(reply)[:300]}")
        return EngineLoad(
            running=sum(load["num_running_reqs"] for load in loads),
            waiting=sum(load["num_waiting_reqs"] for load in loads),
            kv_cache_usage=max(load["token_usage"] for load in loads),
        )

    def counters(self) -> HttpRequest:
        return HttpRequest("GET", "/v1/loads", query={"include": "core,spec"})

    def parse_counters(self, reply: Any) -> EngineCounters:
        """Means over data-parallel ranks of gauges: SGLang reports its last batches, not since its start."""
        loads = json_list(json_object(reply).get("loads"))
        if not loads:
            raise EngineError(f"/v1/loads has no data-parallel rank: {json.dumps(reply)[:300]}")
        hit_rates = [float(load["cache_hit_rate"]) for load in loads if "cache_hit_rate" in load]
        speculating = [float(load["speculative"]["accept_rate"]) for load in loads if load.get("speculative")]
        return EngineCounters(
            sum(hit_rates) / len(hit_rates) if hit_rates else None,
            sum(speculating) / len(speculating) if speculating else None,
        )

    # -- control plane

    def pause(self, mode: PauseMode) -> list[HttpRequest]:
        """`keep` is SGLang's "retract": requests keep their tokens and go back to the queue, their keys and values are
        dropped.

        Its "in_place" keeps the cache of the old weights, in flight and in the prefix tree, and then refuses to flush
        it: the tokens after the sync, and whole new samples with a cached prefix, come from a mixture of two policies
        whose log-probabilities no trainer can reproduce.
        """
        if mode == "wait":
            raise UsageError("SGLang cannot pause with mode wait: use keep (requests go on after the sync) or abort")
        if mode == "keep":
            return [HttpRequest("POST", "/pause_generation", {"mode": "retract"})]
        # Aborted requests have been answered when the pause returns, but their last batch may still run: a flush that
        # waits for it makes sure that nothing of it is left in the cache, and that the one after the update is not
        # refused.
        return [
            HttpRequest("POST", "/pause_generation", {"mode": "abort"}),
            HttpRequest("POST", "/flush_cache", query={"timeout": str(IDLE_SECONDS)}),
        ]

    def resume(self) -> list[HttpRequest]:
        return [HttpRequest("POST", "/continue_generation", {})]

    def abort(self, request_ids: Sequence[str]) -> list[HttpRequest]:
        """One request per id: the route takes one. Its front end knows whole ids alone, its scheduler matches by
        prefix.

        A request that came while the engine was paused is held back by the front end, which does not know its id before
        the engine is resumed: abort it again then. (One that was running when the pause came is ended at once.) An
        empty id is refused here, for it is a prefix of every id.
        """
        if "" in request_ids:
            raise ValueError("an empty request id would abort every client's requests")
        return [HttpRequest("POST", "/abort_request", {"rid": request_id}) for request_id in request_ids]

    def sleep(self, level: SleepLevel, tags: Sequence[MemoryTag] = MEMORY_TAGS) -> list[HttpRequest]:
        """Its scheduler dies where it is not idle, hence the pause. No request sets the level: a server keeps the
        weights if it was started with --enable-weights-cpu-backup."""
        release = HttpRequest("POST", "/release_memory_occupation", {"tags": _memory_of(tags)})
        return [*self.pause("abort"), release]

    def wake(self, tags: Sequence[MemoryTag] = MEMORY_TAGS) -> list[HttpRequest]:
        """Its scheduler dies of a tag that does not sleep."""
        again = [HttpRequest("POST", "/resume_memory_occupation", {"tags": _memory_of(tags)})]
        return [*again, *self.resume()] if "kv_cache" in tags else again

    def reload(self, model: str | None) -> list[HttpRequest]:
        """The cache, which a flush would touch, is still asleep, and has nothing of older weights when it wakes."""
        if model is None:
            raise UsageError("this SGLang server does not report where it read its model, so it cannot load it again")
        body = {"model_path": model, "load_format": "auto", "flush_cache": False}
        return [HttpRequest("POST", "/update_weights_from_disk", body)]

    def load_adapter(self, name: str, directory: str) -> HttpRequest:
        return HttpRequest("POST", "/load_lora_adapter", {"lora_name": name, "lora_path": directory})

    def unload_adapter(self, name: str) -> HttpRequest:
        """Answered when the requests that run with it have ended."""
        return HttpRequest("POST", "/unload_lora_adapter", {"lora_name": name}, tolerate=(400,))

    def no_expert_adapters(self, info: EngineInfo) -> str | None:
        return "is of SGLang, which was not seen to sample with them: use vLLM"

    def not_sent_fp8(self, info: EngineInfo, backend: str | None, *, sleeps: bool) -> str | None:
        """Buckets of all transports are bytes. What is left of Fp8LinearMethod and BaseKVCacheMethod
        (srt/layers/quantization) when weights are loaded again decides."""
        if info.device == "cpu":
            return f"cannot be sent FP8: {NO_FP8_ON_CPU}"
        if info.model_config.get("kv_lora_rank") is not None:
            return f"serves latent attention in FP8: {NO_LATENT_FP8}"
        return self.no_fp8_after_sleep(backend) if sleeps else None

    def leave_transfer(self, group: str) -> list[HttpRequest]:
        """An update that a failed sync left open is closed: every later one would be refused.

        SGLang answers 400 where there is no such group or no open update. Both may well be so. With data parallelism it
        has no groups: an assertion of its own, which is a 500.
        """
        return [
            HttpRequest("POST", "/destroy_weights_update_group", {"group_name": group}, tolerate=(400, 500)),
            HttpRequest("POST", "/end_weight_update", {}, tolerate=(400, NO_SUCH_ROUTE)),
        ]


def parse_reply(reply: Any) -> Completion:
    """One sample of /generate. Raises EngineError for another shape, MissingLogprobs for a missing log-probability."""
    sample = _one(reply)
    meta = json_object(sample.get("meta_info"))
    if not meta or "output_ids" not in sample:
        raise EngineError(f"{GENERATE_PATH} replied without output_ids and meta_info: {json.dumps(reply)[:300]}")
    token_ids = sample["output_ids"]
    entries: Sequence[Any] = meta.get("output_token_logprobs") or ()
    end = json_object(meta.get("finish_reason"))
    return _completion(token_ids, entries, end, _spans(meta, len(token_ids)), meta)


def _completion(
    token_ids: Sequence[int], entries: Sequence[Any], end: Mapping[str, Any], spans: tuple[VersionSpan, ...],
    meta: Mapping[str, Any],
) -> Completion:  # fmt: skip
    """entries: (log-probability, token, text) of each; end: the finish_reason."""
    reason = end.get("type")
    if reason not in ("stop", "length", "abort"):
        raise EngineError(f"{GENERATE_PATH} ended a sample with finish_reason {dict(end)!r}")
    for position, (token_id, entry) in enumerate(zip(token_ids, entries, strict=False)):
        if entry[1] != token_id:
            raise EngineError(
                f"log-probability {position} is that of token {entry[1]}, the sampled token is {token_id}"
            )
    return Completion(
        tuple(token_ids), tuple(entry[0] for entry in entries), reason, spans, cached_tokens=meta.get("cached_tokens"),
        drafts=_drafts(meta),
    )  # fmt: skip


def _one(reply: Any) -> Mapping[str, Any]:
    each = json_list(reply)
    return json_object(each[0] if each is not None and len(each) == 1 else reply)


def with_routed_experts(completion: Completion, reply: Any, request: GenerateRequest) -> Completion:
    """With those of its reply, where they were asked for. EngineError where they are missing or wrong."""
    if request.routing is None or completion.finish_reason == "abort":
        return completion
    each = json_list(reply)
    meta = (reply if each is None else each[0])["meta_info"]
    tokens = len(request.prompt_ids) + len(completion.token_ids) - 1
    return replace(completion, routed_experts=from_int32(meta.get("routed_experts"), request.routing, tokens=tokens))


def _request_id(request: GenerateRequest, index: int) -> str:
    """/abort_request matches by prefix: with a suffix of fixed length, "...-0001" is no prefix of another sample's
    id."""
    return request.request_id if request.n == 1 else f"{request.request_id}-{index:04d}"


def _drafts(meta: Mapping[str, Any]) -> Drafts | None:
    accepted = next((meta[name] for name in ACCEPTED_DRAFTS if name in meta), None)
    return Drafts(meta["spec_verify_ct"], accepted) if accepted is not None else None


def _spans(meta: Mapping[str, Any], length: int) -> tuple[VersionSpan, ...]:
    spans = meta.get("weight_versions")
    if spans:
        return tuple(VersionSpan(span["version"], span["start"], span["end"]) for span in spans)
    version = meta.get("weight_version")
    return (VersionSpan(version, 0, length),) if version is not None and length else ()


def _spans_so_far(meta: Mapping[str, Any], size: int, so_far: TokenStream) -> tuple[VersionSpan, ...]:
    """Of a response that goes on. SGLang has spans of its whole alone, and says which weights it has now: those are the
    tokens' as long as it has said nothing else. After a weight update some of them may have waited for their way here,
    and their weights are not known until the end."""
    if meta.get("weight_versions"):
        return _spans(meta, size)
    version, came = meta.get("weight_version"), len(so_far.token_ids)
    is_first_still = not came or so_far.versions == (VersionSpan(str(version), 0, came),)
    return (VersionSpan(version, 0, size),) if version is not None and size and is_first_still else ()


def _memory_of(tags: Sequence[MemoryTag]) -> list[str]:
    return [name for tag in in_waking_order(tags) for name in MEMORY[tag]]


def _sleep_levels(server: Mapping[str, Any]) -> tuple[SleepLevel, ...]:
    """Without its memory saver the server accepts a sleep and frees nothing."""
    if not server.get("enable_memory_saver"):
        return ()
    return (1,) if server.get("enable_weights_cpu_backup") else (2,)


def _role(server: Mapping[str, Any]) -> EngineRole | None:
    mode = server.get("disaggregation_mode")
    return mode if mode in ("prefill", "decode") else None


def _lora_facts(server: Mapping[str, Any]) -> dict[str, Any]:
    if not server.get("enable_lora"):
        return {"lora_rank": 0, "lora_slots": 0}
    slots = [server[name] for name in ("max_loras_per_batch", "max_loaded_loras") if server.get(name)]
    return {"lora_rank": server.get("max_lora_rank") or 0, "lora_slots": min(slots, default=0)}


def _boot_id(server: Mapping[str, Any]) -> str | None:
    """The id that our launch line gave, else a fingerprint of how long each part of the start took, to the
    nanosecond.

    0.5.17 shows the present weight version in place of that of its start: there the id of the launch line would be
    gone after the first sync, and the server would pass for another one.
    """
    keeps_first = has("sglang", server["version"], Feature.STARTING_VERSION)
    ours = BOOT_VERSION.fullmatch(server.get("weight_version") or "") if keeps_first else None
    if ours:
        return ours[1]
    timings = server.get("startup_time")
    return hashlib.sha256(json.dumps(timings, sort_keys=True).encode()).hexdigest()[:32] if timings else None
