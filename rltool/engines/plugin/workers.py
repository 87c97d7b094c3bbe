"""Questions to all workers of a vLLM server.

AsyncLLM.collective_rpc answers for the first of several data-parallel replicas alone, and where a worker raises, the
replies of the workers behind it stay in their queues (get_response in v1/executor/multiproc_executor.py of 0.32): each
later answer of theirs is the one before it. So our methods answer with a text in place of raising, and all are heard;
vLLM's own weight methods are called through one of ours.
"""

from __future__ import annotations

from typing import Any

WEIGHT_METHODS = frozenset(
    {
        "init_weight_transfer_engine",
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
        "shutdown_weight_transfer_engine",
    }
)
"""Of vLLM's workers. Each is a route of vllm/entrypoints/rl/online as well."""
WEIGHT_ROUTES = frozenset(f"/{method}" for method in WEIGHT_METHODS)


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


def hear_all_workers(engine_client: Any) -> None:
    """From now on WEIGHT_METHODS that a worker refuses raise RuntimeError with all of their errors, when all have
    answered. Idempotent. engine_client: vLLM's AsyncLLM, whose weight methods go through its collective_rpc."""
    if "collective_rpc" in vars(engine_client):
        return
    ask_others = engine_client.collective_rpc

    async def collective_rpc(
        method: Any, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if method not in WEIGHT_METHODS:
            return await ask_others(method, timeout, args, kwargs)
        answers = await ask_workers(engine_client, "rltool_call", method, args, kwargs or {})
        if failure := failure_in(answers):
            raise RuntimeError(failure)
        return [None] * len(answers)

    engine_client.collective_rpc = collective_rpc
