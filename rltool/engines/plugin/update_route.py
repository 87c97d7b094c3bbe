"""POST /rltool/update_weights: the pause, the update and what follows it as one request. The engine stays paused.

Asked one by one these are six requests and nine calls of the engine core, 17 ms of a weight sync whose bytes take
42 ms (two H200, a model of 7B).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

from rltool.engines.plugin.pausing import pause

UPDATE_PATH = "/rltool/update_weights"


class Engine(Protocol):
    """The part of vLLM's AsyncLLM that is used."""

    async def pause_generation(self, *, mode: Any) -> None: ...
    async def collective_rpc(self, method: str, *, args: tuple[Any, ...] = ()) -> list[Any]: ...
    async def update_weight_version(self, new_version: str) -> None: ...
    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool: ...


async def update_weights(engine: Engine, body: Any) -> tuple[int, dict[str, Any]]:
    """(status, JSON) of POST UPDATE_PATH {"update_info", "weight_version"}: as for /update_weights, and as for
    /finish_weight_update. 500 with the reason where a worker could not take the update: its weights may be a mixture
    then. Requests that run are kept, and computed anew."""
    try:
        info, version = _parse(body)
    except ValueError as error:
        return 400, {"error": f"POST {UPDATE_PATH}: {error}"}
    try:
        if not await pause(engine):
            await engine.pause_generation(mode="keep")
        await engine.collective_rpc("rltool_update_weights", args=(info,))
        # In the engine core one after the other. The cache was dropped by the pause; what runs may hold blocks of it.
        await asyncio.gather(engine.update_weight_version(version), engine.reset_prefix_cache(True))
    except Exception as error:  # of a worker, whatever it is: its text is for the trainer
        return 500, {"error": f"{type(error).__name__}: {error}"}
    return 200, {"weight_version": version}


def _parse(body: Any) -> tuple[dict[str, Any], str]:
    if not isinstance(body, Mapping):
        raise ValueError("the body must be an object with update_info and weight_version")
    info, version = body.get("update_info"), body.get("weight_version")
    if not isinstance(info, dict):
        raise ValueError("'update_info' must be an object")
    if not isinstance(version, str) or not version:
        raise ValueError("'weight_version' must be a non-empty text")
    return info, version
