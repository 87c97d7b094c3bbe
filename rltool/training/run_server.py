"""The address of a living run: one loopback HTTP endpoint of the driver, for status and for engines that come and go.

    GET    /status                          RunStatus
    GET    /history                         History: the metrics of the last steps
    GET    /metrics                         the newest metrics and the state, in Prometheus' text format
    GET    /metrics/engines                 the metrics of all engines of the run, in the same format
    GET    /engines                         [EngineStatus, ...]
    POST   /engines  {"url", ...}           EngineStatus; key_file is an absolute path on this host, or null (default);
                                            group and role as in endpoints.json, with the defaults there
    DELETE /engines?url=...                 EngineStatus
    POST   /weights/compare {"engines"}     ComparedWeights; engines is a list of URLs, empty for all

All demand the run's key. An error is {"error": text} with 400 (the request is wrong), 401 (key), 404 (no such route or
engine), 409 (the run cannot do that now) or 503 (no answer within the deadline); 500 is a fault of ours, and its
traceback is in the driver's log. The server runs in a thread of its own: the driver's own thread is busy with training
steps.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from aiohttp import web
from pydantic import ValidationError

from rltool.engines.endpoints import EngineEndpoint, parse_address
from rltool.engines.metrics_text import scrape
from rltool.engines.run_client import (
    CHANGE_SECONDS,
    COMPARE_SECONDS,
    READ_SECONDS,
    ComparedWeights,
    EngineStatus,
    RunStatus,
)
from rltool.errors import EngineConflict, RltoolError, UnknownEngine, UsageError
from rltool.processes import connections
from rltool.processes.keys import read_key
from rltool.processes.run_directory import RunDirectory
from rltool.processes.state import ProcessState, read_state, write_state
from rltool.training.observe.live_metrics import LiveMetrics

HOST = "127.0.0.1"

_MOST_CALLS = 16
"""Calls in progress, also those that hang beyond their deadline: each holds a thread. More are answered 503 at once."""
_MOST_BYTES = 64 * 1024
_OF_AN_ENGINE = {"url", "key_file", "group", "role"}
"""The request to add an engine; a probe finds the rest."""
_START_SECONDS = 10.0
_CLOSE_SECONDS = 5.0

logger = logging.getLogger(__name__)


class RunControl(Protocol):
    """What the endpoint asks of the run. Called from threads of the server, several at once; each may block.

    UsageError, UnknownEngine and EngineConflict are answers; any other RltoolError, and TimeoutError, mean "not now"
    (503). A call that is not back within its deadline is answered 503, and its result thrown away: so the rules of a
    call that changes something are that it may be sent again, and that adding what is there already is EngineConflict.
    """

    def status(self) -> RunStatus: ...

    def engines(self) -> list[EngineStatus]: ...

    def all_engines(self) -> Sequence[EngineEndpoint]:
        """Those of the policy as they are now, of evaluations and of the other models, with their keys."""
        ...

    def add_engine(self, engine: EngineEndpoint) -> EngineStatus:
        """Its url is http://HOST:PORT. Returns when it has been checked and is in the fleet, or is waited for
        (starting); it serves after a sync. UsageError: it cannot serve this run.

        key_file None: the run's own key file for engines that were given as bare addresses, if it has one.
        """
        ...

    def remove_engine(self, url: str) -> EngineStatus:
        """Returns when the engine gets no new request, or reports that a weight sync has to end first; not when it has
        left. May be sent again: then it has the engine's progress."""
        ...

    def compare_weights(self, urls: Sequence[str]) -> ComparedWeights:
        """Returns when the trainer has been idle. No URL: all engines that take weights."""
        ...


@dataclass(frozen=True)
class Deadlines:
    """Seconds that a call may take. The client waits a little longer, so that it reads the reason."""

    read: float = READ_SECONDS
    change: float = CHANGE_SECONDS
    compare: float = COMPARE_SECONDS


@contextmanager
def run_server(
    run: RunDirectory, state: ProcessState, control: RunControl, *, live: LiveMetrics | None = None, port: int = 0,
    deadlines: Deadlines | None = None,
) -> Iterator[str]:  # fmt: skip
    """Serve `control` while the block runs; yields the URL, which the state file of this process names meanwhile. port
    0: any free one."""
    key = read_key(run.ensure_key(), f"run {run.name}")
    server = RunServer(control, key, live=live, port=port, deadlines=deadlines)
    server.start()
    try:
        _set_url(run, state, server.url)
        yield server.url
    finally:
        _set_url(run, state, None)
        server.close()


