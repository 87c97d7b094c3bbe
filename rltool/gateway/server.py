"""The gateway's HTTP side: sessions, the APIs below each of them, keys, errors.

POST   /sessions {"metadata": {...}}           a new session: id, key, base URLs            the gateway's key
GET    /sessions/ID                            its record: tokens, masks, versions          the gateway's or its own
DELETE /sessions/ID                            ends it, and gives the record                the gateway's or its own
GET    /status                                 counts                                       the gateway's
GET    /health                                 200                                          none
GET    /sessions/ID/v1/models                  the model's names and context length         the session's
POST   /sessions/ID/v1/chat/completions, /completions, /responses, /messages                the session's
POST   /sessions/ID/v1/messages/count_tokens   tokens of a prompt                           the session's
POST   /sessions/ID/turns/TURN                 {"trained": false, "reward": 0.5}            the gateway's or its own
       /sessions/ID/untrained/v1/...           as /sessions/ID/v1/..., for turns that are not trained
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from aiohttp import web

from rltool.config.gateway import GatewayConfig
from rltool.errors import RltoolError
from rltool.gateway.agent_queue import AgentQueue
from rltool.gateway.agent_routes import AgentRoutes
from rltool.gateway.apis.anthropic import AnthropicApi
from rltool.gateway.apis.base import Api, Event
from rltool.gateway.apis.chat import ChatApi
from rltool.gateway.apis.completions import CompletionsApi
from rltool.gateway.apis.responses import ResponsesApi
from rltool.gateway.bodies import json_object, json_response
from rltool.gateway.errors import BadRequest, NotFound, RequestError, TooLarge, Unauthorized
from rltool.gateway.registry import Sessions, demand_key
from rltool.gateway.sampling import not_followed
from rltool.gateway.session import ASKED, Session
from rltool.gateway.streaming import Live
from rltool.gateway.turns import Ended, Turns
from rltool.processes.tasks import Background

PING_SECONDS = 10.0
"""A turn that takes longer begins its stream before it has any content: clients and proxies give silent
connections up. A failure before that is a plain HTTP error."""
SHUTDOWN_SECONDS = 5.0
"""For turns in progress, when the gateway is stopped."""
EXPIRE_SECONDS = 30.0
"""How often idle sessions are looked for."""
REMOVE_SECONDS = 600.0
"""How often files of ended sessions are looked for that are not kept any longer."""
MOST_METADATA = 64 * 1024
"""Characters, as JSON: each open session keeps its own in memory."""

APIS: dict[str, Api] = {
    "/chat/completions": ChatApi(),
    "/completions": CompletionsApi(),
    "/responses": ResponsesApi(),
    "/messages": AnthropicApi(),
}
OVERRIDDEN_HEADER = "X-Rltool-Not-Followed"
TRAJECTORY_HEADER = "X-Rltool-Trajectory"
TURN_HEADER = "X-Rltool-Turn"
TRAIN_HEADER = "X-Rltool-Train"
"""Of a request: "false" for a turn that is not trained."""
BRANCH_HEADER = "X-Rltool-Branch"

logger = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class GatewayServer:
    """key: the gateway's own, which opens sessions."""

    def __init__(self, config: GatewayConfig, turns: Turns, sessions: Sessions, key: str) -> None:
        self._config, self._turns, self._sessions = config, turns, sessions
        self._key = key
        self._queue = AgentQueue()
        self._background = Background()
        self._running: set[asyncio.Task[Ended]] = set()
        """Turns in progress."""

    def app(self) -> web.Application:
        app = web.Application(client_max_size=self._config.max_body_bytes)
        app.router.add_get("/health", self._health)
        app.router.add_get("/status", _in_form_of(ChatApi(), self._status))
        app.router.add_post("/sessions", _in_form_of(ChatApi(), self._open))
        app.router.add_get("/sessions/{id}", _in_form_of(ChatApi(), self._show))
        app.router.add_delete("/sessions/{id}", _in_form_of(ChatApi(), self._end))
        app.router.add_post("/sessions/{id}/turns/{turn}", _in_form_of(ChatApi(), self._mark))
        for root in ("/sessions/{id}/v1", "/sessions/{id}/untrained/v1"):
            app.router.add_get(f"{root}/models", _in_form_of(ChatApi(), self._models))
            app.router.add_get(f"{root}/models/{{name}}", _in_form_of(ChatApi(), self._model))
            app.router.add_post(f"{root}/messages/count_tokens", _in_form_of(AnthropicApi(), self._count_tokens))
            for path, api in APIS.items():
                app.router.add_post(f"{root}{path}", _in_form_of(api, self._turn_handler(api)))
        agents = AgentRoutes(self._queue, self._demand_gateway_key)
        for method, path, handler in agents.routes():
            allowed = handler if self._config.processes == 1 else _no_queue
            app.router.add_route(method, path, _in_form_of(ChatApi(), allowed))
        app.router.add_route("*", "/{path:.*}/messages/{rest:.*}", _in_form_of(AnthropicApi(), self._no_route))
        app.router.add_route("*", "/{path:.*}", _in_form_of(ChatApi(), self._no_route))
        app.cleanup_ctx.append(self._expiring)
        app.on_shutdown.append(lambda _: agents.close())
        app.on_shutdown.append(self._finish_turns)
        return app

    # -- sessions

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _status(self, request: web.Request) -> web.Response:
        self._demand_gateway_key(request)
        sessions, turns = self._sessions, self._turns
        return web.json_response(
            {
                "model": turns.model.name,
                "pid": os.getpid(),
                "sessions_open": sessions.open,
                "turns_in_progress": sessions.turns_in_progress,
                "sessions": dict(sessions.counts),
                "turns": dict(turns.counts),
                "engines": dict(turns.engine_counts),
                "fleet": turns.engine_states,
                "remote_episodes": {"waiting": self._queue.waiting, **self._queue.counts},
            }
        )

    async def _open(self, request: web.Request) -> web.Response:
        self._demand_gateway_key(request)
        body = await json_object(request) if request.can_read_body else {}
        metadata = body.get("metadata") or {}
        if set(body) - {"metadata"} or not isinstance(metadata, dict):
            raise BadRequest('POST /sessions takes {"metadata": {...}}, and nothing else')
        if len(json.dumps(metadata)) > MOST_METADATA:
            raise TooLarge(f"the metadata of a session may have {MOST_METADATA} characters of JSON")
        session, key = self._sessions.create(metadata)
        url = f"{request.scheme}://{request.host}/sessions/{session.id}"
        # The openai client puts its routes behind /v1, the anthropic client puts /v1 itself.
        return web.json_response(
            {
                "id": session.id,
                "key": key,
                "openai_base_url": f"{url}/v1",
                "anthropic_base_url": url,
                "model": self._turns.model.name,
            },
            status=201,
        )

    async def _show(self, request: web.Request) -> web.Response:
        return await self._record(self._owned(request))

    async def _end(self, request: web.Request) -> web.Response:
        session = self._owned(request)
        if session.ended is None:
            session = self._sessions.find(session.id)
            self._sessions.end(session, "deleted")
        return await self._record(session)

    async def _record(self, session: Session) -> web.Response:
        """In a thread: a record may have millions of tokens."""
        return await asyncio.to_thread(lambda: json_response(self._turns.record(session)))

    async def _models(self, request: web.Request) -> web.Response:
        session = self._sessions.find(request.match_info["id"])
        demand_key(session, _given_key(request))
        names = list(map(self._described, (self._turns.model.name, *self._turns.model.aliases)))
        ends = {"first_id": names[0]["id"], "last_id": names[-1]["id"], "has_more": False}
        return web.json_response({"object": "list", "data": names, **ends})

    async def _model(self, request: web.Request) -> web.Response:
        session = self._sessions.find(request.match_info["id"])
        demand_key(session, _given_key(request))
        name, model = request.match_info["name"], self._turns.model
        if name not in (model.name, *model.aliases):
            raise NotFound(f"there is no model {name[:64]!r} here", field="model", code="model_not_found")
        return web.json_response(self._described(name))

    def _described(self, name: str) -> dict[str, Any]:
        """In OpenAI's form (and vLLM's max_model_len) and Anthropic's at once: clients of both ask here."""
        length, most = self._turns.model.max_model_len, self._turns.sampling.max_tokens
        return {
            "id": name, "object": "model", "created": 0, "owned_by": "rltool", "max_model_len": length,
            "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z", "lifecycle": "active",
            "max_input_tokens": length, "max_tokens": min(length, most),
        }  # fmt: skip

    async def _mark(self, request: web.Request) -> web.Response:
        session = self._owned(request)
        body = await json_object(request)
        trained, reward = body.get("trained"), body.get("reward")
        if set(body) - {"trained", "reward"} or not isinstance(trained, bool | None):
            raise BadRequest('a turn takes {"trained": true or false, "reward": number}, or one of them')
        if reward is not None and (isinstance(reward, bool) or not isinstance(reward, int | float)):
            raise BadRequest("reward must be a number", field="reward")
        if session.ended is None:
            session = self._sessions.find(session.id)
        left_out = None if trained is None else "" if trained else ASKED
        self._turns.mark(session, request.match_info["turn"], left_out=left_out, reward=reward)
        return web.json_response(None)

    async def _count_tokens(self, request: web.Request) -> web.Response:
        session = self._sessions.find(request.match_info["id"])
        demand_key(session, _given_key(request))
        asked = AnthropicApi().counted(await json_object(request))
        return web.json_response({"input_tokens": await self._turns.count(session, asked)})

    async def _no_route(self, request: web.Request) -> web.Response:
        raise NotFound(f"there is no route {request.method} {request.path} here (docs/agents.md lists them)")

    def _owned(self, request: web.Request) -> Session:
        """The session of the path, for its own key or the gateway's; ended ones too."""
        session = self._sessions.look(request.match_info["id"])
        if not self._has_gateway_key(request):
            demand_key(session, _given_key(request))
        return session

    def _has_gateway_key(self, request: web.Request) -> bool:
        given = _given_key(request) or ""
        return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self._key.encode())

    def _demand_gateway_key(self, request: web.Request) -> None:
        if not self._has_gateway_key(request):
            raise Unauthorized("the gateway's key is missing or wrong: it is in its key file")

    async def _expiring(self, _: web.Application):
        async def expire() -> None:
            self._queue.drop_forgotten()
            self._sessions.expire()

        async def remove() -> None:
            await asyncio.to_thread(self._sessions.remove_ended, self._config.keep_sessions)

        seconds = min(EXPIRE_SECONDS, self._config.idle_timeout / 3)
        self._background.repeat(expire, "idle sessions", seconds=seconds)
        self._background.repeat(remove, "files of ended sessions", seconds=REMOVE_SECONDS)
        yield
        await self._background.close()

    async def _finish_turns(self, _: web.Application) -> None:
        """They are recorded, and their clients get them."""
        if self._running:
            await asyncio.wait(self._running, timeout=SHUTDOWN_SECONDS)

    # -- turns

    def _turn_handler(self, api: Api) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            session = self._sessions.find(request.match_info["id"])
            demand_key(session, _given_key(request))
            body = await json_object(request)
            ignored = not_followed(
                api.name, body, sampling=self._turns.sampling, on_sampling=self._config.on_sampling
            )
            asked = api.parse(body)
            headers = {OVERRIDDEN_HEADER: _header_text(", ".join(ignored))} if ignored else {}
            left_out = "/untrained/v1/" in request.path or request.headers.get(TRAIN_HEADER, "").lower() == "false"
            live = Live() if asked.stream else None
            work = self._turns.run(session, api.name, asked, ignored, left_out=left_out, live=live)
            turn = self._background.start(work, "turn", awaited=True)
            self._running.add(turn)
            turn.add_done_callback(self._running.discard)
            received = False
            try:
                response = await (
                    _whole(request, api, turn, headers) if live is None else _stream(request, api, turn, headers, live)
                )
                received = request.transport is not None and not request.transport.is_closing()
                return response
            finally:
                if not turn.done():
                    turn.cancel()
                elif not received and not turn.cancelled() and turn.exception() is None:
                    self._turns.unreceived(session, turn.result().record)

        return handle


