"""Sessions of a gateway, as the trainer opens and ends them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rltool.engines.client import EngineClient
from rltool.engines.types import CONTROL_REPLY_BYTES, HttpRequest

RECORD_BYTES = 64 * CONTROL_REPLY_BYTES
"""Of a session's record: all its tokens, with log-probabilities, and those of its branches."""


@dataclass(frozen=True)
class OpenSession:
    """key: of this session alone."""

    id: str
    key: str
    model: str
    openai_base_url: str
    anthropic_base_url: str


class GatewayClient:
    """client: its retries span the restart of a gateway. seconds: for each call, retries included.

    All calls raise EngineRejected for a 4xx (a session that the gateway does not know), EngineError where it does not
    answer.
    """

    def __init__(self, client: EngineClient, url: str, key: str, *, seconds: float) -> None:
        self._client, self._url, self._key, self._seconds = client, url, key, seconds

    async def open(self, metadata: Mapping[str, Any]) -> OpenSession:
        reply = await self._send(HttpRequest("POST", "/sessions", {"metadata": dict(metadata)}))
        return OpenSession(
            reply["id"], reply["key"], reply["model"], reply["openai_base_url"], reply["anthropic_base_url"]
        )

    async def end(self, session_id: str) -> dict[str, Any]:
        """The session's record. Ending it twice gives the same one."""
        return await self._send(HttpRequest("DELETE", f"/sessions/{session_id}"), limit=RECORD_BYTES)

    async def put_episode(self, episode_id: str, task: Mapping[str, Any]) -> None:
        """For agents on other hosts (gateway/agent_queue.py)."""
        await self._send(HttpRequest("POST", f"/episodes/{episode_id}", {"task": dict(task)}))

    async def outcome(self, episode_id: str, *, wait: float) -> dict[str, Any] | None:
        """{"reward"} or {"failed"} of an episode, None where there is none within `wait` seconds."""
        query = {"wait": f"{wait:g}"}
        return await self._send(HttpRequest("GET", f"/episodes/{episode_id}", query=query), more=wait)

    async def withdraw(self, episode_id: str) -> None:
        await self._send(HttpRequest("DELETE", f"/episodes/{episode_id}"))

    async def _send(self, request: HttpRequest, *, more: float = 0.0, limit: int = CONTROL_REPLY_BYTES) -> Any:
        """more: seconds for which the gateway may keep it; limit: bytes of the reply."""
        return await self._client.request(
            self._url, request, key=self._key, timeout=self._seconds + more, retry=True, limit=limit
        )
