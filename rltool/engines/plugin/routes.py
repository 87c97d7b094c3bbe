"""Routes of a vLLM server that are rltool's, or do what vLLM's own do and mend it; rltool.engines.plugin.server puts
them in front of vLLM's application.

PREFETCH_PATH: every worker gets a version of the weights while the engine generates, from a store of deltas or from the
trainer. Answered when all have it.

PAUSE_PATH, UPDATE_PATH (that and an update) and FINISH_PATH (what makes it the engine's weights, with
the end of the pause): asked one by one these are six requests and nine calls of the engine core, 17 ms of a weight sync
whose bytes take 42 ms (two H200, a model of 7B). They are two because the trainer decides: what it aborted half-way it
completes with other bytes (rltool.weights.transports.nccl_sender), and then does not let the engine finish.

ABORT_PATH: vLLM's own, after which its leak is mended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs

from rltool.engines.plugin.worker import ask_workers, failure_in

logger = logging.getLogger(__name__)

ABORT_PATH = "/inference/v1/abort_requests"
PREFETCH_PATH = "/rltool/prefetch"
PAUSE_PATH = "/pause"
UPDATE_PATH = "/rltool/update_weights"
FINISH_PATH = "/rltool/finish_weight_update"
POLL_SECONDS, ADAPTER_POLL_SECONDS = 0.05, 0.01
"""Between two questions to the workers, each of which takes its turn between two of the engine's steps. An adapter is
there sooner."""
LONGEST_SECONDS = 86400.0


async def prefetch(engine: Any, body: Any, place: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
    """(status, JSON) of POST PREFETCH_PATH {"version", "seconds", "store" or "announced", "peft" for an adapter}.

    store: an address; announced: an update info of rltool.engines.transfer.wire; peft: adapter_config.json. 409 with
    the reason where a worker cannot have the version. engine: vLLM's AsyncLLM; place: adapters.place_for."""
    try:
        version, seconds, source = _parse_prefetch(body)
    except ValueError as error:
        return 400, {"error": f"POST {PREFETCH_PATH}: {error}"}
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    failures = await ask_workers(engine, "rltool_prefetch", version, seconds, source, place)
    while not any(failures):
        answers = await ask_workers(engine, "rltool_prefetched", version)
        failures = [failure for _, failure in answers]
        if all(done for done, _ in answers):
            break
        if loop.time() > until:
            failures = [f"weights {version} did not come within {seconds:g} s"]
        else:
            await asyncio.sleep(POLL_SECONDS if place is None else ADAPTER_POLL_SECONDS)
    failure = failure_in(failures)
    return (409, {"error": failure}) if failure else (200, {"version": version})


def _parse_prefetch(body: Any) -> tuple[str, float, str | dict[str, Any]]:
    if not isinstance(body, Mapping):
        raise ValueError("the body must be an object with version, seconds, and store or announced")
    version, seconds = body.get("version"), body.get("seconds")
    if not isinstance(version, str) or not version:
        raise ValueError("'version' must be a non-empty text")
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not 0 < seconds <= LONGEST_SECONDS:
        raise ValueError(f"'seconds' must be a number above 0 and up to {LONGEST_SECONDS:g}")
    store, announced, peft = body.get("store"), body.get("announced"), body.get("peft")
    if peft is not None and not isinstance(peft, dict):
        raise ValueError("'peft' must be an object: what adapter_config.json holds")
    if isinstance(store, str) and store and announced is None:
        return version, float(seconds), store
    if isinstance(announced, dict) and store is None:
        return version, float(seconds), announced
    raise ValueError("either 'store' must be a non-empty text, or 'announced' an object")


def pause_mode(query: bytes) -> str | None:
    """That a query string asks for, where it asks for nothing else."""
    asked = parse_qs(query.decode("latin-1"))
    return asked["mode"][0] if asked.keys() == {"mode"} and asked["mode"] in (["keep"], ["abort"], ["wait"]) else None


async def pause(engine_client: Any, mode: str = "keep") -> bool:
    """What the route of 0.32 does, less a sleep; False, and nothing is done, where this vLLM does it in another way.

    AsyncLLM.pause_generation (v1/engine/async_llm.py of 0.32) sleeps for 0.02 s at its end, so that the last outputs of
    requests that it has ended are on their way before it returns; nothing depends on that, and a pause with mode=keep
    ends none. Of a weight sync from GPU to GPU it would be half. That of 0.33 has the core refuse new requests (503)
    for the other modes: a router would take the engine out. Here they wait, as in 0.32."""
    core = getattr(engine_client, "engine_core", None)
    forget_media = getattr(getattr(engine_client, "renderer", None), "clear_mm_cache_async", None)
    pause_scheduler = getattr(core, "pause_scheduler_async", None)
    if forget_media is None or pause_scheduler is None:
        return False
    if mode != "keep" and not hasattr(core, "pause_generation_async"):
        return False
    await forget_media()
    await pause_scheduler(mode=mode, clear_cache=True)
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


async def forget_aborted_parents(engine_client: Any) -> None:
    """Mends a leak of vLLM 0.32: what it keeps of requests with n > 1 that were aborted by the id that their client
    gave. Removes parents without a sample that is still generated; to be called after the route has answered.

    OutputProcessor.abort_requests (v1/engine/output_processor.py) ends the n samples of such a request and leaves their
    parent in `parent_requests`, which holds all their tokens and log-probabilities, for as long as the server lives.
    Every sync that aborts would add a batch to it. A request whose client goes away is ended by its parent's id, which
    removes it; only clients that want the partial tokens meet this.

    A parent has all its samples before vLLM lists it, so one without any is done with. The route's own task has started
    by then; if it has not, the next abort removes what it leaves.
    """
    await asyncio.sleep(0)
    processor = getattr(engine_client, "output_processor", None)
    parents: dict[str, Any] = getattr(processor, "parent_requests", {})  # another vLLM may keep none
    for request_id in [request_id for request_id, parent in parents.items() if not parent.child_requests]:
        del parents[request_id]
