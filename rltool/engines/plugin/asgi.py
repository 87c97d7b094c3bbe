"""The little ASGI that the middleware needs: read a body, answer JSON, call the wrapped app and look at its answer."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


REPLACED_HEADERS = (b"content-type", b"content-length", b"transfer-encoding", b"x-request-id")
"""Of a request whose body we rewrite. vLLM would take x-request-id, which a client of the router may send, for the id
of the request in place of the body's, and an abort by that one would not find it."""


class Disconnected(Exception):
    """The client went away before its body was complete."""


def header(scope: Scope, name: bytes) -> str | None:
    """The value of the first header `name` (lower case)."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


async def read_body(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


def with_header(send: Send, name: bytes, value: bytes) -> Send:
    """`send` that adds a header to whatever response is sent."""

    async def adding(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), (name, value)]}
        await send(message)

    return adding


async def send_bytes(send: Send, status: int, body: bytes, content_type: bytes = b"application/json") -> None:
    headers = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def send_json(send: Send, status: int, content: Any) -> None:
    # default=str: a model's HF config may hold dtypes and other things that JSON does not know
    await send_bytes(send, status, json.dumps(content, default=str).encode())


async def call_app(app: App, scope: Scope, receive: Receive, path: str, content: Any) -> tuple[int, bytes]:
    """POST `content` to the app's own route `path` in this process, as a part of the request `scope`: (status, body).

    The caller has read the body of its request; what `receive` still yields is the client's disconnect, which the route
    sees, so that an abandoned generation is aborted.
    """
    body = json.dumps(content).encode()
    inner = dict(scope)
    inner |= {"method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
    inner["headers"] = [
        *((key, value) for key, value in scope["headers"] if key not in REPLACED_HEADERS),
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    given = False
    status, parts = 500, []

    async def inner_receive() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def inner_send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        elif message["type"] == "http.response.body":
            parts.append(message.get("body", b""))

    await app(inner, inner_receive, inner_send)
    return status, b"".join(parts)
