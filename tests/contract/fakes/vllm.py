"""A fake vLLM 0.32 with rltool's plugin (or without it): the routes, statuses and reply shapes that rltool uses.

tests/e2e/test_vllm_server.py runs `tests/contract/vllm_contract.py` on the real server, test_fake_vllm.py on this one,
so that they cannot drift apart.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import itertools
import json
import math
import time
import uuid
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

from aiohttp import web

from rltool.engines import arrays
from rltool.engines.dialects.protocol import MEMORY_TAGS
from rltool.engines.dialects.sampling_mask import find_mask
from rltool.engines.plugin import sglang_api
from rltool.engines.plugin.adapters import DROP_PATH, PUBLISH_PATH
from rltool.engines.plugin.guard import CONTROL_ROUTES, Decision, GuardPolicy
from rltool.engines.plugin.info import PLUGIN_PROTOCOL
from rltool.engines.plugin.lease import LEASE_PATH, LeaseTable, answer, refused
from rltool.engines.plugin.prefetch import Prefetcher
from rltool.engines.plugin.routes import FINISH_PATH, PREFETCH_PATH, UPDATE_PATH, prefetch
from rltool.engines.plugin.sharded import Info, ShardedChannel, open_shards
from rltool.engines.plugin.worker import WeightUpdateRecovery
from rltool.engines.transfer import wire
from rltool.engines.transfer.shards import Box
from rltool.engines.types import Bucket, Routing, TensorMeta
from rltool.errors import EngineError
from tests.contract.fakes import experts, ipc
from tests.contract.fakes.generation import Batch, version_spans
from tests.contract.fakes.nccl_engines import StockVllmTransfer, Workers
from tests.contract.fakes.server import FakeServer, Handler, Recorded

CACHE_BLOCK = 16
END_TOKEN = 1


class FakeVllm(FakeServer):
    """Knobs are attributes, to be set at any time.

    model_id, vocab_size, dtype, world_size, max_model_len, max_num_seqs, engine_version, plugin_protocol: what probes
    find. plugin: False is a stock server in development mode, which has no /generate, /rltool/info or boot id, and as
    0.33 refuses what comes while it is paused.
    missing_logprobs: replies without them; wrong_count: one choice too few; sentinel_logprob: vLLM's stand-in for a
    missing value. role: that of its endpoint; kv_connector: it keeps KV caches for others; fetched: where those that it
    was told to fetch lie. routing: of a mixture of experts whose choices it returns (--enable-return-routed-experts).
    logprob_shift: what it adds to the log-probabilities of given tokens; those are taken for samples after a prompt of
    `scored_after`. hours_later: what its leases take the time to be. sleep_mode: what it says of itself; asleep: the
    tags of the memory that it has given back. task: "classify" is a pooling server of a model with num_labels.
    accept_versions: False makes the engine keep its old version label, as one does whose transfer went nowhere.
    seconds: what a response of max_tokens takes, token by token; 0: no time. batch.slots: how many samples run at once,
    the others wait. Tokens are a hash of (prompt, seed, position), log-probabilities of (token, position), so they do
    not depend on anything else.
    """

    def __init__(self, *, key: str | None = None, plugin: bool = True) -> None:
        super().__init__(key=key)
        self.plugin = plugin
        self.model_id = "policy"
        self.vocab_size = 120
        self.dtype = "float32"
        self.device = "cpu"
        self.world_size = 1
        self.max_model_len = 256
        self.exact = False
        self.max_num_seqs = 64
        self.engine_version = "0.32.0"
        self.refuses_new = False
        self.weight_backend = "rltool" if plugin else "nccl"
        self.missing_logprobs = False
        self.wrong_count = False
        self.sentinel_logprob = False
        self.role = "regular"
        self.kv_connector = False
        self.fetched: list[dict[str, Any]] = []
        self.scored_after = 8
        self.routing: Routing | None = None
        self.plugin_protocol: int | None = PLUGIN_PROTOCOL
        self.logprob_shift = 0.0
        self.max_logprobs = 20
        self.raw_logprobs = False
        self.accept_versions = True
        self.seconds = 0.0
        self.hours_later = 0
        self.sleep_mode = True
        self.task = "generate"
        self.num_labels = 1
        self.lora_rank, self.lora_slots = 0, 0
        self.gpu_workers: list[ipc.Worker] = []  # processes that take weights by IPC
        self._policy = GuardPolicy(key) if key else None
        self.forget()

    def forget(self) -> None:
        """The state of a process that has just started: call it between `die` and `start` for a revived engine."""
        self.boot_id = uuid.uuid4().hex
        self.leases = LeaseTable(lambda: time.monotonic() + self.hours_later * 3600)
        self.batch = Batch("default")
        self._planned: dict[str, list[int]] = {}  # of requests that stream, until their first event
        self._prompts: set[tuple[Any, ...]] = set()  # computed before, each behind the version that did
        self.tensors: dict[str, Any] = {}
        self.of_ranks: list[dict[str, Any]] = [{}]  # what a tensor-parallel rank holds in place of `tensors`
        self.transport: str | None = None
        self.worker = WeightUpdateRecovery()
        self.worker.weight_transfer_engine = self
        self.prefetcher = Prefetcher(pin=False)
        self.updating = False
        self.changed = False
        self.asleep: frozenset[str] = frozenset()
        self._group = None
        self.native = StockVllmTransfer(self.world_size)
        self.sampled_with: list[str | None] = []  # the models that requests named
        self.busy_adapters: set[str] = set()  # that the plugin does not drop
        self.peft: Any = None
        self.adapters: dict[str, Any] = {}  # by name: the directory, or the tensors of the plugin's route

    @property
    def version(self) -> str:
        return self.batch.state

    @version.setter
    def version(self, version: str) -> None:
        self.batch.note(version)

    @property
    def gpus(self) -> tuple[str, ...]:
        """UUIDs."""
        return tuple(worker.gpu for worker in self.gpu_workers)

    @property
    def workers(self) -> Workers | None:
        """Of its NCCL group."""
        return self._group if self.plugin else self.native.workers

    @property
    def paused(self) -> bool:
        return self.batch.paused

    def wait_in_flight(self, samples: int) -> None:
        """From a test: until so many samples have tokens and want more."""
        self.batch.wait_running(samples)

    def authorised(self, recorded: Recorded) -> bool:
        if self._policy is None:
            return True
        return self._policy.decide(recorded.method, recorded.path, recorded.authorization) is not Decision.UNAUTHORIZED

    async def handle(self, recorded: Recorded) -> web.Response:
        if (
            self._policy
            and self._policy.decide(recorded.method, recorded.path, recorded.authorization) is Decision.NOT_FOUND
        ):
            return web.json_response({"error": "not available"}, status=404)
        handler = self._routes().get((recorded.method, recorded.path))
        if handler is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        if (recorded.method, recorded.path) in CONTROL_ROUTES:
            refusal = refused(self.leases, recorded.run)
            if refusal is not None:
                return web.json_response(refusal, status=409)
        return await handler(recorded)

    def _routes(self) -> dict[tuple[str, str], Handler]:
        routes = {
            ("GET", "/health"): self._health,
            ("GET", "/version"): self._version,
            ("GET", "/v1/models"): self._models,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/get_world_size"): self._world_size,
            ("GET", "/weight_info"): self._weight_info,
            ("POST", "/v1/load_lora_adapter"): self._load_adapter,
            ("POST", "/v1/unload_lora_adapter"): self._unload_adapter,
            ("GET", "/is_paused"): self._is_paused,
            ("POST", "/inference/v1/generate"): self._generate,
            ("POST", "/inference/v1/abort_requests"): self._abort_requests,
            ("POST", "/pause"): self._pause,
            ("POST", "/resume"): self._resume,
            ("POST", "/reset_prefix_cache"): self._reset_prefix_cache,
            ("POST", "/reset_encoder_cache"): self._reset_encoder_cache,
            ("POST", "/sleep"): self._sleep,
            ("POST", "/release_kv_cache_memory"): self._release_cache,
            ("POST", "/wake_up"): self._wake_up,
            ("POST", "/init_weight_transfer_engine"): self._init_transfer,
            ("POST", "/start_weight_update"): self._start_update,
            ("POST", "/update_weights"): self._update,
            ("POST", "/finish_weight_update"): self._finish_update,
            ("POST", "/shutdown_weight_transfer_engine"): self._shutdown_transfer,
        }
        if self.plugin:
            routes |= {
                ("POST", PREFETCH_PATH): self._prefetch,
                ("POST", PUBLISH_PATH): self._publish_adapter,
                ("POST", DROP_PATH): self._drop_adapter,
                ("POST", UPDATE_PATH): self._pause_and_update,
                ("POST", FINISH_PATH): self._finish_and_reset,
                ("GET", "/rltool/info"): self._info,
                ("GET", "/rltool/checksums"): self._checksums,
                ("POST", "/rltool/reload_weights"): self._reload,
                ("POST", LEASE_PATH): self._lease,
                ("POST", "/generate"): self._sglang_generate,
                ("POST", "/rltool/generate"): self._generate_arrays,
                ("GET", "/server_info"): self._sglang_server_info,
                ("GET", "/model_info"): self._sglang_model_info,
            }
        else:
            routes[("GET", "/server_info")] = self._stock_server_info
            routes |= {("POST", path): self._native for path in self._native_steps()}
            routes[("POST", "/weight_checker")] = self._checksums
        if self.task == "classify":
            routes = {route: handler for route, handler in routes.items() if not route[1].endswith("/generate")}
            routes[("POST", "/classify")] = self._classify
        return routes

    # -- facts

    async def _health(self, _) -> web.Response:
        return web.Response()

    async def _version(self, _) -> web.Response:
        return web.json_response({"version": self.engine_version})

    async def _models(self, _) -> web.Response:
        model = {
            "id": self.model_id,
            "object": "model",
            "root": "/models/fake",
            "parent": None,
            "max_model_len": self.max_model_len,
        }
        adapters = [model | {"id": name, "parent": self.model_id} for name in self.adapters]
        return web.json_response({"object": "list", "data": [model, *adapters]})

    async def _metrics(self, _) -> web.Response:
        labels = f'{{engine="0",model_name="{self.model_id}"}}'
        gauges = {
            "num_requests_running": ("Number of requests in model execution batches.", self.batch.running),
            "num_requests_waiting": ("Number of requests waiting to be processed.", self.batch.waiting),
            "kv_cache_usage_perc": ("KV-cache usage. 1 means 100 percent usage.", self.batch.kv_cache_usage),
        }
        lines = []
        for name, (text, value) in gauges.items():
            lines += [f"# HELP vllm:{name} {text}", f"# TYPE vllm:{name} gauge", f"vllm:{name}{labels} {float(value)}"]
        return web.Response(text="\n".join(lines) + "\n")

    async def _world_size(self, _) -> web.Response:
        return web.json_response({"world_size": self.world_size})

    async def _weight_info(self, _) -> web.Response:
        return web.json_response({"weight_version": self.version})

    async def _is_paused(self, _) -> web.Response:
        return web.json_response({"is_paused": self.paused})

    async def _lease(self, recorded: Recorded) -> web.Response:
        status, reply = answer(self.leases, recorded.body)
        return web.json_response(reply, status=status)

    async def _info(self, _) -> web.Response:
        lease = self.leases.lease()
        return web.json_response(
            {
                "plugin_protocol": self.plugin_protocol,
                "boot_id": self.boot_id,
                "vocab_size": self.vocab_size,
                "dtype": self.dtype,
                "weight_backend": self.weight_backend,
                "device": self.device,
                "sleep_mode": self.sleep_mode,
                "lease": asdict(lease) if lease else None,
                "model_config": {"model_type": "qwen2", "vocab_size": self.vocab_size},
                "task": self.task,
                "max_logprobs": self.max_logprobs,
                "routed_experts": self.routing is not None,
                "exact": self.exact,
                "lora_rank": self.lora_rank,
                "lora_slots": self.lora_slots,
            }
        )

    async def _load_adapter(self, recorded: Recorded) -> web.Response:
        name = recorded.body["lora_name"]
        if name in self.adapters:
            return _error(400, f"The lora adapter '{name}' has already been loaded.")
        self.adapters[name] = recorded.body["lora_path"]
        return web.Response(text="Success")

    async def _publish_adapter(self, recorded: Recorded) -> web.Response:
        name = recorded.body["name"]
        if name in self.adapters or len(self.adapters) >= self.lora_slots:
            return _error(409, f"{name} is taken, or all places are")
        parts = (wire.split_flat(flat, b) for b, flat in self.prefetcher.buckets(recorded.body["version"]))
        self.adapters[name] = {tensor: part.clone() for named in parts for tensor, part in named}
        self.prefetcher.forget()
        return web.json_response({"name": name})

    async def _drop_adapter(self, recorded: Recorded) -> web.Response:
        if recorded.body["name"] in self.busy_adapters:
            return _error(409, "requests run with it")
        self.adapters.pop(recorded.body["name"], None)
        return web.json_response({})

    async def _unload_adapter(self, recorded: Recorded) -> web.Response:
        if self.adapters.pop(recorded.body["lora_name"], None) is None:
            return _error(404, "The lora adapter cannot be found.")
        return web.Response(text="Success")

    async def _checksums(self, recorded: Recorded) -> web.Response:
        if "adapter" in recorded.query:  # as vLLM holds it: B is scaled
            scale = self.peft["lora_alpha"] / self.peft["r"]
            named = {
                name.removeprefix("base_model.model.").removesuffix(".weight"): hashlib.sha256(
                    (tensor * scale if "_B" in name else tensor).numpy().tobytes()
                ).hexdigest()
                for name, tensor in self.adapters[recorded.query["adapter"]].items()
            }
            return web.json_response({"checksums": {f"worker0:{name}": digest for name, digest in named.items()}})
        digests = {
            f"dp0:pp0:pcp0:tp{rank}:{name}": hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
            for rank, own in enumerate(self.of_ranks)
            for name, tensor in (self.tensors | own).items()
        }
        return web.json_response({"checksums": digests})

    async def _stock_server_info(self, _) -> web.Response:
        config = {
            "model_config": {
                "dtype": f"torch.{self.dtype}",
                "max_logprobs": self.max_logprobs,
                "hf_text_config": f'Qwen2Config {{"vocab_size": {self.vocab_size}}}',
            },
            "weight_transfer_config": {"backend": self.weight_backend},
            "lora_config": {
                "max_lora_rank": self.lora_rank,
                "max_loras": self.lora_slots,
                "max_cpu_loras": None,
            }
            if self.lora_rank
            else None,
            "aux_output_config": {"enable_return_routed_experts": self.routing is not None},
        }
        return web.json_response({"vllm_config": config})

    async def _sglang_server_info(self, _) -> web.Response:
        return web.json_response(
            {"model_path": "/models/fake", "served_model_name": self.model_id, "tp_size": 1, "dp_size": 1}
        )

    async def _sglang_model_info(self, _) -> web.Response:
        return web.json_response({"model_path": "/models/fake", "is_generation": True, "weight_version": self.version})

    # -- generation

    async def _generate(self, recorded: Recorded) -> web.Response:
        status, reply = await self._sample(recorded.body)
        if recorded.body.get("stream") and status in (200, 503):  # all at once
            return web.Response(
                text=f"data: {json.dumps(reply)}\n\ndata: [DONE]\n\n", content_type="text/event-stream"
            )
        return web.json_response(reply, status=status)

    async def _generate_arrays(self, recorded: Recorded) -> web.Response:
        if recorded.body.get("stream"):
            return await self._stream_arrays(recorded.body)
        status, reply = await self._sample(recorded.body)
        for choice in reply.get("choices", ()):
            content, choice["token_ids"] = choice["logprobs"], arrays.encode(arrays.TOKEN, choice["token_ids"])
            if content is not None:
                # What vLLM's own route says with its stand-in is not a number here.
                values = [math.nan if entry["logprob"] == -9999.0 else entry["logprob"] for entry in content["content"]]
                choice["logprobs"] = arrays.encode(arrays.LOGPROB, values)
                if (recorded.body["sampling_params"].get("logprobs") or 0) > 0:
                    choice["sampling_mask"] = _mask_in_arrays(content["content"])
        return web.json_response(reply, status=status)

    async def _stream_arrays(self, body: dict[str, Any], form: Callable[[bytes], bytes] = bytes) -> web.Response:
        sampling = asyncio.ensure_future(self._sample(body))
        name = f"generate-tokens-{body['request_id']}"
        try:
            while name not in self._planned and not sampling.done():
                await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            sampling.cancel()
            raise
        if name not in self._planned:
            status, reply = sampling.result()
            return web.json_response(reply, status=status)
        events = self._events(sampling, name, body)
        return web.Response(body=(form(event) async for event in events), content_type="text/event-stream")

    def _of_prompt(self, body: dict[str, Any]) -> dict[str, Any]:
        """What a reply says of its prompt."""
        return {}

    async def _events(self, sampling: asyncio.Future[Any], name: str, body: dict[str, Any]) -> Any:
        """The tokens as they come by the clock, then the end."""
        planned, sent, parameters, about = self._planned.pop(name), 0, body["sampling_params"], self._of_prompt(body)

        def event(choice: dict[str, Any], finish: str | None) -> bytes:
            tokens, content = choice["token_ids"][sent:], choice["logprobs"]
            values = None if content is None else [entry["logprob"] for entry in content["content"][sent:]]
            choice = choice | {
                "token_ids": arrays.encode(arrays.TOKEN, tokens), "finish_reason": finish,
                "logprobs": None if values is None else arrays.encode(arrays.LOGPROB, values),
            }  # fmt: skip
            return b"data: " + json.dumps(about | {"choices": [choice]}).encode() + b"\n\n"

        try:
            while not sampling.done():
                count = self.batch.tokens(name)
                if count > sent:
                    yield event(self._choice(0, planned, parameters, [self.version] * count), None)
                    sent, about = count, {}
                await asyncio.sleep(0.001)
            [choice] = sampling.result()[1]["choices"]
            yield event(choice, choice["finish_reason"]) + b"data: [DONE]\n\n"
        finally:
            sampling.cancel()

    async def _sglang_generate(self, recorded: Recorded) -> web.Response:
        try:
            request = sglang_api.to_vllm(recorded.body)
        except sglang_api.BadRequest as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)
        if request.get("stream"):
            return await self._stream_arrays(request, sglang_api.Events(request).feed)
        status, reply = await self._sample(request)
        return web.json_response(sglang_api.from_vllm(request, reply) if status == 200 else reply, status=status)

    def logits(self, ids: list[int]) -> list[float]:
        """What a classifier's head says of these tokens."""
        return [_logprob(_hash(ids), label) for label in range(self.num_labels)]

    async def _classify(self, recorded: Recorded) -> web.Response:
        ids = recorded.body["input"]
        if len(ids) > self.max_model_len:
            _, refusal = _refusal(f"This model's maximum context length is {self.max_model_len} tokens.")
            return web.json_response(refusal, status=400)
        scores = self.logits(ids)
        if recorded.body.get("use_activation", True):
            scores = [1 / (1 + math.exp(-scores[0]))] if len(scores) == 1 else _softmax(scores)
        found = {"index": 0, "label": "LABEL_0", "probs": scores, "num_classes": len(scores)}
        return web.json_response({"id": "classify-1", "object": "list", "model": self.model_id, "data": [found]})

    async def _sample(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        ids, sampling = body["token_ids"], body["sampling_params"]
        n = sampling.get("n", 1)
        model = body.get("model")
        if model not in (None, self.model_id, *self.adapters):
            return 404, {"error": {"message": f"The model `{model}` does not exist.", "code": 404}}
        self.sampled_with.append(model)
        if n > self.max_num_seqs:
            return _refusal(
                f"sampling_params.n must be at most the server's max_num_seqs ({self.max_num_seqs}), got {n}."
            )
        topk = sampling.get("prompt_logprobs")
        if (sampling.get("logprobs") or 0) > self.max_logprobs:
            return _refusal(f"Requested sample logprobs of {sampling['logprobs']}, more than {self.max_logprobs}")
        if (topk or 0) > self.max_logprobs:
            return _refusal(
                f"Requested prompt logprobs of {topk}, which is greater than max allowed: {self.max_logprobs}"
            )
        beyond = [token for token in ids if token >= self.vocab_size]
        if beyond:
            return _refusal(f"Token id {beyond[0]} is out of vocabulary")
        if len(ids) >= self.max_model_len:
            return _refusal(
                f"The decoder prompt (length {len(ids)}) is longer than the maximum model length of "
                f"{self.max_model_len}."
            )
        if self.refuses_new:
            message = "Generation is paused. Please retry after it resumes."
            return 503, {"error": {"message": message, "type": "ServiceUnavailableError", "param": None, "code": 503}}
        if self.asleep and not self.batch.paused:
            return _engine_died()
        limit = min(sampling["max_tokens"], self.max_model_len - len(ids))
        planned = [self._plan(i, ids, sampling, limit) for i in range(n - self.wrong_count)]
        if body.get("stream"):
            self._planned[f"generate-tokens-{body['request_id']}"] = planned[0]
        generated = await self.batch.generate(
            f"generate-tokens-{body.get('request_id') or uuid.uuid4().hex}",
            length=max(map(len, planned)),
            token_seconds=self.seconds / sampling["max_tokens"],
            samples=n,
            prompt_length=len(ids),
        )
        choices = [self._choice(i, tokens, sampling, generated.states) for i, tokens in enumerate(planned)]
        if self.routing is not None:
            dtype = "uint8" if self.routing.experts <= 256 else "uint16"
            for choice in choices:
                found = experts.chosen([*ids, *choice["token_ids"]], self.routing)
                choice["routed_experts"] = experts.to_npy(found.astype(dtype))
        cached = len(ids) // CACHE_BLOCK * CACHE_BLOCK if (self.version, *ids) in self._prompts else 0
        self._prompts.add((self.version, *ids))
        usage = {"prompt_tokens": len(ids), "prompt_tokens_details": {"cached_tokens": cached}}
        reply = {"request_id": body.get("request_id"), "choices": choices, "usage": usage} | self._of_prompt(body)
        transfer = body.get("kv_transfer_params") or {}
        if transfer.get("do_remote_prefill"):
            self.fetched.append(transfer)
        if transfer.get("do_remote_decode") and self.kv_connector:
            reply["kv_transfer_params"] = {
                "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": self.url,
                "remote_request_id": body["request_id"], "remote_block_ids": [[len(ids)]], "tp_size": 1,
            }  # fmt: skip
        if topk is not None:
            reply["prompt_logprobs"] = [None, *(self._scored(*at, topk) for at in list(enumerate(ids))[1:])]
        return 200, reply

    def _scored(self, position: int, token: int, topk: int = 0) -> dict[str, Any]:
        """A token of a prompt, as if it had been sampled after the first `scored_after` ones, and the `topk` most
        probable ones: of what it leaves, the next ids have a half, a quarter and so on."""
        value = _logprob(token, position - self.scored_after) + self.logprob_shift
        left = math.log1p(-math.exp(min(value, -1e-3)))
        others = {(token + 1 + i) % self.vocab_size: left - (i + 1) * math.log(2) for i in range(topk)}
        ranked = sorted(({token: value} | others).items(), key=lambda pair: -pair[1])
        return {
            str(one): {"logprob": found, "rank": rank, "decoded_token": None}
            for rank, (one, found) in enumerate(ranked, 1)
            if rank <= topk or one == token
        }

    def _plan(self, index: int, ids: list[int], sampling: dict[str, Any], limit: int) -> list[int]:
        """The tokens of a sample that nobody interrupts."""
        seed = sampling["seed"] + index if sampling.get("seed") is not None else uuid.uuid4().int
        start = _hash(ids, seed)
        tokens = [_hash(position, start=start) % (self.vocab_size - 2) + 2 for position in range(limit)]
        stops = [p for p, token in enumerate(tokens) if token in (sampling.get("stop_token_ids") or ())]
        return tokens[: stops[0] + 1] if stops else tokens

    def _choice(self, index: int, planned: list[int], sampling: dict[str, Any], versions: list[str]) -> dict[str, Any]:
        tokens = planned[: len(versions)]
        stopped = tokens == planned and tokens[-1] in (sampling.get("stop_token_ids") or ())
        content = [
            {"token_id": t, "logprob": _logprob(t, p), "rank": 1, "top_logprobs": self._alternatives(t, p, sampling)}
            for p, t in enumerate(tokens)
        ]
        if self.sentinel_logprob and content:
            content[-1]["logprob"] = -9999.0
        has_logprobs = sampling.get("logprobs") is not None and not self.missing_logprobs
        return {
            "index": index,
            "token_ids": tokens,
            "finish_reason": "abort" if len(tokens) < len(planned) else "stop" if stopped else "length",
            "stop_reason": tokens[-1] if stopped else None,
            "logprobs": {"content": content} if has_logprobs else None,
            "weight_versions": version_spans(versions[: len(tokens)]),
        }

    def _alternatives(self, token: int, position: int, sampling: dict[str, Any]) -> list[dict[str, Any]]:
        """The tokens that top_p and top_k keep, which are at most 4 and share what the sampled one leaves, and others
        with vLLM's stand-in for -inf. In raw_logprobs mode nothing is left out."""
        asked, value = sampling.get("logprobs") or 0, _logprob(token, position)
        others = [(token + 1 + i) % self.vocab_size for i in range(asked - 1)]
        kept = min(sampling.get("top_k", -1), 4) - 1
        share = math.log1p(-math.exp(value)) - math.log(max(kept, 1))
        values = [value, *(share if i < kept or self.raw_logprobs else -9999.0 for i in range(len(others)))]
        ranked = zip([token, *others], values, strict=True)
        return [{"token_id": one, "logprob": found, "rank": None} for one, found in ranked] if asked else []

    # -- control

    async def _pause(self, recorded: Recorded) -> web.Response:
        match recorded.query.get("mode", "abort"):
            case "keep":
                self.batch.freeze()
            case "wait":
                await self.batch.drain()
            case "abort":
                self.batch.freeze()
                await self.batch.abort_all()
            case _:
                return web.json_response(_refusal("Input should be 'abort', 'wait' or 'keep'")[1], status=400)
        since_033 = not self.plugin and self.engine_version >= "0.33"
        self.refuses_new = since_033 and recorded.query.get("mode", "abort") != "keep"
        return web.json_response({"status": "paused"})

    async def _abort_requests(self, recorded: Recorded) -> web.Response:
        """By the ids that requests have inside vLLM. It answers at once, and aborts afterwards."""
        if "request_ids" not in (recorded.body or {}):
            return web.json_response({"detail": "Missing 'request_ids' in request body"}, status=400)
        asyncio.get_running_loop().call_soon(self.batch.abort, frozenset(recorded.body["request_ids"]))
        return web.Response()

    async def _resume(self, _) -> web.Response:
        self._end_unfinished_update()
        self.refuses_new = False
        self.batch.resume()
        return web.json_response({"status": "resumed"})

    async def _reset_prefix_cache(self, _) -> web.Response:
        return web.json_response({"success": True})

    async def _reset_encoder_cache(self, _) -> web.Response:
        return web.Response()

    async def _sleep(self, recorded: Recorded) -> web.Response:
        level = int(recorded.query.get("level", "1"))
        if level == 0:
            return await self._pause(recorded)
        self.batch.freeze()
        await self.batch.abort_all()
        self.asleep = frozenset(MEMORY_TAGS)
        if level == 2:
            self.tensors = {}
        return web.json_response({"status": "sleeping", "level": level})

    async def _reload(self, _) -> web.Response:
        if "weights" in self.asleep:
            status, reply = _engine_died()
            return web.json_response(reply, status=status)
        self.tensors = {"of the checkpoint": True}
        self.version = "default"
        return web.json_response({"weight_version": "default"})

    async def _release_cache(self, _) -> web.Response:
        if not self.batch.paused or self.batch.running or self.batch.waiting:
            return _worker_failed("release_kv_cache_memory() requires a completed pause first")
        self.asleep |= {"kv_cache"}
        return web.json_response({"status": "kv_cache_released"})

    async def _wake_up(self, recorded: Recorded) -> web.Response:
        """A tag that does not sleep is ignored; the last one resumes the scheduler."""
        tags = frozenset({recorded.query["tags"]} if "tags" in recorded.query else MEMORY_TAGS)
        self.asleep -= tags
        if not self.asleep:
            self.batch.resume()
        return web.json_response({"status": "sleeping" if self.asleep else "awake", "tags": sorted(tags)})

    # -- weights

    def _native_steps(self) -> dict[str, Callable[[Any], object]]:
        native = self.native
        return {
            "/init_weight_transfer_engine": lambda body: native.init(body["init_info"]),
            "/start_weight_update": lambda body: native.start(),
            "/update_weights": lambda body: native.update(body["update_info"]),
            "/finish_weight_update": lambda body: native.finish(),
            "/shutdown_weight_transfer_engine": lambda body: native.shutdown(),
        }

    async def _native(self, recorded: Recorded) -> web.Response:
        """A stock server: vLLM's own backend."""
        try:
            await asyncio.to_thread(self._native_steps()[recorded.path], recorded.body)
        except Exception as error:  # whatever a worker raises
            return _worker_failed(str(error))
        version = (recorded.body or {}).get("weight_version")
        if recorded.path == "/finish_weight_update" and version is not None:
            self.version = version
        self.tensors = self.native.tensors
        return web.json_response({"message": "done"})

    async def _init_transfer(self, recorded: Recorded) -> web.Response:
        self._end_unfinished_update()
        self._leave()
        info = recorded.body["init_info"]
        try:
            if info["transport"] == "gloo":
                self._group = await asyncio.to_thread(
                    wire.open_group,
                    info["address"],
                    info["port"],
                    info["rank_offset"],
                    info["world_size"],
                    info["group"],
                    info["timeout_seconds"],
                )
            elif info["transport"] == "nccl":
                self._group = await asyncio.to_thread(
                    Workers,
                    base64.b64decode(info["unique_id"]),
                    info["rank_offset"],
                    info["world_size"],
                    self.world_size,
                    info["timeout_seconds"],
                )
            elif info["transport"] == "ipc":
                for worker in self.gpu_workers:
                    await asyncio.to_thread(worker.open, info["handles"])
            elif info["transport"].endswith("-sharded"):
                self._group = await asyncio.to_thread(ShardWorkers, info, self.world_size)
        except (RuntimeError, EngineError) as error:  # torch's own errors at a rendezvous that fails, or NCCL's
            return _worker_failed(str(error))
        self.transport = info["transport"]
        return web.json_response({"message": "Weight transfer initialized"})

    async def _start_update(self, _) -> web.Response:
        self._end_unfinished_update()
        if self.transport is None:
            return _worker_failed("no transfer was initialised: /init_weight_transfer_engine comes first")
        self.updating = True
        return web.json_response({"message": "Weight update started"})

    async def _prefetch(self, recorded: Recorded) -> web.Response:
        self.peft = recorded.body.get("peft") if isinstance(recorded.body, dict) else None
        status, reply = await prefetch(self, recorded.body)
        return web.json_response(reply, status=status)

    def prefetch(self, version: str, seconds: float, source: str | dict[str, Any], _: object = None) -> None:
        """As the plugin's receiver does it; what the last argument makes of an adapter is vLLM's."""
        if isinstance(source, str):
            self.prefetcher.fetch(source, version, seconds)
        else:
            metas = tuple(map(TensorMeta, source["names"], source["dtypes"], map(tuple, source["shapes"])))
            buckets = _cut(metas, source)
            if source.get("delta"):
                self.prefetcher.take(self._received, buckets, version, seconds)
                return
            if self.transport == "ipc":
                lying = [worker.lying(buckets) for worker in self.gpu_workers]
                assert all(torch_equal(lying[0], other) for other in lying), "the workers disagree"
                self.prefetcher.receive(lambda: lying[0], version, seconds)
                return
            received = ((bucket, self._received(wire.bucket_bytes(bucket))) for bucket in buckets)
            self.prefetcher.receive(lambda: received, version, seconds)

    def _received(self, size: int) -> Any:
        import torch

        if isinstance(self._group, Workers):
            return self._group.receive(size) if size else torch.empty(0, dtype=torch.uint8)
        flat = torch.empty(size, dtype=torch.uint8)
        wire.broadcast(self._group, flat)
        return flat

    async def collective_rpc(self, method: str, *, args: tuple[Any, ...] = ()) -> list[Any]:
        """What the plugin's worker extension answers: here it is the real one."""
        return [getattr(self.worker, method)(*args)]

    async def _update(self, recorded: Recorded) -> web.Response:
        if not self.updating:
            return _worker_failed("start_weight_update must be called before update_weights.")
        if "weights" in self.asleep:
            status, reply = _engine_died()
            return web.json_response(reply, status=status)
        info = recorded.body["update_info"]
        bucket = tuple(
            TensorMeta(n, d, tuple(s)) for n, d, s in zip(info["names"], info["dtypes"], info["shapes"], strict=True)
        )
        try:
            if self.transport == "disk":
                from safetensors.torch import load_file

                self.tensors |= load_file(info["path"])
            elif info.get("version") is not None:
                for held, flat in self.prefetcher.buckets(info["version"]):
                    self.tensors |= {name: tensor.clone() for name, tensor in wire.split_flat(flat, held)}
            elif isinstance(self._group, ShardWorkers):
                buckets = _cut(bucket, info) if info.get("bucket_sizes") else [bucket]
                for each in buckets:
                    self.tensors |= await asyncio.to_thread(self._group.receive, each, info.get("path"))
            elif self.transport == "nccl":
                group = self._group  # which is left meanwhile, where the trainer gives up
                self.tensors |= await asyncio.to_thread(lambda: dict(group.receive_buckets(_cut(bucket, info))))
            elif self.transport == "ipc":
                taken = [await asyncio.to_thread(worker.take, bucket) for worker in self.gpu_workers]
                for name, tensor in taken[0].items():
                    assert all(each[name].equal(tensor) for each in taken), "the workers disagree"
                self.tensors |= taken[0]
            else:
                import torch

                flat = torch.empty(wire.bucket_bytes(bucket), dtype=torch.uint8)
                await asyncio.to_thread(wire.broadcast, self._group, flat)
                self.tensors |= dict(wire.split_flat(flat, bucket))
        except (OSError, RuntimeError, ValueError, EngineError) as error:
            self._end_unfinished_update()
            return _worker_failed(str(error))
        self.changed = True
        return web.json_response({"message": "Weights updated"})

    async def _finish_update(self, recorded: Recorded) -> web.Response:
        if not self.updating:
            return _worker_failed("finish_weight_update called without a matching start_weight_update.")
        self.updating = self.changed = False
        if self.accept_versions:
            self.version = recorded.body["weight_version"]
        return web.json_response({"message": "Weight update finished"})

    async def _pause_and_update(self, recorded: Recorded) -> web.Response:
        self.batch.freeze()
        begun = await self._start_update(recorded)
        return begun if begun.status != 200 else await self._update(recorded)

    async def _finish_and_reset(self, recorded: Recorded) -> web.Response:
        reply = await self._finish_update(recorded)
        if reply.status == 200 and recorded.body["resume"]:
            return await self._resume(recorded)
        return reply

    async def _shutdown_transfer(self, _) -> web.Response:
        self._end_unfinished_update()
        self._leave()
        return web.json_response({"message": "Weight transfer shut down"})

    def _end_unfinished_update(self) -> None:
        self.updating = False
        if self.changed:
            self.version = "incomplete"

    def _leave(self) -> None:
        self.prefetcher.forget()  # as the receiver does: what is on its way over this connection is nobody's
        if self.transport == "ipc":
            for worker in self.gpu_workers:
                worker.leave()
        self.transport = None
        if self._group is not None:
            self._group.shutdown()
            self._group = None


class ShardWorkers:
    """The plugin's own channels of weights.sharded, of workers on GPUs gpu-0, gpu-1 and so on, which all store
    everything."""

    def __init__(self, info: dict[str, Any], count: int) -> None:
        blank = {name: "" for name in Info.__annotations__} | {"rank_offset": 1, "world_size": 1 + count, "stores": ()}
        self._info: Any = SimpleNamespace(**blank | info)
        self._pool = ThreadPoolExecutor(count)
        self._channels = list(self._pool.map(self._open, range(count)))

    def _open(self, worker: int) -> ShardedChannel:
        import torch

        def needs(buckets: Any) -> dict[str, list[Box]]:
            return {meta.name: [Box.whole(meta.shape)] for bucket in buckets for meta in bucket}

        return open_shards(
            self._info, self._info.rank_offset + worker, torch.device("cpu"), lambda: f"gpu-{worker}", needs
        )

    def receive(self, bucket: Bucket, path: str | None) -> dict[str, Any]:
        """Raises ChannelError, which is a RuntimeError."""
        found = list(self._pool.map(lambda channel: channel.receive_boxes(bucket, path), self._channels))
        named = [{name: tensor for name, boxes in each.items() for tensor in boxes.values()} for each in found]
        assert all(torch_equal(named[0].items(), each.items()) for each in named), "the workers disagree"
        return named[0]

    def shutdown(self) -> None:
        for channel in self._channels:
            channel.close()
        self._pool.shutdown(wait=False)


def torch_equal(one: Any, other: Any) -> bool:
    return all(a.equal(b) for (_, a), (_, b) in zip(one, other, strict=True))


def _cut(metas: Bucket, info: dict[str, Any]) -> list[Bucket]:
    """The buckets of one request."""
    ends = itertools.accumulate(info["bucket_sizes"])
    return [metas[end - size : end] for end, size in zip(ends, info["bucket_sizes"], strict=True)]


def _hash(*parts: Any, start: int = 0) -> int:
    """32 bits, the same in every process. Not sha256: a fake must be quicker than what it is tested with."""
    return zlib.crc32(repr(parts).encode(), start)


def _logprob(token: int, position: int) -> float:
    """Between -0.01 and -3, the same wherever it is computed, and a number that float32 holds exactly: it may travel as
    JSON or as an array."""
    return -(11 + _hash(token, position) % 3061) / 1024


def _softmax(logits: list[float]) -> list[float]:
    shares = [math.exp(logit) for logit in logits]
    return [share / sum(shares) for share in shares]


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)


def _refusal(message: str) -> tuple[int, dict[str, Any]]:
    return 400, {"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400}}


def _engine_died() -> tuple[int, dict[str, Any]]:
    """What a request gets that makes an engine touch memory which it has given back."""
    message = "EngineCore encountered an issue. See stack trace (above) for the root cause."
    return 500, {"error": {"message": message, "type": "InternalServerError", "param": None, "code": 500}}


def _worker_failed(message: str) -> web.Response:
    text = (
        f"Call to collective_rpc method failed: Worker failed with error '{message}', please check the stack "
        f"trace above"
    )
    return web.json_response(
        {"error": {"message": text, "type": "InternalServerError", "param": None, "code": 500}}, status=500
    )


def _mask_in_arrays(content: list[dict[str, Any]]) -> dict[str, Any]:
    found = find_mask([(one["token_id"], one["logprob"]) for one in entry["top_logprobs"]] for entry in content)
    ids, counts = (arrays.encode(arrays.TOKEN, values) for values in (found.mask.ids, found.mask.counts))
    return {"ids": ids, "counts": counts, "mass": found.mass}
