"""Questions to all workers of a vLLM server.

AsyncLLM.collective_rpc answers for the first of several data-parallel replicas alone, and where a worker raises, the
replies of the workers behind it stay in their queues (get_response in v1/executor/multiproc_executor.py of 0.32): each
later answer of theirs is the one before it. So our methods answer with a text in place of raising, and all are heard.
"""

from __future__ import annotations

from typing import Any


async def ask_workers(engine_client: Any, method: str, *args: Any) -> list[Any]:
    """The answer of every worker of every replica. engine_client: vLLM's AsyncLLM."""
    ask_all = getattr(getattr(engine_client, "engine_core", None), "call_utility_all_async", None)
    if ask_all is None:  # another vLLM
        return await engine_client.collective_rpc(method, args=args)
    replicas = await ask_all("collective_rpc", method, None, args, None)
    return [answer for answers in replicas for answer in answers]


def failure_in(answers: list[str]) -> str:
    """What workers answered that "" is not; "": all is well."""
    return "; ".join(sorted({answer for answer in answers if answer}))
