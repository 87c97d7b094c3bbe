"""A pause that keeps its requests; POST /rltool/update_weights: that and an update; /rltool/finish_weight_update: what
makes it the engine's weights, with the end of the pause.

Asked one by one these are six requests and nine calls of the engine core, 17 ms of a weight sync whose bytes take
42 ms (two H200, a model of 7B). They are two because the trainer decides: what it aborted half-way it
completes with other bytes (rltool.weights.transports.nccl_sender), and then does not let the engine finish.

AsyncLLM.pause_generation (v1/engine/async_llm.py of 0.32) sleeps for 0.02 s at its end, so that the last outputs of
requests that it has ended are on their way before it returns; nothing depends on that, and a pause with mode=keep ends
none. Of a weight sync from GPU to GPU it would be half, so `pause` leaves it out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs

from rltool.engines.plugin.workers import ask_workers, failure_in

logger = logging.getLogger(__name__)

PAUSE_PATH = "/pause"
UPDATE_PATH = "/rltool/update_weights"
FINISH_PATH = "/rltool/finish_weight_update"


def keeps_requests(query: bytes) -> bool:
    """Whether a query string asks for this kind of pause, and nothing else."""
    return parse_qs(query.decode("latin-1")) == {"mode": ["keep"]}


async def pause(engine_client: Any) -> bool:
    """What the route does, less the sleep; False, and nothing is done, where this vLLM does it in another way."""
    forget_media = getattr(getattr(engine_client, "renderer", None), "clear_mm_cache_async", None)
    pause_scheduler = getattr(getattr(engine_client, "engine_core", None), "pause_scheduler_async", None)
    if forget_media is None or pause_scheduler is None:
        return False
    await forget_media()
    await pause_scheduler(mode="keep", clear_cache=True)
    return True


async def update_weights(engine: Any, body: Any) -> tuple[int, dict[str, Any]]:
    """(status, JSON) of POST UPDATE_PATH {"update_info"}, as for vLLM's /update_weights. 500 with the reason where a
    worker could not take it: the weights may be a mixture then. engine: vLLM's AsyncLLM."""
    info = body.get("update_info") if isinstance(body, Mapping) else None
    if not isinstance(info, dict):
        return 400, {"error": f"POST {UPDATE_PATH}: 'update_info' must be an object"}
    try:
        if not await pause(engine):
            await engine.pause_generation(mode="keep")
        failure = failure_in(await ask_workers(engine, "rltool_update_weights", info))
    except Exception as error:  # its text is for the trainer
        failure = f"{type(error).__name__}: {error}"
    return (500, {"error": failure}) if failure else (200, {"status": "updated"})


async def finish_update(engine: Any, body: Any) -> tuple[int, dict[str, Any]]:
    """(status, JSON) of POST FINISH_PATH {"weight_version", "resume"}, as for vLLM's /finish_weight_update; then the
    prefix cache is dropped, and with "resume": true generation goes on. Requests that run are kept, and computed anew.
    500 with the reason, and the engine stays paused, where a worker lacks tensors."""
    version = body.get("weight_version") if isinstance(body, Mapping) else None
    if not isinstance(version, str) or not version:
        return 400, {"error": f"POST {FINISH_PATH}: 'weight_version' must be a non-empty text"}
    try:
        failure = failure_in(await ask_workers(engine, "rltool_finish_update"))
        if not failure:
            # In the engine core one after the other. The pause has dropped the cache; what runs may hold blocks of it.
            _, dropped = await asyncio.gather(engine.update_weight_version(version), engine.reset_prefix_cache(True))
            if not dropped:
                logger.warning("blocks of the prefix cache from before weights %s are held", version)
            if body.get("resume") is True:
                await engine.resume_generation()
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    return (500, {"error": failure}) if failure else (200, {"weight_version": version})
