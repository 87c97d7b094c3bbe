"""Lets vLLM's engine core deliver tokens in larger pieces.

After every step the core sends each running request's one token to the front end, with three small arrays for its
log-probability: packed, unpacked and looked at in Python, in two processes that both wait for the interpreter. A
request that is answered whole needs none of that before it ends. So tokens of such requests are held in the core
until there are LIMIT of them.

Nobody sees the difference but for one: of a request that is aborted up to LIMIT - 1 last tokens are lost. What
changes a version ends the pieces, so spans of weight versions stay exact.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

LIMIT_VARIABLE = "RLTOOL_OUTPUT_TOKENS"

WHOLE_OR_ALONE = (
    "new_prompt_logprobs_tensors",
    "pooling_output",
    "routed_experts",
    "mm_cache_miss_hashes",
    "new_sampling_mask",
    "prompt_token_id_logprobs",
)
"""Fields of an EngineCoreOutput that are not joined: one that has any of them goes as it is."""
LAST_COUNTS = (
    "finish_reason",
    "stop_reason",
    "kv_transfer_params",
    "ec_transfer_params",
    "num_nans_in_logits",
    "spec_decode_metrics",
)


@dataclass
class Held:
    """first: the oldest of the outputs, into which the others are joined; client: whose it is."""

    first: Any
    client: int
    logprobs: list[Any] = field(default_factory=list)


class OutputHolder:
    """Joins the outputs of one core. Knows vLLM's structures by their attributes alone."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"{LIMIT_VARIABLE} is {limit}: it must be at least 1")
        self._limit = limit
        self._held: dict[str, Held] = {}

    def sift(self, outputs: list[Any], client: int, may_wait: Callable[[str], bool]) -> list[Any]:
        """What of a step's outputs goes to the front end now, in order. may_wait: whether that request's tokens may."""
        ready: list[Any] = []
        for output in outputs:
            request = output.request_id
            if any(getattr(output, name, None) is not None for name in WHOLE_OR_ALONE):
                ready += [*self.release([request]), output]
                continue
            held = self._held.get(request)
            if held is None:
                if output.finish_reason is not None or not may_wait(request):
                    ready.append(output)
                    continue
                # The scheduler may go on with its list.
                output.new_token_ids = list(output.new_token_ids)
                held = self._held[request] = Held(output, client)
            else:
                _join(held.first, output)
            if output.new_logprobs is not None:
                held.logprobs.append(output.new_logprobs)
            if output.finish_reason is not None or len(held.first.new_token_ids) >= self._limit:
                ready += self.release([request])
        return ready

    def release(self, requests: Iterable[str]) -> list[Any]:
        """The held outputs of these requests, which are held no longer."""
        found = [self._held.pop(request) for request in requests if request in self._held]
        for held in found:
            held.first.new_logprobs = _joined(held.logprobs)
        return [held.first for held in found]

    def release_all(self) -> dict[int, list[Any]]:
        """All that is held, by client."""
        by_client: dict[int, list[Any]] = {}
        for request, held in list(self._held.items()):
            by_client.setdefault(held.client, []).extend(self.release([request]))
        return by_client

    def drop(self, requests: Iterable[str]) -> None:
        for request in requests:
            self._held.pop(request, None)


def _join(first: Any, output: Any) -> None:
    first.new_token_ids.extend(output.new_token_ids)
    if output.events:
        first.events = [*(first.events or ()), *output.events]
    for name in LAST_COUNTS:
        setattr(first, name, getattr(output, name))


def _joined(parts: list[Any]) -> Any:
    """vLLM's LogprobsLists of consecutive tokens as one; None where there are none.

    Token ids and log-probabilities are [tokens, 1 + alternatives], with as many alternatives as the request of that
    step's batch that asks for the most: the narrowest part has all that this request asked for.
    """
    if len(parts) < 2:
        return parts[0] if parts else None
    import numpy

    ids, logprobs, ranks = list(zip(*parts, strict=True))[:3]
    width = min(part.shape[1] for part in ids)
    ids, logprobs = (numpy.concatenate([part[:, :width] for part in column]) for column in (ids, logprobs))
    return type(parts[0])(ids, logprobs, numpy.concatenate(ranks), None)


def hold_outputs(environment: Mapping[str, str] = os.environ) -> None:
    """Let the engine core of this process hold as many tokens as the environment sets. Idempotent."""
    if LIMIT_VARIABLE not in environment:
        return
    try:
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine import EngineCoreOutputs
        from vllm.v1.engine.core import EngineCoreProc
    except ImportError:  # another vLLM: its own pace is slower, not wrong
        return
    if hasattr(EngineCoreProc, "rltool_holder"):
        return
    limit = int(environment[LIMIT_VARIABLE])
    attach, set_version = EngineCoreProc._attach_weight_version, EngineCoreProc.set_weight_version
    finish, abort = EngineCoreProc._send_finish_outputs_to_client, EngineCoreProc.abort_requests

    def holder(core: Any) -> OutputHolder:
        if core.rltool_holder is None:
            core.rltool_holder = OutputHolder(limit)
        return core.rltool_holder

    def send(core: Any, client: int, outputs: list[Any]) -> None:
        if outputs:
            message = EngineCoreOutputs(
                engine_index=core.engine_index, outputs=outputs, weight_version=core._weight_version
            )
            core.output_queue.put_nowait((client, message))

    def attach_weight_version(core: Any, outputs: dict[int, Any]) -> None:
        attach(core, outputs)
        requests = core.scheduler.requests

        def may_wait(request: str) -> bool:
            parameters = getattr(requests.get(request), "sampling_params", None)
            return (
                parameters is not None
                and parameters.output_kind is RequestOutputKind.FINAL_ONLY
                and not parameters.stop
            )

        for client, message in outputs.items():
            message.outputs = holder(core).sift(message.outputs, client, may_wait)

    def set_weight_version(core: Any, weight_version: str) -> None:
        for client, outputs in holder(core).release_all().items():
            send(core, client, outputs)
        set_version(core, weight_version)

    def send_finish_outputs(core: Any, req_ids: list[str], client_index: int, finish_reason: Any) -> None:
        send(core, client_index, holder(core).release(req_ids))
        finish(core, req_ids, client_index, finish_reason)

    def abort_requests(core: Any, request_ids: list[str]) -> Any:
        holder(core).drop(request_ids)  # the front end has answered already, with what it had
        return abort(core, request_ids)

    patched = cast(Any, EngineCoreProc)
    patched.rltool_holder = None
    patched._attach_weight_version = attach_weight_version
    patched.set_weight_version = set_weight_version
    patched._send_finish_outputs_to_client = send_finish_outputs
    patched.abort_requests = abort_requests
