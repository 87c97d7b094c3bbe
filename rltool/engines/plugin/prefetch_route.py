"""POST /rltool/prefetch: every worker gets a version of the weights while the engine generates, from a store of deltas
or from the trainer. Answered when all have it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from rltool.engines.plugin.workers import ask_workers, failure_in

PREFETCH_PATH = "/rltool/prefetch"
POLL_SECONDS, ADAPTER_POLL_SECONDS = 0.05, 0.01
"""Between two questions to the workers, each of which takes its turn between two of the engine's steps. An adapter is
there sooner."""
LONGEST_SECONDS = 86400.0


async def prefetch(engine: Any, body: Any, place: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
    """(status, JSON) of POST PREFETCH_PATH {"version", "seconds", "store" or "announced", "peft" for an adapter}.

    store: an address; announced: an update info of rltool.engines.transfer.wire; peft: adapter_config.json. 409 with
    the reason where a worker cannot have the version. engine: vLLM's AsyncLLM; place: adapters.place_for."""
    try:
        version, seconds, source = _parse(body)
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


def _parse(body: Any) -> tuple[str, float, str | dict[str, Any]]:
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