def _set_url(run: RunDirectory, state: ProcessState, url: str | None) -> None:
    """Change the URL and nothing else: `rltool stop` may have marked the state since it was written."""
    current = read_state(run, state.role)
    if current is not None and current.pid == state.pid:
        write_state(run, current.model_copy(update={"url": url}))


class RunServer:
    """The server and its thread. `close` may be called twice; calls that hang are left behind, in daemon threads."""

    def __init__(
        self, control: RunControl, key: str, *, live: LiveMetrics | None = None, port: int = 0,
        deadlines: Deadlines | None = None,
    ) -> None:  # fmt: skip
        if not key:
            raise ValueError("the endpoint of a run is never without a key")
        self.url = ""
        self._control, self._live, self._port = control, live or LiveMetrics(""), port
        self._expected = f"Bearer {key}".encode()
        self._deadlines = deadlines or Deadlines()
        self._calls = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="run-server", daemon=True)
        self._started = threading.Event()
        self._failure: BaseException | None = None

    def start(self) -> None:
        """Listen on the loopback interface. Raises RltoolError where that does not work."""
        self._thread.start()
        if not self._started.wait(_START_SECONDS) or self._failure is not None:
            raise RltoolError(
                f"the driver cannot listen on {HOST}: {self._failure or 'its thread did not start'}; "
                "`rltool doctor` looks at it; monitor.endpoint_port = 0 takes any free port"
            )

    def close(self) -> None:
        with suppress(RuntimeError):  # it never ran, or has ended
            self._loop.call_soon_threadsafe(self._loop.stop)
        if self._thread.is_alive():
            self._thread.join(_CLOSE_SECONDS)

    # -- the rest runs in the server's thread

    def _serve(self) -> None:
        try:
            runner = self._loop.run_until_complete(self._listen())
        except BaseException as error:
            self._failure = error
            self._started.set()
            self._loop.close()
            return
        self._started.set()
        try:
            self._loop.run_forever()
            self._listening.close()
            self._loop.run_until_complete(runner.cleanup())
        finally:
            self._loop.close()

    async def _listen(self) -> web.AppRunner:
        app = web.Application(middlewares=[self._answer_errors, self._demand_key], client_max_size=_MOST_BYTES)
        app.router.add_get("/status", self._status)
        app.router.add_get("/history", self._history)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/metrics/engines", self._engine_metrics)
        app.router.add_get("/engines", self._list)
        app.router.add_post("/engines", self._add)
        app.router.add_delete("/engines", self._remove)
        app.router.add_post("/weights/compare", self._compare)
        runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=0.1, keepalive_timeout=connections.IDLE_SECONDS
        )
        await runner.setup()
        assert runner.server is not None, "setup makes it"
        self._listening = await connections.listen(runner.server, HOST, self._port)
        self.url = f"http://{HOST}:{self._listening.sockets[0].getsockname()[1]}"
        return runner

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: Any) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPException as error:
            return _error(error.status, f"{request.method} {request.path}: {error.reason}")
        except UsageError as error:
            return _error(400, str(error))
        except UnknownEngine as error:
            return _error(404, str(error))
        except EngineConflict as error:
            return _error(409, str(error))
        except (RltoolError, TimeoutError) as error:
            return _error(503, str(error) or "the run did not answer in time")
        except Exception as error:
            logger.exception("%s %s", request.method, request.path)
            return _error(500, f"{type(error).__name__}: {error}")

    @web.middleware
    async def _demand_key(self, request: web.Request, handler: Any) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, self._expected):
            return _error(401, "the key of the run is missing or wrong: it is in state/key of the run's directory")
        return await handler(request)

    async def _status(self, request: web.Request) -> web.Response:
        return web.json_response(await self._call(self._control.status, deadline=self._deadlines.read))

    async def _history(self, request: web.Request) -> web.Response:
        return web.json_response(self._live.history())

    async def _metrics(self, request: web.Request) -> web.Response:
        status: RunStatus = {}
        with suppress(RltoolError, TimeoutError):  # what the steps have measured is there without the rollout manager
            status = await self._call(self._control.status, deadline=self._deadlines.read)
        return _exposition(self._live.exposition(status))

    async def _engine_metrics(self, request: web.Request) -> web.Response:
        # Asked from here: in the rollout manager it would take time from generation.
        engines = await self._call(self._control.all_engines, deadline=self._deadlines.read)
        return _exposition(await scrape(engines, self._live.run))

    async def _list(self, request: web.Request) -> web.Response:
        return web.json_response(await self._call(self._control.engines, deadline=self._deadlines.read))

    async def _add(self, request: web.Request) -> web.Response:
        engine = _engine_to_add(await _json_of(request))
        return web.json_response(await self._call(self._control.add_engine, engine, deadline=self._deadlines.change))

    async def _remove(self, request: web.Request) -> web.Response:
        if set(request.query) != {"url"}:
            raise UsageError("DELETE /engines wants ?url=http://HOST:PORT, and nothing else")
        url = _engine_url(request.query["url"])
        return web.json_response(await self._call(self._control.remove_engine, url, deadline=self._deadlines.change))

    async def _compare(self, request: web.Request) -> web.Response:
        urls = _engines_to_compare(await _json_of(request))
        deadline = self._deadlines.compare
        return web.json_response(await self._call(self._control.compare_weights, urls, deadline=deadline))

    async def _call(self, function: Callable[..., Any], *arguments: Any, deadline: float) -> Any:
        """function(*arguments) in a thread of its own, for `deadline` seconds. Raises TimeoutError.

        Not in an executor: the interpreter waits for those at its end, and a call that hangs must not hold that up.
        """
        if self._calls >= _MOST_CALLS:
            raise TimeoutError(f"{_MOST_CALLS} calls are waiting for the run already; see `rltool logs train`")
        result: asyncio.Future[Any] = self._loop.create_future()
        self._calls += 1

        def settle(value: Any, error: BaseException | None) -> None:
            self._calls -= 1
            if result.done():  # it was cancelled
                return
            if error is not None:
                result.set_exception(error)
            else:
                result.set_result(value)

        def work() -> None:
            value, failure = None, None
            try:
                value = function(*arguments)
            except BaseException as error:
                failure = error
            with suppress(RuntimeError):  # the server was closed meanwhile
                self._loop.call_soon_threadsafe(settle, value, failure)

        threading.Thread(target=work, name=f"run-server-{function.__name__}", daemon=True).start()
        try:
            return await asyncio.wait_for(result, deadline)
        except TimeoutError as error:
            if not str(error):
                raise TimeoutError(f"the run did not answer within {deadline:g} s; see `rltool logs train`") from error
            raise