async def _whole(
    request: web.Request, api: Api, turn: asyncio.Future[Ended], headers: dict[str, str]
) -> web.StreamResponse:
    """The whole answer, written here: an agent that has gone by then has not received it."""
    await asyncio.wait((turn,))
    ended = turn.result()
    response = json_response(api.body(ended.answer), headers=headers | _branch_headers(ended))
    await response.prepare(request)
    await response.write_eof()
    return response


async def _no_queue(request: web.Request) -> web.StreamResponse:
    raise BadRequest(
        "this gateway has several processes (--processes), and the queue of remote agents is in one process: start a "
        "gateway of one for them",
        code="several_processes",
    )


async def _stream(
    request: web.Request, api: Api, turn: asyncio.Future[Ended], headers: dict[str, str], live: Live
) -> web.StreamResponse:
    """Server-sent events, from the first token on. The last ones come when the turn is recorded."""
    turn.add_done_callback(lambda _: live.changed.set())
    is_news = await live.wait(PING_SECONDS)
    if turn.done():
        headers = headers | _branch_headers(turn.result())
    elif live.opening is not None:
        headers = headers | {TURN_HEADER: live.opening.id}
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache", **headers})
    await response.prepare(request)
    stream, opening = api.stream(), None
    while not turn.done():
        if live.has_news:
            answer, count = await live.answer()
            events = [*(stream.begin(answer) if opening is None else ()), *stream.more(answer)]
            opening = opening or answer
            await response.write(b"".join(map(_event_bytes, events)))
            live.delivered = count
        elif not is_news:
            await response.write(api.ping())
        is_news = await live.wait(PING_SECONDS)
    try:
        answer = turn.result().answer
    except Exception as error:
        await response.write(_event_bytes(api.error_event(_as_request_error(error, request))))
    else:
        if opening is not None:
            answer = replace(answer, created=opening.created)
        events = [*(stream.begin(answer) if opening is None else ()), *stream.end(answer)]
        await response.write(b"".join(map(_event_bytes, events)))
    await response.write_eof()
    return response


