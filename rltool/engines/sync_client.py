"""One-shot HTTP calls of the command line: to routers, to engines for `rltool status`, to the driver of a living run.

Each sends a few small requests and ends, so there is no event loop here; what generates and syncs uses `client.py`.
"""

from __future__ import annotations

import time
from typing import Any

import requests

from rltool.engines.dialects.table import detections, dialect, none_of_ours
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.replies import quote, read_reply, too_large
from rltool.engines.types import CONTROL_REPLY_BYTES, EngineInfo, HttpRequest
from rltool.errors import EngineRejected, EngineUnreachable


def send(base_url: str, request: HttpRequest, *, key: str | None = None, timeout: float) -> Any:
    """The reply to `request`, sent once, in the form and with the errors of `read_reply`; else EngineUnreachable.

    timeout: seconds for the connection, for each wait for bytes, and for all of them; a hung server is abandoned
    after it.
    """
    status, body = exchange(base_url, request, key=key, timeout=timeout)
    return read_reply(f"{request.method} {base_url}{request.path}", request, status, body)


def exchange(base_url: str, request: HttpRequest, *, key: str | None = None, timeout: float) -> tuple[int, bytes]:
    """(HTTP status, body), of any status. Raises EngineUnreachable."""
    what = f"{request.method} {base_url}{request.path}"
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with requests.Session() as session:
        # No proxy of the environment between us and a server of ours; no .netrc, whose password would replace the key.
        session.trust_env = False
        try:
            response = session.request(
                request.method, base_url + request.path, json=request.body, params=request.query, headers=headers,
                timeout=timeout, allow_redirects=False, stream=True,
            )  # fmt: skip
            return response.status_code, _body(response, what, timeout)
        except requests.RequestException as error:
            if _timed_out(error):
                raise EngineUnreachable(f"{what}: no answer within {timeout:g} s") from error
            raise EngineUnreachable(f"{what}: {_cause(error)}") from error


def _body(response: requests.Response, what: str, timeout: float) -> bytes:
    """EngineUnreachable for more than an answer of ours has, and where it has not come to its end in time."""
    body, ends = bytearray(), time.monotonic() + timeout
    for piece in response.iter_content(64 * 1024):
        body += piece
        if len(body) > CONTROL_REPLY_BYTES:
            raise too_large(what, CONTROL_REPLY_BYTES)
        if time.monotonic() > ends:
            raise EngineUnreachable(f"{what}: the answer did not end within {timeout:g} s")
    return bytes(body)


def probe(endpoint: EngineEndpoint, *, timeout: float) -> EngineInfo:
    """Ask a live engine what it is, as EngineClient.probe does; `timeout`: seconds for all questions together."""
    ends = time.monotonic() + timeout
    key = endpoint.read_key()
    name = endpoint.dialect or detect_dialect(endpoint.url, key, timeout=timeout)
    questions = dialect(name, plugin=endpoint.plugin)

    def ask(label: str, request: HttpRequest) -> Any:
        try:
            return send(endpoint.url, request, key=key, timeout=_left(ends))
        except EngineRejected as error:
            if label.endswith("?") and error.status == 404:
                return None
            raise

    return questions.parse_probe({label: ask(label, request) for label, request in questions.probe().items()})


def detect_dialect(url: str, key: str | None, *, timeout: float) -> str:
    """The kind of engine at `url`, by a route that only this kind has. Raises UsageError if it is none of ours."""
    ends = time.monotonic() + timeout
    for name, (path, field) in detections().items():
        try:
            reply = send(url, HttpRequest("GET", path), key=key, timeout=_left(ends))
        except EngineRejected as error:
            if error.status != 404:
                raise
            continue
        if isinstance(reply, dict) and field in reply:
            return name
    raise none_of_ours(url)


def _left(ends: float) -> float:
    return max(ends - time.monotonic(), 0.001)


def _timed_out(error: requests.RequestException) -> bool:
    """requests reports a timeout in the middle of a body as a ConnectionError around urllib3's."""
    return isinstance(error, requests.Timeout) or "timed out" in str(error)


def _cause(error: BaseException) -> str:
    """The operating system's words ("Connection refused") where there are some: requests wraps them three times."""
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, OSError) and inner.strerror:
            return inner.strerror
        inner = inner.__cause__ or inner.__context__
    return f"{type(error).__name__}: {quote(str(error))}"
