"""Mends a leak of vLLM 0.32: what it keeps of requests with n > 1 that were aborted by the id that their client gave.

OutputProcessor.abort_requests (v1/engine/output_processor.py) ends the n samples of such a request and leaves their
parent in `parent_requests`, which holds all their tokens and log-probabilities, for as long as the server lives. Every
sync that aborts would add a batch to it. A request whose client goes away is ended by its parent's id, which removes
it; only clients that want the partial tokens meet this.
"""

from __future__ import annotations

import asyncio
from typing import Any

ABORT_PATH = "/inference/v1/abort_requests"


async def forget_aborted_parents(engine_client: Any) -> None:
    """Remove parents without a sample that is still generated; to be called after the route has answered.

    A parent has all its samples before vLLM lists it, so one without any is done with. The route's own task has started
    by then; if it has not, the next abort removes what it leaves.
    """
    await asyncio.sleep(0)
    processor = getattr(engine_client, "output_processor", None)
    parents: dict[str, Any] = getattr(processor, "parent_requests", {})  # another vLLM may keep none
    for request_id in [request_id for request_id, parent in parents.items() if not parent.child_requests]:
        del parents[request_id]
