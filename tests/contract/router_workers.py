"""Fake SGLang servers for tests of the router: they demand their key, name who answered, can be slow, fail or go."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from rltool.engines.endpoints import EngineEndpoint


class FakeWorker:
    """A server in a thread. `served`: the bodies of /generate; `keys`: the Authorization header of every request."""

    def __init__(self, key: str | None, key_file: Path | None = None) -> None:
        self.key, self.key_file = key, key_file
        self.delay = 0.0
        self.broken = False
        """/generate answers 500; everything else as ever."""
        self.started = threading.Event()
        self.in_flight = 0
        self.most_in_flight = 0
        self.served: list[dict[str, Any]] = []
        self.keys: dict[str, set[str | None]] = {}
        self._loop = asyncio.new_event_loop()
        self._stop: asyncio.Event
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)
        self._thread.start()
        assert self.started.wait(10)

    @property
    def endpoint(self) -> EngineEndpoint:
        return EngineEndpoint(url=self.url, dialect="sglang", key_file=self.key_file)

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(10)

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        app = web.Application(middlewares=[self._guard])
        replies: dict[str, Callable[[], Any]] = {
            "/server_info": self._server_info,
            "/model_info": self._model_info,
            "/v1/models": self._models,
        }
        for path, reply in replies.items():
            app.router.add_get(path, lambda _request, reply=reply: self._json(reply()))
        for path in ("/health", "/ready"):
            app.router.add_get(path, lambda _request: self._json({}))
        app.router.add_post("/generate", self._generate)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self.started.set()
        await self._stop.wait()
        await runner.cleanup()

    @staticmethod
    async def _json(value: Any) -> web.Response:
        return web.json_response(value)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        header = request.headers.get("Authorization")
        self.keys.setdefault(request.path, set()).add(header)
        if self.key is not None and request.path != "/health" and header != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.served.append(body)
        if self.broken:
            return web.json_response({"error": "no memory left"}, status=500)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await asyncio.sleep(self.delay)
        finally:
            self.in_flight -= 1
        meta = {
            "id": body.get("rid"),
            "finish_reason": {"type": "length", "length": 1},
            "output_token_logprobs": [[-0.5, 7, None]],
        }
        return web.json_response({"text": "", "output_ids": [7], "worker": self.url, "meta_info": meta})

    @staticmethod
    def _server_info() -> dict[str, Any]:
        return {
            "model_path": "/models/tiny", "tokenizer_path": "/models/tiny", "served_model_name": "tiny",
            "is_generation": True, "tp_size": 1, "pp_size": 1, "dp_size": 1, "dtype": "float32", "context_length": 512,
            "max_running_requests": 8, "disaggregation_mode": "null", "load_balance_method": "round_robin",
            "version": "0.5.23", "status": "ready", "weight_version": "default",
        }  # fmt: skip

    @staticmethod
    def _model_info() -> dict[str, Any]:
        return {
            "model_path": "/models/tiny", "tokenizer_path": "/models/tiny", "is_generation": True,
            "weight_version": "default", "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"],
            "preferred_sampling_params": None, "has_image_understanding": False, "has_audio_understanding": False,
        }  # fmt: skip

    @staticmethod
    def _models() -> dict[str, Any]:
        return {
            "object": "list",
            "data": [{"id": "tiny", "object": "model", "created": 1, "owned_by": "sglang", "max_model_len": 512}],
        }
