"""Bodies of requests."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web

from rltool.engines.fast_json import dumps, loads
from rltool.gateway.errors import BadRequest
from rltool.processes.connections import BODY_SECONDS


async def json_object(request: web.Request) -> dict[str, Any]:
    """The JSON object that was sent. Raises BadRequest."""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            sent = await request.read()
        found = loads(sent, constant=_no_constant)
        if b"\\ud" in sent.lower():  # half of a surrogate pair is JSON, and no text that can be tokenised
            json.dumps(found, ensure_ascii=False).encode()
    except TimeoutError as error:
        raise BadRequest(f"the body did not come within {BODY_SECONDS:g} s", code="body_timeout") from error
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(found, dict):
        raise BadRequest("the body must be a JSON object", code="invalid_json")
    return found


def json_response(content: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=dumps(content), status=status, headers=headers, content_type="application/json", charset="utf-8"
    )


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