def _exposition(text: str) -> web.Response:
    return web.Response(text=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


def _error(status: int, text: str) -> web.Response:
    return web.json_response({"error": text}, status=status)


async def _json_of(request: web.Request) -> Any:
    try:
        return await request.json()
    except ValueError as error:
        raise UsageError(f"the body of {request.method} {request.path} is not JSON: {error}") from error


def _engine_to_add(body: Any) -> EngineEndpoint:
    if not isinstance(body, dict) or not isinstance(body.get("url"), str) or set(body) - _OF_AN_ENGINE:
        raise UsageError(
            'POST /engines wants {"url": "http://HOST:PORT", "key_file": "/absolute/path" or null, "group": NAME, '
            '"role": ROLE}, the url at least, and nothing else'
        )
    key_file = body.get("key_file")
    if key_file is not None and not (isinstance(key_file, str) and Path(key_file).is_absolute()):
        raise UsageError(f"key_file is an absolute path on the driver's host or null, not {key_file!r}")
    try:
        return EngineEndpoint.model_validate({**body, "url": _engine_url(body["url"])})
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise UsageError(f"POST /engines: {problems}") from error


def _engines_to_compare(body: Any) -> list[str]:
    urls = body.get("engines") if isinstance(body, dict) and set(body) == {"engines"} else None
    if not isinstance(urls, list) or not all(isinstance(url, str) for url in urls):
        raise UsageError('POST /weights/compare wants {"engines": ["http://HOST:PORT", ...]}, and nothing else')
    return [_engine_url(url) for url in urls]


def _engine_url(text: str) -> str:
    """One address in the form in which the fleet knows engines. Raises UsageError."""
    addresses = parse_address(text)
    if len(addresses) != 1 or addresses[0].url is None:
        raise UsageError(f"one engine is added or removed at a time, by its URL; this is {text!r}")
    return addresses[0].url
