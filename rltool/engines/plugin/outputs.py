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
from operator import attrgetter
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
    """first: the oldest of the outputs, into which the others are joined when it is sent; client: whose it is."""

    first: Any
    client: int
    tokens: list[int]
    last: Any
    logprobs: list[Any] = field(default_factory=list)


class OutputHolder:
    """Joins the outputs of one core. Knows vLLM's structures by their attributes alone.

    `sift` runs between two steps of the engine for every running request: a microsecond there is half a millisecond of
    a step with 512 of them.
    """

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"{LIMIT_VARIABLE} is {limit}: it must be at least 1")
        self._limit = limit
        self._held: dict[str, Held] = {}
        self._alone: Callable[[Any], tuple[Any, ...]] | None = None

    def sift(self, outputs: list[Any], client: int, may_wait: Callable[[str], bool]) -> list[Any]:
        """What of a step's outputs goes to the front end now, in order. may_wait: whether that request's tokens may."""
        if not outputs:
            return []
        alone = self._alone
        if alone is None:  # those fields that this version of vLLM has
            alone = self._alone = _getter([name for name in WHOLE_OR_ALONE if hasattr(outputs[0], name)])
        ready: list[Any] = []
        held_requests, limit = self._held, self._limit
        for output in outputs:
            request = output.request_id
            for value in alone(output):
                if value is not None:
                    ready += [*self.release([request]), output]
                    break
            else:
                held, finished = held_requests.get(request), output.finish_reason is not None
                if held is None:
                    if finished or not may_wait(request):
                        ready.append(output)
                        continue
                    # A list of its own: the scheduler may go on with that of the output.
                    held = held_requests[request] = Held(output, client, list(output.new_token_ids), output)
                else:
                    held.tokens += output.new_token_ids
                    held.last = output
                    if output.events:
                        held.first.events = [*(held.first.events or ()), *output.events]
                if output.new_logprobs is not None:
                    held.logprobs.append(output.new_logprobs)
                if finished or len(held.tokens) >= limit:
                    ready += self.release([request])
        return ready

    def release(self, requests: Iterable[str]) -> list[Any]:
        """The held outputs of these requests, which are held no longer."""
        found = [self._held.pop(request) for request in requests if request in self._held]
        return [_whole(held) for held in found]

    def release_all(self) -> dict[int, list[Any]]:
        """All that is held, by client."""
        by_client: dict[int, list[Any]] = {}
        for request, held in list(self._held.items()):
            by_client.setdefault(held.client, []).extend(self.release([request]))
        return by_client

    def drop(self, requests: Iterable[str]) -> None:
        for request in requests:
            self._held.pop(request, None)


def _getter(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    if len(names) > 1:
        return attrgetter(*names)
    return lambda output: tuple(getattr(output, name) for name in names)


def _whole(held: Held) -> Any:
    first, last = held.first, held.last
    first.new_token_ids, first.new_logprobs = held.tokens, _joined(held.logprobs)
    if last is not first:
        for name in LAST_COUNTS:
            setattr(first, name, getattr(last, name))
    return first


def _joined(parts: list[Any]) -> Any:
    """vLLM's LogprobsLists of consecutive tokens as one; None where there are none.

    Token ids and log-probabilities are [tokens, 1 + alternatives], with as many alternatives as the request of that
    step's batch that asks for the most: the narrowest part has all that this request asked for.
    """
    if len(parts) < 2:
        return parts[0] if parts else None
    import numpy

    ids, logprobs, ranks = [[part[column] for part in parts] for column in range(3)]
    width = ids[0].shape[1]
    if any(part.shape[1] != width for part in ids):
        width = min(part.shape[1] for part in ids)
        ids, logprobs = ([part[:, :width] for part in column] for column in (ids, logprobs))
    return type(parts[0])(numpy.concatenate(ids), numpy.concatenate(logprobs), numpy.concatenate(ranks), None)


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

    def send_finish_outputs(core: Any, req_ids: list[str], client_index: int, *how: Any) -> None:
        send(core, client_index, holder(core).release(req_ids))
        finish(core, req_ids, client_index, *how)  # a reason, and an error since 0.33

    def abort_requests(core: Any, request_ids: list[str]) -> Any:
        holder(core).drop(request_ids)  # the front end has answered already, with what it had
        return abort(core, request_ids)

    patched = cast(Any, EngineCoreProc)
    patched.rltool_holder = None
    patched._attach_weight_version = attach_weight_version
    patched.set_weight_version = set_weight_version
    patched._send_finish_outputs_to_client = send_finish_outputs
    patched.abort_requests = abort_requests
