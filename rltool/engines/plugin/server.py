"""The ASGI middleware of a vLLM server that rltool starts: guard, lease, SGLang's routes, and the way out of failed
weight updates.

It is the outermost layer of the app. /server_info is SGLang's here, for sglang-router asks for it without saying what
it wants; vLLM's own (configuration and environment of the host) is not reachable, and /rltool/info has what rltool
needs of it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from rltool.engines.plugin import adapters, info, sglang_api
from rltool.engines.plugin.adapters import DROP_PATH, PUBLISH_PATH, drop_adapter, publish_adapter
from rltool.engines.plugin.guard import CONTROL_ROUTES, Decision, GuardPolicy
from rltool.engines.plugin.lease import LEASE_PATH, RUN_HEADER, LeaseTable, answer, refused
from rltool.engines.plugin.routes import (
    ABORT_PATH,
    FINISH_PATH,
    PAUSE_PATH,
    PREFETCH_PATH,
    UPDATE_PATH,
    finish_update,
    forget_aborted_parents,
    pause,
    pause_mode,
    prefetch,
    update_weights,
)
from rltool.engines.plugin.worker import WEIGHT_ROUTES, ask_workers, failure_in, hear_all_workers
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
REPLACED_HEADERS = (b"content-type", b"content-length", b"transfer-encoding", b"x-request-id")
"""Of a request whose body we rewrite. vLLM would take x-request-id, which a client of the router may send, for the id
of the request in place of the body's, and an abort by that one would not find it."""

UpdateStep = Callable[[Any, Any], Awaitable[tuple[int, dict[str, Any]]]]
"""(AsyncLLM, or the app's state, and the body) -> (status, JSON)."""


class Reply(JSONResponse):
    def __init__(self, status: int, content: Any) -> None:
        super().__init__(content, status, {"www-authenticate": "Bearer"} if status == 401 else None)

    def render(self, content: Any) -> bytes:
        # default=str: a model's HF config may hold dtypes and other things that JSON does not know
        return json.dumps(content, default=str).encode()


