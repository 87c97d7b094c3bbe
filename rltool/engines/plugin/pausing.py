"""A pause that keeps its requests, without the 0.02 s that vLLM's route sleeps at its end.

AsyncLLM.pause_generation (v1/engine/async_llm.py of 0.32) sleeps so that the last outputs of requests that it has ended
are on their way before it returns; nothing depends on that, and a pause with mode=keep ends none.
Of a weight sync from GPU to GPU it would be half.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs

PAUSE_PATH = "/pause"


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
