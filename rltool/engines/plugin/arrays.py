"""vLLM's token route with its samples as arrays: {request_id, choices: [{index, token_ids, logprobs, finish_reason,
stop_reason, weight_versions, sampling_mask}], usage}, where token_ids and logprobs are rltool.engines.arrays, as are
ids and counts of sampling_mask (rltool.engines.dialects.sampling_mask), which is there where alternatives were asked
for; routed_experts is there, as on vLLM's own route, where the server returns them; speculative_decoding, of each
choice, where it has --per-request-spec-decode-metrics; prompt_token_ids where return_token_ids asked for them.

vLLM builds two pydantic objects and a dictionary for every token, in the one process that also feeds the engine.
Everything but the reply stays vLLM's: its checks of the request, its errors, and the abort when the client leaves.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from contextvars import ContextVar
from typing import Any

from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateResponseBase
from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
from vllm.logprobs import FlatLogprobs

from rltool.engines import arrays
from rltool.engines.dialects.sampling_mask import find_mask

MARK = "rltool.arrays"
"""Key in the ASGI scope of a request that wants arrays."""

_wanted: ContextVar[bool] = ContextVar("rltool_arrays", default=False)


class ArrayReply(GenerateResponseBase):
    """What vLLM's route answers with: it encodes what model_dump returns."""

    content: dict[str, Any] = {}

    def model_dump(self, **_: Any) -> dict[str, Any]:
        return self.content


class ArrayServing(ServingTokens):
    """Replaces ServingTokens (by class, on the living object); requests without the mark get vLLM's own replies."""

    async def serve_tokens(self, request: Any, raw_request: Any = None) -> Any:
        wanted = raw_request is not None and bool(raw_request.scope.get(MARK))
        _wanted.set(wanted)
        if wanted:
            request.sampling_params.flat_logprobs = True
        return await super().serve_tokens(request, raw_request)

    def serve_tokens_stream_generator(
        self,
        request: Any,
        result_generator: AsyncGenerator[Any, None],
        request_id: str,
        model_name: str,
        request_metadata: Any,
    ) -> AsyncGenerator[str, None]:
        if not _wanted.get():  # the generator itself may run in another context
            return super().serve_tokens_stream_generator(
                request, result_generator, request_id, model_name, request_metadata
            )
        return self._array_events(result_generator, request_id, with_prompt=bool(request.return_token_ids))

    async def _array_events(
        self, result_generator: AsyncGenerator[Any, None], request_id: str, *, with_prompt: bool
    ) -> AsyncGenerator[str, None]:
        """Of one sample: choices as in the whole reply, with its new tokens alone, the versions of all so far, and a
        finish_reason in the last. prompt_token_ids: in the first, as in the whole reply."""
        try:
            async for result in result_generator:
                for output in result.outputs:
                    self._raise_if_error(output.finish_reason, request_id)
                    choice = array_choice(output)
                    if output.finish_reason is None:
                        choice["finish_reason"] = None
                        choice["weight_versions"] = versions_so_far(self.engine_client, request_id)
                    event: dict[str, Any] = {"choices": [choice]}
                    if with_prompt:
                        event["prompt_token_ids"], with_prompt = list(result.prompt_token_ids), False
                    yield f"data: {json.dumps(event)}\n\n"
        except Exception as error:  # the status has been sent
            yield f"data: {self.create_streaming_error_response(error)}\n\n"
        yield "data: [DONE]\n\n"

    async def serve_tokens_full_generator(
        self,
        request: Any,
        result_generator: AsyncGenerator[Any, None],
        request_id: str,
        model_name: str,
        request_metadata: Any,
        **further: Any,  # derender_request since 0.33: None, but for output_mode = "derender"
    ) -> Any:
        if not _wanted.get():
            return await super().serve_tokens_full_generator(
                request, result_generator, request_id, model_name, request_metadata, **further
            )
        final = None
        async for result in result_generator:
            final = result
        if final is None:
            raise RuntimeError("the engine ended a request without a result")
        for output in final.outputs:
            self._raise_if_error(output.finish_reason, request_id)
        alternatives = (request.sampling_params.logprobs or 0) > 0
        usage: dict[str, Any] = {
            "prompt_tokens": len(final.prompt_token_ids),
            "completion_tokens": sum(len(output.token_ids) for output in final.outputs),
        }
        if final.num_cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": final.num_cached_tokens}
        content = {
            "request_id": request_id,
            "choices": [array_choice(output, with_mask=alternatives) for output in final.outputs],
            "usage": usage,
        }
        if request.return_token_ids:  # of a prompt with pictures, as it was expanded
            content["prompt_token_ids"] = list(final.prompt_token_ids)
        return ArrayReply.model_construct(content=content)


