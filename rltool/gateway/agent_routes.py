"""The routes by which a trainer and its remote agents meet at the gateway (agent_queue.py). All want the gateway's key.

| route | who | what |
|---|---|---|
| POST /episodes/ID | trainer | {"task": {...}}: an episode to be run; twice is once |
| GET /episodes/ID?wait=SECONDS | trainer | its outcome; null where there is none within that time |
| DELETE /episodes/ID | trainer | it is not wanted any more |
| POST /episodes/next?wait=SECONDS | worker | {"worker": name} -> {"id", "task"}; null as above |
| POST /episodes/ID/alive | worker | 404: end it |
| POST /episodes/ID/outcome | worker | {"reward": what the agent returned} or {"failed": reason} |
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from aiohttp import web

from rltool.gateway.agent_queue import AgentQueue, QueuedEpisode
from rltool.gateway.bodies import json_object
from rltool.gateway.errors import BadRequest

LONGEST_WAIT = 30.0
"""Of one long poll."""
T = TypeVar("T")


class AgentRoutes:
    """demand_key: raises Unauthorized for a request without the gateway's key. Owned by one event loop."""

    def __init__(self, queue: AgentQueue, demand_key: Callable[[web.Request], None]) -> None:
        self._queue, self._demand_key = queue, demand_key
        self._changed = asyncio.Event()
        self._closing = False

    async def close(self) -> None:
        """Long polls end, so that the server can."""
        self._closing = True
        self._notify()

    def routes(self) -> list[tuple[str, str, Callable[[web.Request], Any]]]:
        """(method, path, handler)."""
        return [
            ("POST", "/episodes/next", self._next),
            ("POST", "/episodes/{id}", self._put),
            ("GET", "/episodes/{id}", self._outcome),
            ("DELETE", "/episodes/{id}", self._withdraw),
            ("POST", "/episodes/{id}/alive", self._alive),
            ("POST", "/episodes/{id}/outcome", self._finish),
        ]

    async def _put(self, request: web.Request) -> web.Response:
        self._demand_key(request)
        self._queue.put(request.match_info["id"], await _field(request, "task"))
        self._notify()
        return web.json_response(None)

    async def _outcome(self, request: web.Request) -> web.Response:
        self._demand_key(request)
        episode_id = request.match_info["id"]
        return web.json_response(await self._until(lambda: self._queue.outcome(episode_id), _wait(request)))

    async def _withdraw(self, request: web.Request) -> web.Response:
        self._demand_key(request)
        self._queue.withdraw(request.match_info["id"])
        return web.json_response(None)

    async def _next(self, request: web.Request) -> web.Response:
        self._demand_key(request)
        body = await json_object(request)
        worker = str(body.get("worker") or request.remote)

        def take() -> QueuedEpisode | None:
            # aiohttp runs a handler on when its client has gone: the episode that it took would never run.
            return self._queue.take(worker) if request.transport is not None else None

        taken = await self._until(take, _wait(request))
        return web.json_response(None if taken is None else {"id": taken.id, "task": taken.task})

    async def _alive(self, request: web.Request) -> web.Response:
        self._demand_key(request)
        self._queue.alive(request.match_info["id"])
        return web.json_response(None)

    async def _finish(self, request: web.Request) -> web.Response:
        self._demand_key(request)
        outcome = await json_object(request)
        if set(outcome) not in ({"reward"}, {"failed"}):
            raise BadRequest('an outcome is {"reward": ...} or {"failed": reason}')
        if isinstance(outcome.get("reward"), str):
            raise BadRequest("a reward is a number, a list of them, an object or null", field="reward")
        self._queue.finish(request.match_info["id"], outcome)
        self._notify()
        return web.json_response(None)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, found: Callable[[], T | None], seconds: float) -> T | None:
        """What is found within that time; asked again whenever something has changed."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while (value := found()) is None and (left := deadline - loop.time()) > 0 and not self._closing:
            try:
                async with asyncio.timeout(left):
                    await self._changed.wait()
            except TimeoutError:
                return found()
        return value


def _wait(request: web.Request) -> float:
    try:
        seconds = float(request.query.get("wait", "0"))
    except ValueError:
        raise BadRequest("wait is a number of seconds", field="wait") from None
    return min(max(seconds, 0.0), LONGEST_WAIT)


async def _field(request: web.Request, name: str) -> dict[str, Any]:
    found = (await json_object(request)).get(name)
    if not isinstance(found, dict):
        raise BadRequest(f"{name} is missing, or no object", field=name)
    return found