class ServerMiddleware:
    """Wraps vLLM's FastAPI app. `key` is demanded of every client; `boot_id` is reported back to the server's
    launcher."""

    def __init__(
        self, app: ASGIApp, *, key: str, boot_id: str | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._app = app
        self._policy = GuardPolicy(key)
        self._boot_id = boot_id
        self._leases = LeaseTable(clock)
        # By the whole path, and no Router: its routes match below a root path, too, which the guard has not seen.
        self._routes: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/generate": self._generate,
            "/rltool/info": self._describe,
            "/server_info": partial(self._describe, shape=info.sglang_server_info),
            "/model_info": partial(self._describe, shape=info.sglang_model_info),
            "/rltool/checksums": self._checksums,
            LEASE_PATH: self._lease,
            PREFETCH_PATH: self._prefetch,
            RELOAD_PATH: self._reload,
            UPDATE_PATH: partial(self._update, step=update_weights),
            FINISH_PATH: partial(self._update, step=finish_update),
            PUBLISH_PATH: partial(self._adapter, step=publish_adapter),
            DROP_PATH: partial(self._adapter, step=drop_adapter),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._guarded(Request(scope, receive), self._naming(send))
        else:  # websockets: vLLM's real-time routes, which rltool does not use
            await WebSocketClose(1008, "not available")(scope, receive, send)

    def _naming(self, send: Send) -> Send:
        """A router passes the boot id on: so a failure behind it has an engine's name."""

        async def naming(message: Message) -> None:
            if self._boot_id and message["type"] == "http.response.start":
                own = (BOOT_ID_HEADER.encode(), self._boot_id.encode())
                message = {**message, "headers": [*message.get("headers", ()), own]}
            await send(message)

        return naming

    async def _guarded(self, request: Request, send: Send) -> None:
        scope, receive = request.scope, request.receive
        response = self._refusal(request)
        if response is None and (route := self._routes.get(scope["path"])) is not None:
            try:
                response = await route(request)
            except ClientDisconnect:
                return
        if response is not None:
            await response(scope, receive, send)
        elif scope["path"] == "/rltool/generate":
            await self._app(_wanting_arrays(scope) | _path(sglang_api.VLLM_PATH), receive, send)
        else:
            await self._pass_on(scope, receive, send)

    def _refusal(self, request: Request) -> Response | None:
        method, path = request.scope["method"], request.scope["path"]
        decision = self._policy.decide(method, path, request.headers.get("authorization"))
        if decision is Decision.UNAUTHORIZED:
            return Reply(401, {"error": "this server demands its bearer key"})
        if decision is Decision.NOT_FOUND:
            return Reply(404, {"error": f"{method} {path} is not available on engines started by rltool"})
        if (method, path) in CONTROL_ROUTES:
            refusal = refused(self._leases, request.headers.get(RUN_HEADER))
            return Reply(409, refusal) if refusal is not None else None
        return None

    async def _generate(self, request: Request) -> Response:
        try:
            wanted = sglang_api.to_vllm(await request.json())
        except ValueError as error:  # BadRequest, or no JSON at all
            return Reply(400, {"error": {"message": str(error), "type": "BadRequestError", "code": 400}})
        scope = _wanting_arrays(request.scope)
        if wanted.get("stream"):
            return _Streamed(partial(self._app, *_inner(scope, request.receive, sglang_api.VLLM_PATH, wanted)), wanted)
        status, reply = await call_app(self._app, scope, request.receive, sglang_api.VLLM_PATH, wanted)
        if status != 200:
            return Response(reply, status, media_type="application/json")
        return Reply(200, sglang_api.from_vllm(wanted, json.loads(reply)))

    async def _checksums(self, request: Request) -> Response:
        adapter = request.query_params.get("adapter")
        if adapter is not None:
            return Reply(*await adapters.checksums(request.app.state, adapter))
        return Reply(200, await info.checksums(request.app.state))

    async def _lease(self, request: Request) -> Response:
        return Reply(*answer(self._leases, await _json_of(request)))

    async def _prefetch(self, request: Request) -> Response:
        body, state = await _json_of(request), request.app.state
        place = adapters.place_for(state, body)
        status, content = await prefetch(state.engine_client, body, place)
        if status == 200 and place is not None:
            adapters.placed(state, content["version"], place)
        return Reply(status, content)

    async def _reload(self, request: Request) -> Response:
        """Of the checkpoint that the server has started from, with the version that it then had."""
        client = request.app.state.engine_client
        try:
            await client.update_weight_version(INCOMPLETE_VERSION)
            if failure := failure_in(await ask_workers(client, "rltool_reload_checkpoint")):
                raise RuntimeError(failure)
            await client.update_weight_version(STARTING_VERSION)
        except Exception as error:
            logger.exception("the weights could not be loaded again")
            return Reply(500, {"error": f"the weights could not be loaded again: {error}"})
        return Reply(200, {"weight_version": STARTING_VERSION})

    async def _update(self, request: Request, *, step: UpdateStep) -> Response:
        state = request.app.state
        status, reply = await step(state.engine_client, await _json_of(request))
        if status >= 500:  # one that fails to finish may be finished in some workers, and has changed nothing in others
            await self._end_failed_update(state, is_mixed=step is finish_update)
        return Reply(status, reply)

    async def _adapter(self, request: Request, *, step: UpdateStep) -> Response:
        return Reply(*await step(request.app.state, await _json_of(request)))

    async def _describe(
        self, request: Request, *, shape: Callable[[dict[str, Any]], dict[str, Any]] = dict
    ) -> Response:  # fmt: skip
        facts = await info.describe(request.app.state, self._boot_id)
        lease = self._leases.lease()
        facts["lease"] = asdict(lease) if lease else None
        return Reply(200, shape(facts))

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path in WEIGHT_ROUTES:
            hear_all_workers(scope["app"].state.engine_client)
        if path in ENDS_UNFINISHED_UPDATE:
            await self._end_unfinished_update(scope["app"].state)
        mode = pause_mode(scope.get("query_string", b"")) if path == PAUSE_PATH else None
        if mode is not None and (reply := await self._pause(scope["app"].state, mode)) is not None:
            await reply(scope, receive, send)
            return
        if path not in MAY_FAIL_HALFWAY:
            await self._app(scope, receive, send)
            if path == ABORT_PATH:
                await forget_aborted_parents(scope["app"].state.engine_client)
            return
        status = 500

        async def watching_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if status >= 400:  # before the caller hears of it, so that what it asks next finds the version right
                    await self._end_failed_update(scope["app"].state)
            await send(message)

        await self._app(scope, receive, watching_send)

    async def _pause(self, state: Any, mode: str) -> Response | None:
        try:
            paused = await pause(state.engine_client, mode)
        except Exception as error:
            logger.exception("the pause failed")
            return Reply(500, {"error": f"Failed to pause generation: {error}"})
        return Reply(200, {"status": "paused"}) if paused else None

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


async def call_app(app: ASGIApp, scope: Scope, receive: Receive, path: str, content: Any) -> tuple[int, bytes]:
    """POST `content` to the app's own route `path` in this process, as a part of request `scope`: (status, body)."""
    status, parts = 500, []

    async def inner_send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        elif message["type"] == "http.response.body":
            parts.append(message.get("body", b""))

    await app(*_inner(scope, receive, path, content), inner_send)
    return status, b"".join(parts)


class _Streamed(Response):
    """What vLLM's token route streams, in SGLang's form; its refusals as they are. call: the app but for `send`."""

    def __init__(self, call: Callable[[Send], Awaitable[None]], wanted: dict[str, Any]) -> None:
        super().__init__()
        self._call, self._events = call, sglang_api.Events(wanted)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        streams = False

        async def translated(message: Message) -> None:
            nonlocal streams
            if message["type"] == "http.response.start":
                streams = message["status"] == 200
            elif streams:
                message = {**message, "body": self._events.feed(message.get("body", b""))}
            await send(message)

        await self._call(translated)


def _inner(scope: Scope, receive: Receive, path: str, content: Any) -> tuple[Scope, Receive]:
    """The caller has read the body of its request; what `receive` still yields is the client's disconnect, which the
    route sees, so that an abandoned generation is aborted."""
    body = json.dumps(content).encode()
    inner = {**scope, **_path(path), "method": "POST", "query_string": b""}
    inner["headers"] = [
        *((key, value) for key, value in scope["headers"] if key not in REPLACED_HEADERS),
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    given = False

    async def inner_receive() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return inner, inner_receive


async def _json_of(request: Request) -> Any:
    """The body; None where it is no JSON."""
    try:
        return await request.json()
    except ValueError:
        return None


def _wanting_arrays(scope: Scope) -> dict[str, Any]:
    """The request, with the mark that makes vLLM's token route answer with arrays."""
    from rltool.engines.plugin.arrays import MARK, serve_arrays

    serve_arrays(scope["app"].state)
    return {**scope, MARK: True}


def _path(path: str) -> dict[str, Any]:
    return {"path": path, "raw_path": path.encode()}
