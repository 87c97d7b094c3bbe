"""A fake SGLang on a real socket: the routes and the refusals of the real 0.5.23 that rltool depends on, and knobs for
faults. With another `version` it lacks what that version lacks (read in the released packages' sources).

What it "generates" is a pure function of its weights, the seed and the position, so a test sees whether a sync has
arrived. tests/e2e/test_sglang.py exercises the same contract on the real server, so that this one cannot drift.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math
import pickle
import threading
import uuid
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

from aiohttp import web

from rltool.engines.types import Routing
from tests.contract.fakes import experts, rooms
from tests.contract.fakes.generation import Batch, version_spans
from tests.contract.fakes.nccl_engines import Workers

VOCAB_SIZE = 100
PAD = 66
"""The placeholder of a picture."""
EXPECTED_KEY = "fake-key"
JOIN_SECONDS = 10.0
RANKS = ("tp_rank", "dp_rank", "pp_rank", "rank")


@dataclass
class Fault:
    """What happens to the next `times` requests for a path, instead of or before the answer."""

    times: int = 1
    status: int | None = None
    """Answer this status."""
    hang: bool = False
    """Never answer."""
    reset: bool = False
    """Close the connection without an answer."""


@dataclass
class FakeSglang:
    """`with FakeSglang() as server:` serves on server.url from a thread of its own until the block ends.

    seconds: what a response of max_new_tokens takes, token by token; 0: no time. batch.slots: how many samples run at
    once. drop_logprobs: replies lack them; notices_disconnects: the real one does seconds later, and runs on until
    then; seen: requests per path; bodies: the last body per path. memory_saver,
    cpu_backup, role (disaggregation_mode), bootstrap_port: its flags; asleep: the tags of the memory that it has given
    back; routing: of a mixture of experts whose choices it returns (--enable-return-routed-experts); rooms: where it
    met others for a KV cache. logits: of a classifier's head for whatever it is asked; None: it
    generates. dp: replicas, with which the real one knows no update groups (an assertion, so a 500). incremental:
    --incremental-streaming-output; says: every response in full; None: tokens of its seed. expand: f(prompt ids,
    data URLs of its pictures) -> prompt ids; returns_prompt: whether it returns them where it is asked.
    """

    seconds: float = 0.0
    drop_logprobs: bool = False
    notices_disconnects: bool = True
    version: str = "0.5.23"
    model_path: str = "/models/fake"
    load_format: str = "auto"
    weight_version: str = "default"
    faults: dict[str, Fault] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)
    bodies: dict[str, Any] = field(default_factory=dict)
    response_headers: dict[str, str] = field(default_factory=dict)
    boot: str = field(default_factory=lambda: uuid.uuid4().hex)
    weights: dict[str, bytes] = field(default_factory=dict)
    batch: Batch = field(init=False)
    port: int = 0
    tp: int = 1
    dp: int = 1
    device: str = "cuda"
    dtype: str = "float32"
    memory_saver: bool = True
    cpu_backup: bool = False
    logits: list[float] | None = None
    gpus: tuple[str, ...] = ()
    role: str = "null"
    bootstrap_port: int = 8998
    routing: Routing | None = None
    incremental: bool = True
    says: list[int] | None = None
    vocab_size: int = VOCAB_SIZE
    expand: Callable[[list[int], list[str]], list[int]] | None = None
    returns_prompt: bool = True

    def __post_init__(self) -> None:
        self.batch = Batch((self.weight_version, dict(self.weights)))

    def __enter__(self) -> Self:
        self._requests_kept = False
        self._session_open = False
        self._groups: dict[str, Any] = {}
        self._scheduler = threading.Lock()
        self.asleep: set[str] = set()
        self.rooms: list[tuple[str, int, int]] = []
        self._start_weight_version = self.weight_version
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        if not self._started.wait(10):
            raise RuntimeError("the fake SGLang did not start")
        return self

    def __exit__(self, *exception: object) -> None:
        self.die()
        for name in list(self._groups):
            self._leave(name)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def die(self) -> None:
        """As kill -9 does: every connection is reset, the port is closed."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(10)

    def drop_connections(self) -> None:
        """Nobody gets an answer to what is in flight."""

        def drop() -> None:
            for connection in list(self._connections.connections):
                if connection.transport is not None:
                    connection.transport.abort()

        self._loop.call_soon_threadsafe(drop)

    @property
    def workers(self) -> Workers | None:
        """Of its NCCL group."""
        return next((group.workers for group in self._groups.values() if isinstance(group, NcclGroup)), None)

    def wait_in_flight(self, samples: int) -> None:
        """From a test: until so many samples have tokens and want more."""
        self.batch.wait_running(samples)

    def logprob(self, seed: int, position: int) -> float:
        """What token `position` of a sample with this seed has under the current weights."""
        return _logprob(self.weights, seed, position)

    def _changed(self) -> None:
        """Tokens from now on come from other weights, or under another name of theirs."""
        self.batch.note((self.weight_version, dict(self.weights)))

    def hurry(self) -> None:
        """From a test: what is being generated ends at once."""
        self.seconds = 0.0
        self._loop.call_soon_threadsafe(self.batch.hurry)

    # -- the server

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(middlewares=[self._guard])
        for method, path, handler in self._routes():
            app.router.add_route(method, path, handler)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self.port)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]
        self._connections = runner.server
        self._started.set()
        await self._stop.wait()
        for connection in list(self._connections.connections):
            if connection.transport is not None:
                connection.transport.abort()
        await runner.cleanup()

    def _since(self, patch: int) -> bool:
        """Whether this is 0.5.`patch` or later."""
        return int(self.version.split(".")[2]) >= patch

    def _routes(self):
        if self._since(20):
            yield "GET", "/ready", self._ready
        if self._since(21):
            yield "POST", "/begin_weight_update", self._begin
            yield "POST", "/end_weight_update", self._end
        yield "GET", "/health", self._health
        yield "GET", "/model_info", self._model_info
        yield "GET", "/server_info", self._server_info
        yield "GET", "/v1/models", self._models
        yield "GET", "/v1/loads", self._loads
        yield "POST", "/generate", self._generate
        yield "POST", "/classify", self._classify
        yield "POST", "/abort_request", self._abort
        yield "POST", "/pause_generation", self._pause
        yield "POST", "/continue_generation", self._resume
        yield "POST", "/flush_cache", self._flush
        yield "POST", "/release_memory_occupation", self._release
        yield "POST", "/resume_memory_occupation", self._take_back
        yield "POST", "/init_weights_update_group", self._init_group
        yield "POST", "/destroy_weights_update_group", self._destroy_group
        yield "POST", "/update_weights_from_distributed", self._update
        yield "POST", "/update_weights_from_tensor", self._update_from_tensor
        yield "POST", "/update_weights_from_disk", self._load_directory
        yield "POST", "/update_weight_version", self._set_version
        yield "POST", "/weights_checker", self._check_weights

    @web.middleware
    async def _guard(self, request: web.Request, handler) -> web.StreamResponse:
        response = await self._answer(request, handler)
        response.headers.update(self.response_headers)
        return response

    async def _answer(self, request: web.Request, handler) -> web.StreamResponse:
        self.seen[request.path] += 1
        open_to_all = request.path.startswith(("/health", "/ready"))
        if not open_to_all and request.headers.get("Authorization") != f"Bearer {EXPECTED_KEY}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        fault = self.faults.get(request.path)
        if fault is not None and fault.times > 0:
            fault.times -= 1
            if fault.hang:
                await asyncio.Event().wait()
            if fault.reset:
                request.transport.abort()
            if fault.status is not None:
                return web.json_response({"error": {"message": f"fault {fault.status}"}}, status=fault.status)
        if request.can_read_body:
            self.bodies[request.path] = await request.json()
        return await handler(request)

    # -- generation

    async def _generate(self, request: web.Request) -> web.Response:
        body = self.bodies[request.path]
        sampling = body["sampling_params"]
        unknown = set(sampling) - {
            "max_new_tokens",
            "temperature",
            "top_p",
            "top_k",
            "stop_token_ids",
            "ignore_eos",
            "sampling_seed",
            "stop",
            "min_new_tokens",
        }
        if unknown:
            return web.json_response({"error": f"unexpected keyword argument {unknown.pop()!r}"}, status=500)
        if any(not 0 <= token < self.vocab_size for token in body["input_ids"]):
            await self._die()  # on a CPU the real one dies of it
        prompt, images = body["input_ids"], body.get("image_data")
        if images:
            if self.expand is None or prompt.count(PAD) > len(images):  # an IndexError of the real one
                return web.Response(text="Internal Server Error", status=500)
            prompt = self.expand(prompt, images)
        body = body | {"prompt": prompt}
        while self.batch.paused:  # its front end holds it back, and does not know its id yet
            await asyncio.sleep(0.001)
        if self.asleep:
            await self._die()
        if self.batch.holds(body["rid"]):  # of a caller that has left, which it notices late
            message = f"Duplicate request ID detected: {body['rid']}"
            return web.json_response({"error": {"message": message}}, status=400)
        if self.role != "null" and body.get("bootstrap_room") is None:
            message = "Invalid request: Disaggregated request received without bootstrap room id."
            return web.json_response({"error": {"message": message}}, status=400)
        limit = min(sampling["max_new_tokens"], len(self.says) if self.says is not None else math.inf)
        meets = self.role != "null" and body["bootstrap_host"] != rooms.NOWHERE
        room = (body["bootstrap_host"], body["bootstrap_port"], body["bootstrap_room"]) if meets else None
        if room is not None:
            self.rooms.append(room)
        if self.role == "prefill":
            limit = 1
        cache = await rooms.take(room, lambda: self.batch.paused) if room and self.role == "decode" else None
        if room and self.role == "decode" and cache is None:
            limit = 0  # aborted before it began
        generating = asyncio.ensure_future(
            self.batch.generate(
                body["rid"], length=limit, token_seconds=self.seconds / max(limit, 1),
                prompt_length=len(body["input_ids"]),
            )
        )
        if body.get("stream"):
            return web.Response(body=self._events(body, limit, generating), content_type="text/event-stream")
        generated = await (generating if self.notices_disconnects else asyncio.shield(generating))
        if room and self.role == "prefill":
            await rooms.offer(room, dict(self.weights), lambda: self.batch.paused)
        reply = self._reply(body, limit, generated.states)
        if cache is not None and any(weights != cache for _, weights in generated.states):
            for entry in reply["meta_info"]["output_token_logprobs"]:
                entry[0] -= 1.0  # it attends to keys and values of other weights
        return web.json_response(reply)

    async def _events(self, body: dict[str, Any], limit: int, generating: asyncio.Future[Any]) -> Any:
        """What has come whenever there is more, then the end, which alone has the spans of versions."""
        sent = 0

        def event(states: list[Any], *, ended: bool) -> bytes:
            reply = self._reply(body, limit, states)
            meta = reply["meta_info"]
            if not ended:
                meta["finish_reason"] = None
                meta.pop("weight_versions", None)
            if self.incremental:
                reply["output_ids"] = reply["output_ids"][sent:]
                if "output_token_logprobs" in meta:
                    meta["output_token_logprobs"] = meta["output_token_logprobs"][sent:]
            return b"data: " + json.dumps(reply).encode() + b"\n\n"

        try:
            while not generating.done():
                states = self.batch.so_far(body["rid"])
                if len(states) > sent:
                    yield event(states, ended=False)
                    sent = len(states)
                await asyncio.sleep(0.001)
            yield event(generating.result().states, ended=True) + b"data: [DONE]\n\n"
        finally:
            generating.cancel()

    def _reply(self, body: dict[str, Any], limit: int, states: list[Any]) -> dict[str, Any]:
        seed = body["sampling_params"].get("sampling_seed", 42)
        said = [zlib.crc32(f"{seed} {position}".encode()) % VOCAB_SIZE for position in range(len(states))]
        tokens = said if self.says is None else self.says[: len(states)]
        logprobs = [_logprob(weights, seed, position) for position, (_, weights) in enumerate(states)]
        end = "stop" if self.says == tokens else "length"
        meta = {
            "id": body["rid"],
            "finish_reason": {"type": "abort" if len(tokens) < max(limit, 1) else end},
            "weight_version": self.weight_version,
            "weight_versions": version_spans([version for version, _ in states]),
            "output_token_logprobs": [[value, token, None] for value, token in zip(logprobs, tokens, strict=True)],
            "completion_tokens": len(tokens),
        }
        if not self._since(19):
            del meta["weight_versions"]
        if self.routing is not None and body.get("return_routed_experts"):
            found = experts.chosen([*body["input_ids"], *tokens], self.routing)
            meta["routed_experts"] = base64.b64encode(found.tobytes()).decode()
        if self.drop_logprobs:
            del meta["output_token_logprobs"]
        wanted = self.returns_prompt and body.get("return_prompt_token_ids")
        prompt = {"prompt_token_ids": body["prompt"]} if wanted else {}
        return {"text": "", "output_ids": tokens, "meta_info": meta} | prompt

    async def _classify(self, request: web.Request) -> web.Response:
        body = self.bodies[request.path]
        if self.logits is None:
            message = "This model does not appear to be an embedding model by default. Please add `--is-embedding`"
            return web.json_response({"error": {"message": message}}, status=400)
        if set(body) != {"input_ids"}:  # what the real one does not know it ignores, and so would this one
            return web.json_response({"error": {"message": f"unexpected {sorted(body)}"}}, status=400)
        meta = {"id": uuid.uuid4().hex, "prompt_tokens": len(body["input_ids"])}
        return web.json_response({"embedding": self.logits, "meta_info": meta})

    # -- probing

    async def _ready(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.batch.paused else 200)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response({
            "model_path": self.model_path, "served_model_name": "policy", "weight_version": self.weight_version,
            "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "is_generation": self.logits is None,
        })  # fmt: skip

    async def _server_info(self, request: web.Request) -> web.Response:
        return web.json_response({
            "version": self.version, "served_model_name": "policy", "tp_size": self.tp, "pp_size": 1,
            "dp_size": self.dp, "enable_dp_attention": False, "dtype": self.dtype, "device": self.device,
            "model_path": self.model_path,
            "weight_version": self._start_weight_version if self._since(18) else self.weight_version,
            "startup_time": {"load_weight": self.boot},
            "enable_memory_saver": self.memory_saver, "enable_weights_cpu_backup": self.cpu_backup,
            "disaggregation_mode": self.role, "disaggregation_bootstrap_port": self.bootstrap_port,
            "enable_return_routed_experts": self.routing is not None,
        })  # fmt: skip

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "policy", "max_model_len": 512}]})

    async def _loads(self, request: web.Request) -> web.Response:
        load = {"dp_rank": 0, "num_running_reqs": self.batch.running, "num_waiting_reqs": self.batch.waiting}
        return web.json_response(
            {"version": self.version, "loads": [load | {"token_usage": self.batch.kv_cache_usage}]}
        )

    # -- control

    async def _pause(self, request: web.Request) -> web.Response:
        mode = self.bodies[request.path]["mode"]
        self.batch.freeze()
        self._requests_kept = mode != "abort"
        if mode == "abort":
            await self.batch.abort_all()
        return web.json_response({"status": "ok"})

    async def _abort(self, request: web.Request) -> web.Response:
        """Its front end passes on ids that it knows, whole; its scheduler then ends all that begin so."""
        rid = self.bodies[request.path].get("rid") or ""
        if self.bodies[request.path].get("abort_all"):
            self.batch.abort_prefix("")
        elif rid and self.batch.holds(rid):
            self.batch.abort_prefix(rid)
        return web.Response()

    async def _resume(self, request: web.Request) -> web.Response:
        self.batch.resume()
        return web.json_response({"status": "ok"})

    async def _flush(self, request: web.Request) -> web.Response:
        if self.batch.running and not (self.batch.paused and self._requests_kept and "timeout" not in request.query):
            return web.Response(
                text="Timed out waiting for idle state." if "timeout" in request.query else "Flush cache failed.",
                status=400,
            )
        return web.Response(text="Cache flushed.")

    async def _release(self, request: web.Request) -> web.Response:
        tags = self.bodies[request.path]["tags"]
        if self.batch.running and not (self.batch.paused and self._requests_kept):
            await self._die()  # its scheduler asserts that it is idle
        self.asleep |= set(tags)
        if "weights" in tags and self.memory_saver and not self.cpu_backup:
            self.weights.clear()
        return web.Response()

    async def _take_back(self, request: web.Request) -> web.Response:
        tags = self.bodies[request.path]["tags"]
        if not self.asleep.issuperset(tags):
            await self._die()  # a KeyError in its scheduler
        self.asleep -= set(tags)
        return web.Response()

    async def _die(self) -> None:
        self._stop.set()
        await asyncio.Event().wait()

    # -- weights

    def _refuse_replicas(self) -> None:
        if self.dp > 1:
            raise web.HTTPInternalServerError(text="Internal Server Error")

    async def _init_group(self, request: web.Request) -> web.Response:
        self._refuse_replicas()
        body = self.bodies[request.path]
        try:
            self._groups[body["group_name"]] = await asyncio.to_thread(_join_as_sglang_does, body)
        except Exception as error:  # the real one answers 400 with whatever torch raised
            return _outcome(False, f"Failed to initialize custom process group: {error}.")
        return _outcome(True)

    async def _destroy_group(self, request: web.Request) -> web.Response:
        self._refuse_replicas()
        left = await asyncio.to_thread(self._in_turn, self._leave, self.bodies[request.path]["group_name"])
        return _outcome(left, "The group to be destroyed does not exist.")

    def _in_turn(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """The real one's scheduler does one thing at a time, and a broadcast that never comes is not interrupted."""
        with self._scheduler:
            return work(*arguments)

    def _leave(self, name: str) -> bool:
        import torch.distributed

        group = self._groups.pop(name, None)
        if isinstance(group, NcclGroup):
            group.shutdown()
        elif group is not None:
            torch.distributed.destroy_process_group(group)
        return group is not None

    async def _begin(self, request: web.Request) -> web.Response:
        was_open, self._session_open = self._session_open, True
        return _outcome(not was_open, "a weight-update session is already open; call end_weight_update() first")

    async def _end(self, request: web.Request) -> web.Response:
        was_open, self._session_open = self._session_open, False
        return _outcome(was_open, "no weight-update session is open; call begin_weight_update() first")

    async def _update(self, request: web.Request) -> web.Response:
        self._refuse_replicas()
        if not self._session_open and self._since(21):
            return _outcome(
                False, "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"
            )
        body = self.bodies[request.path]
        try:
            received = await asyncio.to_thread(self._in_turn, _receive_flat, self._groups[body["group_name"]], body)
        except Exception as error:  # as the real one does
            return _outcome(False, f"Failed to receive weights: {error}")
        self.weights.update(received)
        self._changed()
        return _outcome(True)

    async def _update_from_tensor(self, request: web.Request) -> web.Response:
        """Each rank unpickles its own; what goes wrong in that kills the real one's scheduler."""
        if not self._session_open and self._since(21):
            return _outcome(
                False, "update_weights_from_tensor must run between begin_weight_update() and end_weight_update()"
            )
        body = self.bodies[request.path]
        assert body["load_format"] == "flattened_bucket" and body["flush_cache"] is False
        if "weights" in self.asleep:
            await self._die()
        taken = [
            unpickled(payload, gpu) for gpu, payload in zip(self.gpus, body["serialized_named_tensors"], strict=True)
        ]
        assert all(each == taken[0] for each in taken), "the ranks disagree"
        self.weights.update(taken[0])
        self._changed()
        return _outcome(True)

    async def _load_directory(self, request: web.Request) -> web.Response:
        from safetensors.torch import load_file

        body = self.bodies[request.path]
        if body.get("load_format", self.load_format) == "dummy":
            return _outcome(False, "Failed to get model loader: DummyModelLoader")
        files = sorted(Path(body["model_path"]).glob("*.safetensors"))  # noqa: ASYNC240  # SGLang waits for it as well
        if not files:
            return _outcome(False, "Failed to get weights iterator: Cannot find any model weights.")
        for file in files:
            self.weights.update({name: _bytes(tensor) for name, tensor in load_file(file).items()})
        self._changed()
        return _outcome(True)

    async def _check_weights(self, request: web.Request) -> web.Response:
        if self.bodies[request.path] != {"action": "checksum"}:
            return _outcome(False, "Unsupported action")
        import torch

        from rltool.weights.verify.digests import sglang_cuda, sha256_64

        digest = sglang_cuda if self.device == "cuda" else sha256_64
        digests = {
            name: digest(torch.frombuffer(bytearray(data), dtype=torch.uint8)) for name, data in self.weights.items()
        }
        places = [dict.fromkeys(RANKS, 0) | {"tp_rank": rank} for rank in range(self.tp)]
        ranks = [{"checksums": digests, "per_gpu_checksum": "", "parallelism_info": [place]} for place in places]
        return web.json_response({"success": True, "message": "Success.", "ranks": ranks})

    async def _set_version(self, request: web.Request) -> web.Response:
        body = self.bodies[request.path]
        if body.get("abort_all_requests", True):
            await self.batch.abort_all()
        self.weight_version = body["new_version"]
        self._changed()
        return _outcome(True)


def _outcome(success: bool, message: str = "") -> web.Response:
    return web.json_response(
        {"success": success, "message": "Success" if success else message}, status=200 if success else 400
    )


def _logprob(weights: dict[str, bytes], seed: int, position: int) -> float:
    state = zlib.crc32(repr((sorted(weights.items()), seed, position)).encode())
    return -(1 + state % 1000) / 256


class NcclGroup:
    """torch's ProcessGroupNCCL on a rank above 0: it makes its communicator in the first broadcast, with the unique id
    that the store has under the communicator's number."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        from torch.distributed import PrefixStore

        self._store, self._rank, self._world_size = PrefixStore("cuda/", store), rank, world_size
        self.workers: Workers | None = None

    def receive(self, num_bytes: int) -> Any:
        if self.workers is None:
            count = self._world_size - self._rank
            self.workers = Workers(self._store.get("0"), self._rank, self._world_size, count)
        return self.workers.receive(num_bytes)

    def shutdown(self) -> None:
        if self.workers is not None:
            self.workers.shutdown()


def _join_as_sglang_does(body: dict[str, Any]):
    """torch's rendezvous under PrefixStore(group_name), by torch's own helper: so our side is proven against torch's
    prefixes."""
    from datetime import timedelta

    from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world, rendezvous

    limit = timedelta(seconds=JOIN_SECONDS)
    where = f"tcp://{body['master_address']}:{body['master_port']}"
    store, rank, world_size = next(rendezvous(where, body["rank_offset"], body["world_size"], timeout=limit))
    store.set_timeout(limit)
    name = body["group_name"]
    if body["backend"] == "nccl":
        return NcclGroup(PrefixStore(f"{name}/", PrefixStore(name, store)), rank, world_size)
    group, _ = _new_process_group_helper(
        world_size, rank, [], Backend(body["backend"]), PrefixStore(name, store), group_name=name, timeout=limit
    )
    _world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    return group


def _receive_flat(group, body: dict[str, Any]) -> dict[str, bytes]:
    import torch

    slices, offset = [], 0
    for name, dtype_name, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
        size = getattr(torch, dtype_name).itemsize
        if offset % size:
            raise ValueError(f"Unaligned received tensor {name}: byte offset {offset}, dtype torch.{dtype_name}")
        end = offset + torch.Size(shape).numel() * size
        slices.append((name, offset, end))
        offset = end
    if isinstance(group, NcclGroup):
        flat = group.receive(offset)
        return {name: _bytes(flat[start:end]) for name, start, end in slices}
    flat = torch.empty(offset, dtype=torch.uint8)
    torch.distributed.broadcast(flat, src=0, group=group)
    return {name: _bytes(flat[start:end]) for name, start, end in slices}


def unpickled(payload: str, gpu: str) -> dict[str, bytes]:
    """What the rank on this GPU makes of it, with the few names of SafeUnpickler's list that are needed, and torch's
    rebuild_cuda_tensor on memory of the host (fakes.ipc)."""
    import torch

    from rltool.engines.transfer import ipc

    def rebuild(cls, size, stride, offset, storage, dtype, device, handle, num_bytes, start, *rest):
        assert (cls, stride, offset, dtype, start) == (torch.Tensor, (1,), 0, torch.uint8, 0)
        assert storage is torch.storage.TypedStorage and rest == (False, bytes(64), 0, bytes(64), False)
        assert device == gpu and len(handle) == 64 and size[0] <= num_bytes, f"Invalid device_uuid={device}"
        opened = ipc.OpenedBuffer(base64.b64encode(handle).decode(), torch.device("cpu"))
        flat = opened.flat(num_bytes)[: size[0]].clone()
        opened.close()
        return flat

    allowed = {
        ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"): rebuild,
        ("torch", "Tensor"): torch.Tensor,
        ("torch.storage", "TypedStorage"): torch.storage.TypedStorage,
        ("types", "SimpleNamespace"): SimpleNamespace,
        **{("torch", name): getattr(torch, name) for name in ("uint8", "float32", "bfloat16", "float8_e4m3fn")},
    }

    class Restricted(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            return allowed[module, name]

    content = Restricted(io.BytesIO(base64.b64decode(payload, validate=True))).load()
    flat, found = content["flattened_tensor"], {}
    for meta in content["metadata"]:
        tensor = flat[meta.start_idx : meta.end_idx].view(meta.dtype).reshape(meta.shape)
        assert meta.numel == meta.end_idx - meta.start_idx
        found[meta.name] = _bytes(tensor)
    return found


def _bytes(tensor) -> bytes:
    import torch

    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
