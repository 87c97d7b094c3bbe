"""SGLang's /generate in terms of vLLM's /inference/v1/generate, so that sglang-router can route to a vLLM server. Pure.

Sources: sglang/srt/managers/io_struct.py (GenerateReqInput), sglang/srt/sampling/sampling_params.py, and the replies of
SGLang 0.5.23. A parameter that cannot be honoured is refused by name: SGLang itself answers 500 there, and ignoring it
would sample otherwise.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from rltool.engines import arrays

VLLM_PATH = "/inference/v1/generate"
MISSING_LOGPROB = -9999.0
"""What vLLM sends for a log-probability that it does not have, that is NaN or that is -inf (serving.py,
_clamp_logprob)."""
DEFAULT_MAX_NEW_TOKENS = 128
"""SGLang's own default."""

SAMPLING_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "repetition_penalty": "repetition_penalty",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
    "n": "n",
    "sampling_seed": "seed",
}
"""SGLang's name -> vLLM's name, where both mean the same."""

TEXT_ONLY = frozenset({"skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"})
"""Sampling parameters that shape the text alone, which is empty here: token ids come back."""

KNOWN_FIELDS = frozenset({"input_ids", "sampling_params", "return_logprob", "rid", "lora_path", "stream"})
EMPTY = (None, False, "", [], {})
"""A field that is not supported may be present with one of these: routers write out their defaults."""
HARMLESS = {"logprob_start_len": (-1,), "top_logprobs_num": (0,), "log_metrics": (True,)}
"""Further fields with the values that ask for nothing."""


class BadRequest(ValueError):
    """The request cannot be honoured; the message names the field."""


def to_vllm(body: Any) -> dict[str, Any]:
    """The body for VLLM_PATH. Raises BadRequest."""
    if not isinstance(body, Mapping):
        raise BadRequest("the body must be a JSON object")
    for name, value in body.items():
        if name not in KNOWN_FIELDS and value not in EMPTY and value not in HARMLESS.get(name, ()):
            raise BadRequest(f"field {name!r} = {value!r} is not supported by a vLLM engine of rltool")
    ids = body.get("input_ids")
    if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
        raise BadRequest(
            "'input_ids' must be one non-empty list of token ids: neither text nor a batch of prompts is supported"
        )
    request: dict[str, Any] = {"token_ids": ids, "sampling_params": _sampling(body)}
    rid = body.get("rid")
    if rid is not None:
        if not isinstance(rid, str):
            raise BadRequest("'rid' must be a string")
        request["request_id"] = rid
    if body.get("stream"):
        if request["sampling_params"].get("n", 1) > 1:
            raise BadRequest("'stream' is supported for one sample alone")
        request["stream"] = True
    adapter = body.get("lora_path")
    if adapter:
        if not isinstance(adapter, str):
            raise BadRequest("'lora_path' must be the name of one adapter")
        request["model"] = adapter
    return request


def _sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    given = body.get("sampling_params") or {}
    if not isinstance(given, Mapping):
        raise BadRequest("'sampling_params' must be one object: a list of them is not supported")
    sampling: dict[str, Any] = {"max_tokens": DEFAULT_MAX_NEW_TOKENS, "detokenize": False}
    for name, value in given.items():
        if name in TEXT_ONLY or ((name == "stop" or name not in SAMPLING_NAMES) and value in EMPTY):
            continue
        if name not in SAMPLING_NAMES:
            raise BadRequest(f"sampling parameter {name!r} is not supported by a vLLM engine of rltool")
        if value is not None:
            sampling[SAMPLING_NAMES[name]] = value
    if sampling.get("stop"):
        sampling["detokenize"] = True  # vLLM refuses stop strings without
    if body.get("return_logprob"):
        sampling["logprobs"] = 0  # the sampled token's own
    return sampling


def from_vllm(request: Mapping[str, Any], reply: Mapping[str, Any]) -> dict[str, Any] | list[dict[str, Any]]:
    """SGLang's reply: an object, or for n > 1 a list of them. `request` is what to_vllm made."""
    samples = [
        _sample(request, reply, choice) for choice in sorted(reply["choices"], key=lambda choice: choice["index"])
    ]
    return samples if request["sampling_params"].get("n", 1) > 1 else samples[0]


