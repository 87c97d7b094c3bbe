"""Who may call what on a vLLM server that rltool starts.

vLLM's own key covers /v1 and /inference but not /pause or /update_weights, and the development mode that opens those
also opens /collective_rpc, which runs anything. So: every route demands the key but the health check that routers send
without one, and what is not listed here does not exist. The list is what rltool and sglang-router use, and the two
OpenAI text routes.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

KEY_FILE_VARIABLE = "RLTOOL_KEY_FILE"

OPEN_ROUTES = frozenset({("GET", "/health")})

CONTROL_ROUTES = frozenset(
    {
        ("POST", "/pause"),
        ("POST", "/resume"),
        ("POST", "/reset_encoder_cache"),
        ("POST", "/reset_prefix_cache"),
        ("POST", "/sleep"),
        ("POST", "/release_kv_cache_memory"),
        ("POST", "/wake_up"),
        ("POST", "/init_weight_transfer_engine"),
        ("POST", "/start_weight_update"),
        ("POST", "/update_weights"),
        ("POST", "/finish_weight_update"),
        ("POST", "/shutdown_weight_transfer_engine"),
        ("POST", "/rltool/prefetch"),
        ("POST", "/rltool/publish_adapter"),
        ("POST", "/rltool/drop_adapter"),
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/v1/unload_lora_adapter"),
        ("POST", "/rltool/reload_weights"),
        ("POST", "/rltool/update_weights"),
        ("POST", "/rltool/finish_weight_update"),
    }
)
"""Routes that change the engine for all clients: while a run holds the lease (lease.py), for that run alone."""

ALLOWED_ROUTES = OPEN_ROUTES | CONTROL_ROUTES | frozenset(
    {
        # facts
        ("GET", "/version"),
        ("GET", "/v1/models"),
        ("GET", "/metrics"),
        ("GET", "/get_world_size"),
        ("GET", "/weight_info"),
        ("GET", "/is_paused"),
        ("GET", "/rltool/info"),
        ("GET", "/rltool/checksums"),
        ("GET", "/server_info"),
        ("GET", "/model_info"),
        # generation
        ("POST", "/inference/v1/generate"),
        ("POST", "/generate"),
        ("POST", "/rltool/generate"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/inference/v1/abort_requests"),
        # classification
        ("POST", "/classify"),
        # who may control
        ("POST", "/rltool/lease"),
    }
)  # fmt: skip


class Decision(StrEnum):
    ALLOW = "allow"
    UNAUTHORIZED = "unauthorized"  # without the key, existing routes look like missing ones
    NOT_FOUND = "not_found"


class GuardPolicy:
    """Pure: no I/O. The key is kept as its hash, and compared in constant time."""

    def __init__(self, key: str) -> None:
        if not key:
            raise ValueError("an empty key guards nothing")
        self._digest = hashlib.sha256(key.encode()).digest()

    def decide(self, method: str, path: str, authorization: str | None) -> Decision:
        """`authorization`: the header's value. Paths are matched as a whole, so a variant of a path is another path."""
        route = (method, path)
        if route in OPEN_ROUTES:
            return Decision.ALLOW
        if not self._is_key(authorization):
            return Decision.UNAUTHORIZED
        return Decision.ALLOW if route in ALLOWED_ROUTES else Decision.NOT_FOUND

    def _is_key(self, authorization: str | None) -> bool:
        scheme, _, token = (authorization or "").partition(" ")
        digest = hashlib.sha256(token.strip().encode()).digest()
        return hmac.compare_digest(digest, self._digest) and scheme.lower() == "bearer"


def read_key(environment: Mapping[str, str] = os.environ) -> str:
    """The key from the file that the environment names. Raises RuntimeError, so that no server starts without one."""
    path = environment.get(KEY_FILE_VARIABLE)
    if not path:
        raise RuntimeError(
            f"rltool's guard needs the key that it demands: set {KEY_FILE_VARIABLE} to a file that holds it"
        )
    key = Path(path).read_text().strip()
    if not key:
        raise RuntimeError(f"the key file {path} is empty")
    return key
