"""What fake engines share: an aiohttp app on a real loopback socket in a thread of its own, a record of requests, and
fault knobs."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Self
from weakref import WeakSet

from aiohttp import web

from rltool.engines.plugin.lease import RUN_HEADER

START_SECONDS = 60.0


@dataclass(frozen=True)
class Recorded:
    """One request as it arrived. `body` is decoded JSON or None."""

    method: str
    path: str
    query: dict[str, str]
    body: Any
    authorization: str | None
    run: str | None = None
    """The id of the run that sent it, if it says so."""


@dataclass
class Fault:
    """What a route does instead of its work: wait `delay` seconds, then hang for ever, reset the connection or answer
    `status`.

    `times`: for so many requests, then the route works again; None: until `heal`.
    """

    delay: float = 0.0
    hang: bool = False
    reset: bool = False
    status: int | None = None
    body: Any = None
    times: int | None = None


class FakeServer:
    """Context manager. `faults`: path -> Fault; `handle` is what the subclass answers.

    `die` drops the listening socket and all connections, as kill -9 does; `start` again makes a new server under the
    same URL.
    """

    def __init__(self, *, key: str | None = None) -> None:
        self.key = key
        self.port = 0
        self.requests: list[Recorded] = []
        self.faults: dict[str, Fault] = {}
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._runner: web.AppRunner | None = None
        self._transports: WeakSet[asyncio.BaseTransport] = WeakSet()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def paths(self) -> list[str]:
        """Paths of all requests so far, in order."""
        return [recorded.path for recorded in self.requests]

    def fail(self, path: str, status: int = 500, *, times: int | None = None, body: Any = None) -> None:
        self.faults[path] = Fault(status=status, times=times, body=body)

    def hang(self, path: str) -> None:
        self.faults[path] = Fault(hang=True)

    def reset(self, path: str, *, times: int | None = None) -> None:
        self.faults[path] = Fault(reset=True, times=times)

    def delay(self, path: str, seconds: float) -> None:
        self.faults[path] = Fault(delay=seconds)

    def heal(self) -> None:
        self.faults.clear()

    async def handle(self, recorded: Recorded) -> web.Response:
        raise NotImplementedError

    def authorised(self, recorded: Recorded) -> bool:
        """Whether the key lets this request in. Subclasses say which routes are open."""
        return self.key is None or recorded.authorization == f"Bearer {self.key}"

    # -- life

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.die()

    def start(self) -> None:
        started = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(started,), daemon=True)
        self._thread.start()
        if not started.wait(START_SECONDS):
            raise RuntimeError("the fake server did not start")

    def die(self) -> None:
        """Everything at once: no answer to what is in flight, connection refused afterwards. Idempotent."""
        thread, loop = self._thread, self._loop
        if thread is None or loop is None:
            return
        loop.call_soon_threadsafe(self._abort)
        thread.join(START_SECONDS)
        self._thread = self._loop = None

    def drop_connections(self) -> None:
        """Nobody gets an answer to what is in flight."""
        assert self._loop is not None, "start comes first"
        self._loop.call_soon_threadsafe(self._abort_transports)

    def _abort_transports(self) -> None:
        for transport in list(self._transports):
            transport.abort()

    def _abort(self) -> None:
        self._abort_transports()
        asyncio.get_running_loop().stop()

    def _serve(self, started: threading.Event) -> None:
        loop = asyncio.new_event_loop()
        self._loop = loop
        try:
            loop.run_until_complete(self._listen())
            started.set()
            loop.run_forever()
            loop.run_until_complete(self._wind_up())
        finally:
            loop.close()

    async def _wind_up(self) -> None:
        await self._runner.cleanup()
        pending = asyncio.all_tasks() - {asyncio.current_task()}
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)

    async def _listen(self) -> None:
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self._entry)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]

    async def _entry(self, request: web.Request) -> web.StreamResponse:
        self._transports.add(request.transport)
        text = await request.text()
        recorded = Recorded(
            request.method,
            request.path,
            dict(request.query),
            json.loads(text) if text else None,
            request.headers.get("Authorization"),
            request.headers.get(RUN_HEADER),
        )
        self.requests.append(recorded)
        if not self.authorised(recorded):
            return web.json_response({"error": "Unauthorized"}, status=401)
        fault = self.faults.get(request.path)
        if fault is not None:
            if fault.times is not None:
                fault.times -= 1
                if fault.times <= 0:
                    del self.faults[request.path]
            await asyncio.sleep(fault.delay)
            if fault.hang:
                await asyncio.Event().wait()
            if fault.reset:
                request.transport.abort()
                return web.Response()
            if fault.status is not None:
                return web.json_response(
                    fault.body or {"error": {"message": f"fault {fault.status}"}}, status=fault.status
                )
        return await self.handle(recorded)


Handler = Callable[[Recorded], Awaitable[web.Response]]
