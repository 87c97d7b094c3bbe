"""How an HTTP reply of an engine or router is read: what is a failure, and its error message. Pure."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

from rltool.engines.fast_json import loads
from rltool.engines.types import HttpRequest
from rltool.errors import EngineError, EngineFailed, EngineRejected, EngineUnreachable
from rltool.terminal import visible

QUOTED_CHARACTERS = 600
"""How much of a server's reply an error message quotes: enough for its message, short of a traceback."""


def too_large(what: str, limit: int) -> EngineUnreachable:
    return EngineUnreachable(
        f"{what} answered with more than {limit:,} bytes, the limit for such a reply, and was cut off: what is at that "
        "address is no server of ours, or it is broken"
    )


async def read_body(response: Any, what: str, limit: int) -> bytes:
    """The body of an aiohttp response. EngineUnreachable for more than `limit` bytes; the rest is left unread."""
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > limit:
            raise too_large(what, limit)
    return bytes(body)


async def events_of(response: Any, what: str, limit: int) -> AsyncIterator[Any]:
    """The JSON of each server-sent event of an aiohttp response, up to "[DONE]". EngineUnreachable where it ends before
    that, or for an event of more than `limit` bytes."""
    rest = bytearray()
    async for piece in response.content.iter_any():
        rest += piece
        *events, tail = rest.split(b"\n\n")
        rest = tail
        if max(map(len, (*events, rest))) > limit:
            raise too_large(what, limit)
        for event in events:
            if not event.startswith(b"data:"):
                continue
            text = bytes(event[5:].strip())
            if text == b"[DONE]":
                return
            with making_sense_of(what):
                found = loads(text)
            yield found
    raise EngineUnreachable(f"{what}: the stream broke off")


def read_reply(what: str, request: HttpRequest, status: int, body: bytes) -> Any:
    """Decoded JSON, the text where it is not JSON, None where it is empty; a status that is tolerated, as it is.

    Raises EngineRejected for 3xx and 4xx, EngineFailed for what may pass: 429 and 5xx. `what` names the request there.
    """
    if status in request.tolerate:
        return status
    text = body.decode("utf-8", "replace")
    if status == 429 or status >= 500:
        raise EngineFailed(f"{what} answered {status}: {quote(text)}", status)
    if status >= 300:
        sent = f" (sent: {quote(json.dumps(_without_keys(request.body)))})" if request.body is not None else ""
        raise EngineRejected(f"{what} answered {status}: {quote(text)}{hint(status)}{sent}", status)
    return decode(text)


def failure_within(what: str, error: Any, *, begun: bool) -> EngineError:
    """Of an event {"message", "code"} in the place of a reply that is no 2xx: as that of `read_reply`, but for a stream
    that has begun, which can be taken up elsewhere."""
    code = error.get("code") if isinstance(error, dict) else None
    status, text = code if isinstance(code, int) else 500, f"{what} failed within a stream: {quote(json.dumps(error))}"
    refused = 400 <= status < 500 and status != 429 and not begun
    return EngineRejected(text, status) if refused else EngineFailed(text, status)


@contextmanager
def making_sense_of(what: str) -> Iterator[None]:
    """Around code that takes an answer apart: one that has another shape (half of it, a proxy's page) is the engine's
    failure, an EngineError. `what` names the request there."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        reason = f"{type(error).__name__}: {quote(str(error))}"
        raise EngineError(f"{what} answered something that makes no sense ({reason})") from error


def _without_keys(body: Any) -> Any:
    """POST /workers of a router carries the engine's key, and messages are pasted into chats."""
    return {**body, "api_key": "(the key)"} if isinstance(body, dict) and "api_key" in body else body


def quote(text: str, characters: int = QUOTED_CHARACTERS) -> str:
    """The beginning of foreign text in one line, with what cannot be printed written out."""
    shown = visible(" ".join(text.split())[: characters + 1]) or "(empty reply)"
    return shown if len(shown) <= characters else shown[:characters] + " ..."


def hint(status: int) -> str:
    if status in (401, 403):
        return (
            " -- the bearer key is missing, wrong, or not for this route: "
            "check key_file of this engine in endpoints.json"
        )
    if status == 404:
        return (
            " -- this server has no such route: "
            "was it started by `rltool serve-engines`, or with its RL routes enabled?"
        )
    return ""


def says_paused(error: EngineError) -> bool:
    """Whether an engine refused a request because it is paused: a vLLM since 0.33 without rltool's plugin, with mode
    "abort" or "wait" (v1/engine/core.py, _reject_add_while_paused). Others have it wait."""
    return "Generation is paused" in str(error)


def decode(text: str) -> Any:
    if not text:
        return None
    try:
        return loads(text)
    except ValueError:
        return text