def versions_so_far(engine_client: Any, request_id: str) -> list[dict[str, Any]]:
    """Spans of a request that runs, which vLLM itself tells at its end alone; [] where this version of vLLM keeps them
    elsewhere."""
    try:
        processor = engine_client.output_processor
        [internal] = processor.external_req_ids[request_id]
        spans = processor.request_states[internal]._weight_version_spans() or ()
    except (AttributeError, LookupError, ValueError):  # or the request has ended meanwhile: its end tells them
        return []
    return [{"version": span.version, "start": span.start, "end": span.end} for span in spans]


def array_choice(output: Any, *, with_mask: bool = False) -> dict[str, Any]:
    """Of a vllm.outputs.CompletionOutput."""
    spans = [
        span if isinstance(span, dict) else {"version": span.version, "start": span.start, "end": span.end}
        for span in output.weight_versions or ()
    ]
    choice = {
        "index": output.index,
        "token_ids": arrays.encode(arrays.TOKEN, output.token_ids),
        "logprobs": None
        if output.logprobs is None
        else arrays.encode(arrays.LOGPROB, sampled_logprobs(output.token_ids, output.logprobs)),
        "finish_reason": output.finish_reason or "stop",
        "stop_reason": output.stop_reason,
        "weight_versions": spans,
    }
    if with_mask and isinstance(output.logprobs, FlatLogprobs):
        choice["sampling_mask"] = encoded_mask(output.logprobs)
    drafts = getattr(output, "spec_decode_metrics", None)
    if drafts is not None:
        choice["speculative_decoding"] = drafts.to_dict()
    routed = getattr(output, "routed_experts", None)
    if routed is not None:
        from vllm.utils.serial_utils import numpy2base64  # of those versions that return them

        choice["routed_experts"] = numpy2base64(routed)
    return choice


def encoded_mask(logprobs: FlatLogprobs) -> dict[str, Any]:
    """ids and counts as arrays, mass: see FoundMask."""
    places = [
        zip(logprobs.token_ids[start:end], logprobs.logprobs[start:end], strict=True)
        for start, end in zip(logprobs.start_indices, logprobs.end_indices, strict=True)
    ]
    found = find_mask(places)
    ids, counts = (arrays.encode(arrays.TOKEN, values) for values in (found.mask.ids, found.mask.counts))
    return {"ids": ids, "counts": counts, "mass": found.mass}


def sampled_logprobs(token_ids: Sequence[int], logprobs: Any) -> list[float]:
    """The sampled tokens' own. They come first of their positions; NaN where the engine has none."""
    if isinstance(logprobs, FlatLogprobs):
        found = [(logprobs.token_ids[at], logprobs.logprobs[at]) for at in logprobs.start_indices]
        return [
            value if token == sampled else float("nan")
            for sampled, (token, value) in zip(token_ids, found, strict=True)
        ]
    return [
        position[token].logprob if token in position else float("nan")
        for token, position in zip(token_ids, logprobs, strict=True)
    ]


def serve_arrays(state: Any) -> None:
    """Makes the token route of this app answer marked requests with arrays. Idempotent."""
    serving = getattr(state, "serving_tokens", None)
    if type(serving) is ServingTokens:
        serving.__class__ = ArrayServing
