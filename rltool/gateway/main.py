"""`python -m rltool.gateway.main`: the gateway's own process. Its settings are JSON in argv; keys are in files."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress

from aiohttp import web

from rltool.chat.parsers.registry import parser_of
from rltool.chat.rendering import Renderer
from rltool.config.gateway import GatewayConfig
from rltool.engines.client import EngineClient
from rltool.engines.fleet.fleet import FleetPolicy
from rltool.gateway.fleet import POLICY, Engines, FleetView, views_on_stdin
from rltool.gateway.parts import Parts
from rltool.gateway.pictures import SentPictures
from rltool.gateway.planning import Rendering
from rltool.gateway.registry import Sessions
from rltool.gateway.server import SHUTDOWN_SECONDS, GatewayServer
from rltool.gateway.store import SessionStore
from rltool.gateway.turns import Model, Turns
from rltool.processes import connections, garbage
from rltool.processes.keys import read_key
from rltool.processes.tasks import Background, beside
from rltool.rollout.pictures import PictureReader
from rltool.rollout.tokenizer import load_tokenizer
from rltool.terminal import write_line


@asynccontextmanager
async def gateway(
    config: GatewayConfig, parts: Parts, views: AsyncIterator[FleetView] | None = None, *,
    policy: FleetPolicy = POLICY,
) -> AsyncIterator[web.Application]:  # fmt: skip
    """The gateway's application, while the block runs. Tests run it in their own loop. views: of a run's fleet, which
    is followed."""

    def renderer() -> Renderer:
        tokenizer = load_tokenizer(
            parts.tokenizer, stop_token_ids=parts.stop_token_ids, trust_remote_code=parts.trust_remote_code
        )
        return Renderer(tokenizer, parser_of(config.tool_parser, tokenizer.template), config.template_arguments)

    store = SessionStore(parts.sessions)
    given = parts.pictures
    pictures = SentPictures(config, given if isinstance(given, str) else PictureReader(given, parts.tokenizer), store)
    model = Model(parts.served_name, config.aliases, parts.max_model_len)
    with ThreadPoolExecutor(1, "tokenizer") as short, ThreadPoolExecutor(1, "long-prompts") as long:
        rendering = Rendering(renderer, short, long)
        async with EngineClient() as client:
            engines = Engines(client, parts, deadline=config.turn_timeout, policy=policy)
            sessions = Sessions(
                store,
                max_sessions=config.max_sessions,
                idle_timeout=config.idle_timeout,
                on_end=engines.plane.forget,
            )
            turns = Turns(config, model, rendering=rendering, engines=engines, sessions=sessions, pictures=pictures)
            engines.start(views)
            try:
                yield GatewayServer(config, turns, sessions, read_key(parts.key_file, "the gateway")).app()
            finally:
                await engines.close()


@asynccontextmanager
async def served(
    app: web.Application, host: str, port: int, *, shared: bool = False, shutdown_seconds: float = SHUTDOWN_SECONDS
) -> AsyncIterator[int]:
    """The application at its address, while the block runs; the port, where 0 was asked for. shared: as of
    connections.listen."""
    runner = web.AppRunner(
        app, access_log=None, shutdown_timeout=shutdown_seconds, keepalive_timeout=connections.IDLE_SECONDS,
        handler_cancellation=True,  # a turn ends with its client
    )
    await runner.setup()
    assert runner.server is not None, "setup makes it"
    try:
        listening = await connections.listen(runner.server, host, port, shared=shared)
        try:
            yield listening.sockets[0].getsockname()[1]
        finally:
            listening.close()
    finally:
        await runner.cleanup()


COLLECT_SECONDS = 600.0
"""How often everything is looked through for what only holds itself."""


async def serve(config: GatewayConfig, parts: Parts) -> None:
    """Until it is cancelled."""
    views = views_on_stdin() if parts.follows else None
    background = Background()
    async with gateway(config, parts, views) as app, served(app, config.host, config.port, shared=config.processes > 1):
        garbage.collect_each_once()
        background.repeat(garbage.collect_new, "garbage collection", seconds=garbage.COLLECT_NEW_SECONDS)
        background.repeat(garbage.collect_all, "a full garbage collection", seconds=COLLECT_SECONDS)
        write_line(f"serving on {config.host}:{config.port}")
        try:
            await asyncio.Event().wait()
        finally:
            await background.close()


async def serve_until_terminated(config: GatewayConfig, parts: Parts) -> None:
    """SIGTERM and SIGINT end it in order: turns in progress are recorded."""
    loop = asyncio.get_running_loop()
    async with beside(serve(config, parts)) as (serving,):
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, serving.cancel)
        with suppress(asyncio.CancelledError):
            await serving


def _leave_torch_out() -> None:
    """transformers imports torch where it finds it: 340 MB, of which tokenizers use nothing."""
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # so `import torch` is an ImportError
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def main() -> None:
    parser = argparse.ArgumentParser(prog="rltool.gateway.main")
    parser.add_argument("--config", required=True, type=GatewayConfig.model_validate_json)
    parser.add_argument("--parts", required=True, type=Parts.model_validate_json)
    arguments = parser.parse_args()
    if not arguments.parts.trust_remote_code:  # a tokenizer's own code may want it
        _leave_torch_out()
    connections.allow_more()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    asyncio.run(serve_until_terminated(arguments.config, arguments.parts))


if __name__ == "__main__":
    main()