def _event_bytes(event: Event) -> bytes:
    name, data = event
    text = data if isinstance(data, str) else json.dumps(data)
    return (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()


def _branch_headers(ended: Ended) -> dict[str, str]:
    record = ended.record
    found = {TRAJECTORY_HEADER: str(record.trajectory), TURN_HEADER: record.id}
    if record.reason:
        came_from = f"from trajectory {record.parent} at token {record.shared}" if record.parent is not None else "new"
        found[BRANCH_HEADER] = f"{came_from}; {record.reason}"
    return found


def _in_form_of(api: Api, handler: Handler) -> Handler:
    """Failures in this API's error format."""

    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except ConnectionResetError:  # the agent has gone
            raise
        except Exception as error:
            wrong = _as_request_error(error, request)
            return web.json_response(api.error(wrong), status=wrong.status)

    return handle


def _as_request_error(error: Exception, request: web.Request) -> RequestError:
    if isinstance(error, RequestError):
        return error
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return TooLarge("the body is larger than --max-body-bytes")
    if not isinstance(error, RltoolError):
        logger.error("%s %s", request.method, request.path, exc_info=error)
    return RequestError(f"{type(error).__name__}: {error}" if not isinstance(error, RltoolError) else str(error))


def _given_key(request: web.Request) -> str | None:
    """OpenAI's clients send a bearer key, Anthropic's an x-api-key."""
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key")


def _header_text(text: str) -> str:
    """Names of fields are the agent's words: what a header cannot carry is replaced, and the rest cut."""
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in text)[:500]
