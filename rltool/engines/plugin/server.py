"""The ASGI middleware of a vLLM server that rltool starts: guard, lease, SGLang's routes, and the way out of failed
weight updates.

It is the outermost layer of the app. /server_info is SGLang's here, for sglang-router asks for it without saying what
it wants; vLLM's own (configuration and environment of the host) is not reachable, and /rltool/info tells what rltool
needs of it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from rltool.engines.plugin import info, sglang_api
from rltool.engines.plugin.aborts import ABORT_PATH, forget_aborted_parents
from rltool.engines.plugin.asgi import (
    App,
    Disconnected,
    Receive,
    Scope,
    Send,
    call_app,
    header,
    read_body,
    send_bytes,
    send_json,
    with_header,
)
from rltool.engines.plugin.guard import CONTROL_ROUTES, Decision, GuardPolicy
from rltool.engines.plugin.lease import LEASE_PATH, RUN_HEADER, LeaseTable, answer, refused
from rltool.engines.plugin.pausing import PAUSE_PATH, keeps_requests, pause
from rltool.engines.plugin.prefetch_route import PREFETCH_PATH, prefetch
from rltool.engines.plugin.update_route import FINISH_PATH, UPDATE_PATH, finish_update, update_weights
from rltool.engines.plugin.workers import WEIGHT_ROUTES, ask_workers, hear_all_workers
from rltool.engines.types import BOOT_ID_HEADER, INCOMPLETE_VERSION

RELOAD_PATH = "/rltool/reload_weights"
STARTING_VERSION = "default"
"""Of a vLLM that nothing was sent to (vllm/v1/engine/core.py)."""
logger = logging.getLogger(__name__)

ENDS_UNFINISHED_UPDATE = frozenset(
    {"/init_weight_transfer_engine", "/start_weight_update", "/shutdown_weight_transfer_engine", "/resume", "/wake_up"}
)
"""Before these an update that is still open (its trainer died, or gave it up) is ended; vLLM would refuse them, or run
on meta tensors."""
MAY_FAIL_HALFWAY = frozenset({"/update_weights", "/finish_weight_update"})


UpdateStep = Callable[[Any, Any], Awaitable[tuple[int, dict[str, Any]]]]
"""(AsyncLLM, body) -> (status, JSON)."""


class ServerMiddleware:
    """Wraps vLLM's FastAPI app. `key` is demanded of every client; `boot_id` is reported back to whoever started the
    server."""

    def __init__(
        self, app: App, *, key: str, boot_id: str | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._app = app
        self._policy = GuardPolicy(key)
        self._boot_id = boot_id
        self._leases = LeaseTable(clock)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            if self._boot_id:  # a router passes it on: so a failure behind it has an engine's name
                send = with_header(send, BOOT_ID_HEADER.encode(), self._boot_id.encode())
            await self._guarded(scope, receive, send)
        else:  # websockets: vLLM's real-time routes, which rltool does not use
            await send({"type": "websocket.close", "code": 1008, "reason": "not available"})

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, path = scope["method"], scope["path"]
        decision = self._policy.decide(method, path, header(scope, b"authorization"))
        if decision is Decision.UNAUTHORIZED:
            await send_json(send, 401, {"error": "this server demands its bearer key"})
        elif decision is Decision.NOT_FOUND:
            await send_json(send, 404, {"error": f"{method} {path} is not available on engines started by rltool"})
        elif path == "/generate":
            await self._generate(scope, receive, send)
        elif path == "/rltool/generate":
            await self._app(_wanting_arrays(scope) | _path(sglang_api.VLLM_PATH), receive, send)
        elif path in ("/rltool/info", "/server_info", "/model_info"):
            await self._describe(scope, path, send)
        elif path == "/rltool/checksums":
            await send_json(send, 200, await info.checksums(scope["app"].state))
        elif path == LEASE_PATH:
            await self._lease(receive, send)
        elif (method, path) in CONTROL_ROUTES and (refusal := self._refusal(scope)) is not None:
            await send_json(send, 409, refusal)
        elif path == PREFETCH_PATH:
            await self._prefetch(scope, receive, send)
        elif path == RELOAD_PATH:
            await self._reload(scope["app"].state.engine_client, send)
        elif path == UPDATE_PATH:
            await self._update(scope, receive, send, update_weights)
        elif path == FINISH_PATH:
            await self._update(scope, receive, send, finish_update)
        else:
            await self._pass_on(scope, receive, send)

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read_body(receive)
        except Disconnected:
            return
        try:
            request = sglang_api.to_vllm(json.loads(body))
        except ValueError as error:  # BadRequest, or no JSON at all
            await send_json(send, 400, {"error": {"message": str(error), "type": "BadRequestError", "code": 400}})
            return
        status, reply = await call_app(self._app, _wanting_arrays(scope), receive, sglang_api.VLLM_PATH, request)
        if status != 200:
            await send_bytes(send, status, reply)
            return
        await send_json(send, 200, sglang_api.from_vllm(request, json.loads(reply)))

    async def _lease(self, receive: Receive, send: Send) -> None:
        try:
            body = await _json_of(receive)
        except Disconnected:
            return
        await send_json(send, *answer(self._leases, body))

    async def _prefetch(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await _json_of(receive)
        except Disconnected:
            return
        await send_json(send, *await prefetch(scope["app"].state.engine_client, body))

    async def _reload(self, client: Any, send: Send) -> None:
        """Of the checkpoint that the server has started from, with the version that it then had."""
        try:
            await client.update_weight_version(INCOMPLETE_VERSION)
            await ask_workers(client, "reload_weights")
            await client.update_weight_version(STARTING_VERSION)
        except Exception as error:
            logger.exception("the weights could not be loaded again")
            await send_json(send, 500, {"error": f"the weights could not be loaded again: {error}"})
        else:
            await send_json(send, 200, {"weight_version": STARTING_VERSION})

    async def _update(self, scope: Scope, receive: Receive, send: Send, step: UpdateStep) -> None:
        try:
            body = await _json_of(receive)
        except Disconnected:
            return
        state = scope["app"].state
        status, reply = await step(state.engine_client, body)
        if status >= 500:  # one that fails to finish may be finished in some workers, and has changed nothing in others
            await self._end_failed_update(state, is_mixed=step is finish_update)
        await send_json(send, status, reply)

    def _refusal(self, scope: Scope) -> dict[str, Any] | None:
        return refused(self._leases, header(scope, RUN_HEADER.lower().encode()))

    async def _describe(self, scope: Scope, path: str, send: Send) -> None:
        facts = await info.describe(scope["app"].state, self._boot_id)
        lease = self._leases.lease()
        facts["lease"] = asdict(lease) if lease else None
        shape = {"/server_info": info.sglang_server_info, "/model_info": info.sglang_model_info}.get(path)
        await send_json(send, 200, shape(facts) if shape else facts)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path in WEIGHT_ROUTES:
            hear_all_workers(scope["app"].state.engine_client)
        if path in ENDS_UNFINISHED_UPDATE:
            await self._end_unfinished_update(scope["app"].state)
        if path == PAUSE_PATH and keeps_requests(scope.get("query_string", b"")) and await self._pause(scope, send):
            return
        if path not in MAY_FAIL_HALFWAY:
            await self._app(scope, receive, send)
            if path == ABORT_PATH:
                await forget_aborted_parents(scope["app"].state.engine_client)
            return
        status = 500

        async def watching_send(message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if status >= 400:  # before the caller hears of it, so that what it asks next finds the version right
                    await self._end_failed_update(scope["app"].state)
            await send(message)

        await self._app(scope, receive, watching_send)

    async def _pause(self, scope: Scope, send: Send) -> bool:
        try:
            paused = await pause(scope["app"].state.engine_client)
        except Exception as error:
            logger.exception("the pause failed")
            await send_json(send, 500, {"error": f"Failed to pause generation: {error}"})
            return True
        if paused:
            await send_json(send, 200, {"status": "paused"})
        return paused

    async def _end_failed_update(self, state: Any, *, is_mixed: bool = False) -> None:
        try:
            await self._end_unfinished_update(state, is_mixed=is_mixed)
        except Exception:  # the engine may be dead: its own error is what the caller must get
            logger.exception("could not end the weight update that failed")

    async def _end_unfinished_update(self, state: Any, *, is_mixed: bool = False) -> None:
        client = state.engine_client
        if state.vllm_config.weight_transfer_config is None:
            return
        mixed = await ask_workers(client, "rltool_end_unfinished_update")
        if is_mixed or any(mixed):
            logger.warning("a weight update was not finished: the weights are a mixture until the next full one")
            await client.update_weight_version(INCOMPLETE_VERSION)


async def _json_of(receive: Receive) -> Any:
    """The body; None where it is no JSON."""
    try:
        return json.loads(await read_body(receive))
    except ValueError:
        return None


def _wanting_arrays(scope: Scope) -> dict[str, Any]:
    """The request, with the mark that makes vLLM's token route answer with arrays."""
    from rltool.engines.plugin.arrays import MARK, serve_arrays

    serve_arrays(scope["app"].state)
    return {**scope, MARK: True}


def _path(path: str) -> dict[str, Any]:
    return {"path": path, "raw_path": path.encode()}
