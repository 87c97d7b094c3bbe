"""The worker list of a running sglang-router: read, add and wait, remove and wait.

POST and DELETE only queue a job (202). So both functions here return when the list shows what was asked for. They
block; who has an event loop calls them in a thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.sync_client import send
from rltool.engines.types import HttpRequest
from rltool.errors import EngineError, EngineRejected, EngineUnreachable

_CALL_SECONDS = 10.0
_POLL_SECONDS = 0.1
MEMBERSHIP_SECONDS = 60.0
"""For the router to have a worker in its list, or out of it: it asks an engine three things before it takes it."""

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
    body: dict[str, Any] = {"url": engine.url}
    key = engine.read_key()
    if key is not None:
        body["api_key"] = key
    accepted = _call(router, HttpRequest("POST", "/workers", body))
    job = f"/workers/{accepted['worker_id']}"

    def registered() -> Worker | None:
        worker = find_worker(list_workers(router), engine.url)
        if worker is not None and worker.healthy:
            return worker
        _raise_if_job_failed(router, job, engine.url)
        return None

    return _until(registered, timeout, f"{router.url} did not register {engine.url} as a healthy worker")


def remove_worker(router: EngineEndpoint, url: str, *, timeout: float) -> bool:
    """Take an engine out and wait until it is gone: then it gets no new request. False if it was no worker.

    Requests that are already with it are not cut off.
    """
    worker = find_worker(list_workers(router), url)
    if worker is None:
        return False
    try:
        _call(router, HttpRequest("DELETE", f"/workers/{worker.id}"))
    except EngineRejected as error:
        if error.status != 404:  # gone meanwhile
            raise

    def gone() -> bool | None:
        return True if find_worker(list_workers(router), url) is None else None

    return _until(gone, timeout, f"{router.url} did not let go of {url}")


def wait_ready(router: EngineEndpoint, urls: Iterable[str], *, timeout: float) -> None:
    """Wait until the router says that it is ready and every one of `urls` is a healthy worker.

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


def _call(router: EngineEndpoint, request: HttpRequest) -> Any:
    return send(router.url, request, key=router.read_key(), timeout=_CALL_SECONDS)


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


class RouterMembership:
    """The router's worker list for an event loop: each call blocks a thread, and not the loop."""

    def __init__(self, router: EngineEndpoint, *, timeout: float = MEMBERSHIP_SECONDS) -> None:
        self._router, self._timeout = router, timeout

    async def add(self, endpoint: EngineEndpoint) -> None:
        await asyncio.to_thread(add_worker, self._router, endpoint, timeout=self._timeout)

    async def remove(self, url: str) -> None:
        await asyncio.to_thread(remove_worker, self._router, url, timeout=self._timeout)
