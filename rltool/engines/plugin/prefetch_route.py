"""POST /rltool/prefetch: every worker fetches a version of the weights from a store of deltas, while the engine
generates. Answered when all have it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

PREFETCH_PATH = "/rltool/prefetch"
POLL_SECONDS = 0.05
"""Between two questions to the workers, each of which takes its turn between two of the engine's steps."""
LONGEST_SECONDS = 86400.0


class Workers(Protocol):
    """The part of vLLM's AsyncLLM that is used. An answer for each worker; with data parallelism, of one replica's."""

    async def collective_rpc(self, method: str, *, args: tuple[Any, ...] = ()) -> list[Any]: ...


async def prefetch(workers: Workers, body: Any) -> tuple[int, dict[str, Any]]:
    """(status, JSON) of POST PREFETCH_PATH {"store": address, "version", "seconds"}; 409 with the reason where a worker
    cannot have it."""
    try:
        store, version, seconds = _parse(body)
    except ValueError as error:
        return 400, {"error": f"POST {PREFETCH_PATH}: {error}"}
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    failures = await workers.collective_rpc("rltool_prefetch", args=(store, version, seconds))
    while not any(failures):
        answers = await workers.collective_rpc("rltool_prefetched", args=(version,))
        failures = [failure for _, failure in answers]
        if all(done for done, _ in answers):
            break
        if loop.time() > until:
            failures = [f"weights {version} did not come within {seconds:g} s"]
        else:
            await asyncio.sleep(POLL_SECONDS)
    reasons = sorted({failure for failure in failures if failure})
    return (409, {"error": "; ".join(reasons)}) if reasons else (200, {"version": version})


def _parse(body: Any) -> tuple[str, str, float]:
    if not isinstance(body, Mapping):
        raise ValueError("the body must be an object with store, version and seconds")
    store, version, seconds = body.get("store"), body.get("version"), body.get("seconds")
    if not isinstance(store, str) or not isinstance(version, str) or not store or not version:
        raise ValueError("'store' and 'version' must be non-empty texts")
    if type(seconds) not in (int, float) or not 0 < seconds <= LONGEST_SECONDS:
        raise ValueError(f"'seconds' must be a number above 0 and up to {LONGEST_SECONDS:g}")
    return store, version, float(seconds)
