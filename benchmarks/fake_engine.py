"""An engine that answers by the clock: vLLM's token-in token-out route and probes, with canned tokens.

    python -m benchmarks.fake_engine --port 0 --seconds 0.2        prints "serving URL"
    python -m benchmarks.fake_engine --count 256                   so many of them in one process: one line each
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import socket
import struct
import sys
import time
from collections import defaultdict
from typing import Any

from aiohttp import web

from rltool.engines.types import ROUTING_KEY_HEADER

VOCABULARY = 64
PROBES: dict[str, Any] = {
    "/version": {"version": "0.32.0"},
    "/v1/models": {"data": [{"id": "policy", "max_model_len": 4096}]},
    "/get_world_size": {"world_size": 1},
    "/is_paused": {"is_paused": False},
    "/server_info": {
        "vllm_config": {
            "model_config": {"hf_text_config": f'C {{"vocab_size": {VOCABULARY}}}'},
            "weight_transfer_config": {"backend": "nccl"},
        }
    },
}


_STAMPS = 35
"""SO_TIMESTAMPNS of <asm-generic/socket.h>: the kernel says when it had what is read."""


class StampedSocket(socket.socket):
    """Of Linux. A process that comes late to its socket, for it did something else, knows how late it was."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.setsockopt(socket.SOL_SOCKET, _STAMPS, 1)

    def accept(self) -> tuple[StampedSocket, Any]:
        plain, address = super().accept()
        return StampedSocket(plain.family, plain.type, plain.proto, plain.detach()), address

    def recv(self, size: int, flags: int = 0) -> bytes:
        data, about, _, _ = self.recvmsg(size, 64, flags)
        for _, kind, value in about:
            if kind == _STAMPS:
                seconds, nanoseconds = struct.unpack("qq", value)
                _arrivals[self.fileno()] = seconds + nanoseconds / 1e9
        return data


_arrivals: dict[int, float] = {}


def arrived(transport: Any) -> float:
    """When the bytes came that were read last from this connection of a StampedSocket: seconds since the epoch."""
    return _arrivals[transport.get_extra_info("socket").fileno()]


def collect_new_objects_alone() -> None:
    """A full collection among thousands of requests stops a process for 0.1 s and more, and what it was late for then
    comes to what is measured all at once."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(700, 10, 1_000_000)


class FakeEngine:
    """seconds: how long a request takes, whatever it asks for; tokens: of each sample. times: of the requests of each
    session in order, when each had come, when the engine looked at it, and when it was answered."""

    def __init__(self, *, seconds: float, tokens: int) -> None:
        self.seconds, self.tokens, self.version = seconds, tokens, "default"
        self.times: defaultdict[str, list[tuple[float, float, float]]] = defaultdict(list)
        self.running = asyncio.Event()
        self.running.set()

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        came, seen = arrived(request.transport), time.time()
        await asyncio.sleep(self.seconds)
        await self.running.wait()
        ids = list(range(2, 2 + self.tokens))
        choice = {
            "token_ids": ids,
            "finish_reason": "length",
            "logprobs": {"content": [{"token_id": token, "logprob": -0.5, "rank": 1} for token in ids]},
            "weight_versions": [{"version": self.version, "start": 0, "end": len(ids)}],
        }
        reply = web.json_response({"choices": [{"index": i, **choice} for i in range(body["sampling_params"]["n"])]})
        await reply.prepare(request)
        if ROUTING_KEY_HEADER in request.headers:
            self.times[request.headers[ROUTING_KEY_HEADER]].append((came, seen, time.time()))
        await reply.write_eof()
        return reply

    async def control(self, request: web.Request) -> web.Response:
        if request.path == "/pause":
            self.running.clear()
        elif request.path == "/wake_up":
            self.running.set()
        elif request.path == "/sleep":
            self.running.clear()
        elif request.path == "/resume":
            self.running.set()
        elif request.path == "/finish_weight_update" and request.can_read_body:
            self.version = (await request.json())["weight_version"]
        return web.json_response({})

    async def probe(self, request: web.Request) -> web.Response:
        if request.path == "/weight_info":
            return web.json_response({"weight_version": self.version})
        if request.path == "/health":
            return web.Response()
        if request.path == "/times":
            return web.json_response(self.times)
        if request.path not in PROBES:
            return web.json_response({}, status=404)
        return web.json_response(PROBES[request.path])

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**30)
        app.router.add_post("/inference/v1/generate", self.generate)
        app.router.add_post("/{tail:.*}", self.control)
        app.router.add_get("/{tail:.*}", self.probe)
        return app


async def serve(engines: list[FakeEngine], port: int) -> None:
    runners = [web.AppRunner(engine.app(), access_log=None) for engine in engines]
    for runner in runners:
        await runner.setup()
        listening = StampedSocket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))
        await web.SockSite(runner, listening, backlog=1024).start()
        print(f"serving http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    collect_new_objects_alone()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)  # until whoever started it lets go of it
    await asyncio.gather(*(runner.cleanup() for runner in runners))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0.2)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--count", type=int, default=1)
    arguments = parser.parse_args()
    fakes = [FakeEngine(seconds=arguments.seconds, tokens=arguments.tokens) for _ in range(arguments.count)]
    asyncio.run(serve(fakes, arguments.port))


if __name__ == "__main__":
    main()
