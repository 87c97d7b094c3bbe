"""The worker list of a running sglang-router: read, add and wait, remove and wait.

POST and DELETE only queue a job (202). So both functions here return when the list shows what was asked for; they
block. RouterWorkers is for who has an event loop, and looks at the list by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from rltool.engines.client import EngineClient
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.sync_client import send
from rltool.engines.types import HttpRequest
from rltool.errors import EngineError, EngineRejected, EngineUnreachable

CALL_SECONDS = 5.0
"""For the router to answer one call; it does its work afterwards."""
_POLL_SECONDS = 0.1

T = TypeVar("T")


@dataclass(frozen=True)
class Worker:
    """One engine as the router sees it. `load` is its requests in flight."""

    id: str
    url: str
    healthy: bool
    model_id: str
    load: int


def parse_workers(reply: Any) -> list[Worker]:
    """The reply to GET /workers. Raises EngineError if it is not one."""
    try:
        return [
            Worker(
                id=item["id"],
                url=item["url"].rstrip("/"),
                healthy=item["is_healthy"],
                model_id=item["model_id"],
                load=item["load"],
            )
            for item in reply["workers"]
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise EngineError(
            f"GET /workers did not answer with a list of workers, so this is no sglang-router: {str(reply)[:200]}"
        ) from error


def find_worker(workers: Iterable[Worker], url: str) -> Worker | None:
    return next((worker for worker in workers if worker.url == url.rstrip("/")), None)


def list_workers(router: EngineEndpoint) -> list[Worker]:
    return parse_workers(_call(router, HttpRequest("GET", "/workers")))


def add_worker(router: EngineEndpoint, engine: EngineEndpoint, *, timeout: float) -> Worker:
    """Register an engine and wait until the router has it as a healthy worker. Adding one that is there already is
    harmless.

    Raises EngineError, with the router's own reason where it gives one, if that does not happen within `timeout`
    seconds.
    """
    known = find_worker(list_workers(router), engine.url)
    if known is not None and known.healthy:
        # Not asked again: the router would register it a second time in its own time, and so undo a removal meanwhile.
        return known
    job = ask_to_add(router, engine)

    def registered() -> Worker | None:
        worker = find_worker(list_workers(router), engine.url)
        if worker is not None and worker.healthy:
            return worker
        _raise_if_job_failed(router, job, engine.url)
        return None

    return _until(registered, timeout, f"{router.url} did not register {engine.url} as a healthy worker")


def ask_to_add(router: EngineEndpoint, engine: EngineEndpoint) -> str:
    """Ask for an engine's registration; the list shows what comes of it. Returns the path of the job."""
    accepted = _call(router, HttpRequest("POST", "/workers", registration(engine, engine.read_key())))
    return f"/workers/{accepted['worker_id']}"


def remove_worker(router: EngineEndpoint, url: str, *, timeout: float) -> bool:
    """Take an engine out and wait until it is gone: then it gets no new request. False if it was no worker.

    Requests that are already with it are not cut off.
    """
    worker = find_worker(list_workers(router), url)
    if worker is None:
        return False
    with _gone_meanwhile():
        _call(router, HttpRequest("DELETE", f"/workers/{worker.id}"))

    def gone() -> bool | None:
        return True if find_worker(list_workers(router), url) is None else None

    return _until(gone, timeout, f"{router.url} did not remove {url}")


def wait_ready(router: EngineEndpoint, urls: Iterable[str], *, timeout: float) -> None:
    """Wait until the router is ready and every one of `urls` is a healthy worker.

    /readiness, because /health answers 200 without a single worker.
    """
    wanted = [url.rstrip("/") for url in urls]

    def ready() -> bool | None:
        workers = list_workers(router)
        if not all((worker := find_worker(workers, url)) and worker.healthy for url in wanted):
            return None
        try:
            _call(router, HttpRequest("GET", "/readiness"))
        except EngineError:  # 503 until a worker serves
            return None
        return True

    _until(ready, timeout, f"{router.url} was not ready with all of {', '.join(wanted)}")


def registration(engine: EngineEndpoint, key: str | None) -> dict[str, Any]:
    """The body of POST /workers; key: the engine's. A prefill worker comes with the port at which decode workers ask it
    for keys and values."""
    body: dict[str, Any] = {"url": engine.url} | ({"api_key": key} if key is not None else {})
    if engine.role in ("prefill", "decode"):
        body["worker_type"] = engine.role
    if engine.role == "prefill" and engine.bootstrap_port is not None:
        body["bootstrap_port"] = engine.bootstrap_port
    return body


@contextmanager
def _gone_meanwhile() -> Iterator[None]:
    """A worker that is not there (any more) has been removed."""
    try:
        yield
    except EngineRejected as error:
        if error.status != 404:
            raise


def _call(router: EngineEndpoint, request: HttpRequest) -> Any:
    return send(router.url, request, key=router.read_key(), timeout=CALL_SECONDS)


def _raise_if_job_failed(router: EngineEndpoint, job: str, url: str) -> None:
    try:
        status = _call(router, HttpRequest("GET", job)).get("job_status") or {}
    except EngineRejected as error:
        if error.status == 404:  # between accepting and queueing
            return
        raise
    if status.get("status") == "failed":
        raise EngineError(f"{router.url} could not register {url}: {status.get('message')}")


def _until(
    attempt: Callable[[], T | None],
    timeout: float,
    what: str,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    deadline = clock() + timeout
    while True:
        found = attempt()
        if found is not None:
            return found
        if clock() >= deadline:
            raise EngineUnreachable(f"{what} within {timeout:g} s")
        sleep(_POLL_SECONDS)


class RouterWorkers:
    """The worker list for an event loop: one short call each. `add` and `remove` only ask; `workers` shows what
    came of it."""

    def __init__(self, client: EngineClient, router: EngineEndpoint, *, timeout: float = CALL_SECONDS) -> None:
        self.url = router.url
        self._client, self._router, self._timeout = client, router, timeout

    async def workers(self) -> list[Worker]:
        return parse_workers(await self._call(HttpRequest("GET", "/workers")))

    async def add(self, engine: EngineEndpoint) -> str:
        """Ask for an engine's registration. Returns the name of the job."""
        accepted = await self._call(HttpRequest("POST", "/workers", registration(engine, engine.present_key())))
        return str(accepted["worker_id"])

    async def remove(self, worker: Worker) -> None:
        with _gone_meanwhile():
            await self._call(HttpRequest("DELETE", f"/workers/{worker.id}"))

    async def why_not_added(self, job: str) -> str:
        """The router's reason for a failed registration."""
        try:
            reply = await self._call(HttpRequest("GET", f"/workers/{job}"))
            status = reply.get("job_status") or {}
        except EngineError as error:
            return str(error)
        return str(status.get("message") or status.get("status") or "no reason given")

    async def _call(self, request: HttpRequest) -> Any:
        key = self._router.present_key()
        return await self._client.request(self.url, request, key=key, timeout=self._timeout, retry=False)
