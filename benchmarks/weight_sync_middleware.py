"""rltool's middleware, which also lets the weight benchmark ask for vLLM's checksums of its parameters."""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from rltool.engines.plugin.entry import RltoolMiddleware


class CheckableMiddleware(RltoolMiddleware):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == "/weight_checker":
            await self._app(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)
