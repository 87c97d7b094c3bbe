"""Bodies of requests."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web

from rltool.gateway.errors import BadRequest


async def json_object(request: web.Request) -> dict[str, Any]:
    """The JSON object that was sent. Raises BadRequest."""
    try:
        sent = await request.read()
        found = json.loads(sent, parse_constant=_no_constant)
        if b"\\ud" in sent.lower():  # half of a surrogate pair is JSON, and no text that can be tokenised
            json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(found, dict):
        raise BadRequest("the body must be a JSON object", code="invalid_json")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