class Events:
    """The events of vLLM's route as SGLang's with --incremental-streaming-output: each with its new tokens alone.
    `request` is what to_vllm made."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        self._request, self._rest, self._tokens = request, b"", 0

    def feed(self, data: bytes) -> bytes:
        """What the next bytes of vLLM's route become."""
        *events, self._rest = (self._rest + data).split(b"\n\n")
        return b"".join(self._event(event) for event in events)

    def _event(self, event: bytes) -> bytes:
        if event == b"data: [DONE]":
            return event + b"\n\n"
        found = json.loads(event.removeprefix(b"data: "))
        if "error" not in found:
            [choice] = found["choices"]
            sample = _sample(self._request, found, choice)
            meta = sample["meta_info"]
            meta["completion_tokens"] = self._tokens = self._tokens + len(sample["output_ids"])
            if choice["finish_reason"] is None:
                meta["finish_reason"] = None
            elif choice["finish_reason"] == "length":
                meta["finish_reason"]["length"] = self._tokens
            found = sample
        return b"data: " + json.dumps(found).encode() + b"\n\n"


def _sample(request: Mapping[str, Any], reply: Mapping[str, Any], choice: Mapping[str, Any]) -> dict[str, Any]:
    ids, logprobs = _tokens_and_logprobs(choice)
    usage = reply.get("usage") or {}
    spans = choice.get("weight_versions") or []
    rid = request.get("request_id", reply.get("request_id"))
    meta: dict[str, Any] = {
        # vLLM has one id for the n samples of a prompt; SGLang's ids are unique
        "id": rid if request["sampling_params"].get("n", 1) == 1 else f"{rid}_{choice['index']}",
        "finish_reason": _finish_reason(choice, ids),
        "prompt_tokens": len(request["token_ids"]),
        "completion_tokens": len(ids),
        "weight_version": spans[-1]["version"] if spans else None,
        "weight_versions": spans,
    }
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    if cached is not None and len(reply["choices"]) == 1:  # of several, vLLM counts for the one that ended last
        meta["cached_tokens"] = cached
    drafts = choice.get("speculative_decoding")
    if drafts:
        meta["spec_verify_ct"] = drafts["num_spec_steps"]
        meta["spec_num_correct_drafts"] = drafts["num_accepted_draft_tokens"]
    if logprobs is not None:
        meta["output_token_logprobs"] = [[value, token, None] for token, value in zip(ids, logprobs, strict=True)]
    return {"text": "", "output_ids": ids, "meta_info": meta}


def _tokens_and_logprobs(choice: Mapping[str, Any]) -> tuple[list[int], list[float | None] | None]:
    """Of vLLM's own choice or of one with arrays. None in place of a log-probability that vLLM does not have: its
    stand-in is a number that a client would take for one."""
    found = choice.get("logprobs")
    if isinstance(choice.get("token_ids"), str):
        ids = [int(token) for token in arrays.decode(arrays.TOKEN, choice["token_ids"])]
        values = None if found is None else arrays.decode(arrays.LOGPROB, found)
        return ids, None if values is None else [value if math.isfinite(value) else None for value in values]
    content = (found or {}).get("content")
    if content is None:
        return choice.get("token_ids") or [], None
    values = [None if entry["logprob"] <= MISSING_LOGPROB else entry["logprob"] for entry in content]
    return [entry["token_id"] for entry in content], values


def _finish_reason(choice: Mapping[str, Any], ids: list[int]) -> dict[str, Any]:
    reason = choice.get("finish_reason")
    if reason == "length":
        return {"type": "length", "length": len(ids)}
    if reason == "stop":
        matched = choice.get("stop_reason")  # None where the model's own end token came
        return {"type": "stop", "matched": matched if matched is not None else (ids[-1] if ids else None)}
    return {"type": "abort", "message": f"vLLM ended the request with finish_reason {reason!r}"}
