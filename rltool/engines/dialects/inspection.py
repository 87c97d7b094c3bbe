"""Whether an engine holds the right weights: checksums of its parameters, and log-probabilities of
given tokens. The part of both dialects for `rltool debug weights`.

Sources: vllm/entrypoints/rl/online/api_router.py, sglang/srt/utils/weight_checker.py. For the layouts:
QKVParallelLinear, VocabParallelEmbedding and weight_checksum.py of vLLM 0.32; the same layers,
srt/utils/weight_checker.py, srt/layers/amx_utils.py, and tensor_hash in srt/managers/mm_utils.py of SGLang 0.5.23; the
digests are those of 0.5.17 too.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from rltool.engines.dialects.checksums import Checksums, ParameterLayout
from rltool.engines.dialects.classification import SglangClassification, VllmClassification
from rltool.engines.dialects.protocol import Inspects
from rltool.engines.plugin import sglang_api
from rltool.engines.types import EngineInfo, HttpRequest, TokenScores, json_list, json_object
from rltool.errors import MissingLogprobs, UsageError

MAX_LOGPROBS = 256
"""Of vLLM servers that rltool starts, unless --max-logprobs is set; vLLM's own default is 20
(vllm/config/model.py)."""
NO_SUCH_ROUTE = 404
"""What supported versions answer on the routes that later ones added."""


class VllmInspection(VllmClassification, Inspects):
    """See rltool.engines.dialects.protocol.Inspects."""

    def checksums(self) -> HttpRequest:
        # Since 0.32. The route also resets weights, so the plugin has one of its own that only reads (vllm_arrays.py).
        return HttpRequest("POST", "/weight_checker", {"action": "checksum"}, tolerate=(NO_SUCH_ROUTE,))

    def parse_checksums(self, reply: Any) -> Checksums | None:
        return None if reply == NO_SUCH_ROUTE else dict(reply["checksums"])

    def layout(self, info: EngineInfo, ranks: int, fallback_dtype: str) -> ParameterLayout | str:
        return ParameterLayout(info.dtype or fallback_dtype, ranks)

    def score(self, token_ids: Sequence[int], topk: int = 0, adapter: str = "") -> HttpRequest:
        parameters = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": topk, "detokenize": False}
        body = {"token_ids": list(token_ids), "sampling_params": parameters} | ({"model": adapter} if adapter else {})
        return HttpRequest("POST", sglang_api.VLLM_PATH, body)

    def parse_score(self, token_ids: Sequence[int], reply: Any) -> tuple[float, ...]:
        entries = json_list(json_object(reply).get("prompt_logprobs"))
        if entries is None or len(entries) != len(token_ids):
            raise _unscored(sglang_api.VLLM_PATH, token_ids, entries or ())
        return tuple(entry[str(token)]["logprob"] for token, entry in zip(token_ids[1:], entries[1:], strict=True))

    def parse_topk(self, token_ids: Sequence[int], reply: Any, topk: int) -> TokenScores:
        logprobs = self.parse_score(token_ids, reply)
        # The token itself stands among them also where it is none of the most probable.
        places = (entry.items() for entry in reply["prompt_logprobs"][1:])
        return _scores(logprobs, ([(found["logprob"], int(token)) for token, found in place] for place in places), topk)


class SglangInspection(SglangClassification, Inspects):
    """See rltool.engines.dialects.protocol.Inspects."""

    digests_by_device = True

    def checksums(self) -> HttpRequest:
        return HttpRequest("POST", "/weights_checker", {"action": "checksum"}, tolerate=(NO_SUCH_ROUTE,))

    def parse_checksums(self, reply: Any) -> Checksums | None:
        if reply == NO_SUCH_ROUTE:
            return None
        found: Checksums = {}
        for rank in reply["ranks"]:
            info = rank["parallelism_info"]
            # 0.5.23 has one for the model and one for each draft; they lie on one GPU.
            at = info if (each := json_list(info)) is None else each[0]
            where = f"dp{at['dp_rank']}:pp{at['pp_rank']}:tp{at['tp_rank']}"
            found |= {f"{where}:{name}": digest for name, digest in rank["checksums"].items()}
        return found

    def layout(self, info: EngineInfo, ranks: int, fallback_dtype: str) -> ParameterLayout | str:
        """A server whose dtype is "auto" reports that, and chooses by its model's configuration."""
        who = f"{info.dialect} {info.engine_version}"
        if info.dp_size > 1:
            return f"checksums were not compared: {who} with data parallelism cuts attention in a way of its own"
        if info.device is None:
            return f"checksums were not compared: {who} does not report its device, on which theirs depend"
        if info.device not in ("cpu", "cuda"):
            return f"checksums were not compared: {who} on {info.device} makes them in a way of its own"
        dtype = info.dtype or sglang_auto_dtype(info.model_config)
        if dtype is None:
            return f"checksums were not compared: {who} does not report its dtype; start it with --dtype"
        if info.device == "cpu" and dtype != "float32":
            return f"checksums were not compared: {who} on a CPU may have packed matrices in {dtype} for AMX"
        return ParameterLayout(dtype, ranks, "sha256_64" if info.device == "cpu" else "sglang_cuda")

    def score(self, token_ids: Sequence[int], topk: int = 0, adapter: str = "") -> HttpRequest:
        body = {
            "input_ids": list(token_ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        body |= {"top_logprobs_num": topk} if topk else {}
        return HttpRequest("POST", "/generate", body | ({"lora_path": adapter} if adapter else {}))

    def parse_score(self, token_ids: Sequence[int], reply: Any) -> tuple[float, ...]:
        entries = reply["meta_info"].get("input_token_logprobs") or ()
        # The last token of the vocabulary is reported as 0 (it takes it for a placeholder of an image's); its
        # log-probability is its own.
        given = [token if entry[1] == 0 else entry[1] for token, entry in zip(token_ids, entries, strict=False)]
        if len(entries) != len(token_ids) or given != list(token_ids):
            raise _unscored("/generate", token_ids, entries)
        return tuple(entry[0] for entry in entries[1:])

    def parse_topk(self, token_ids: Sequence[int], reply: Any, topk: int) -> TokenScores:
        logprobs = self.parse_score(token_ids, reply)
        entries = reply["meta_info"].get("input_top_logprobs") or ()
        if len(entries) != len(token_ids):
            raise _unscored("/generate", token_ids, entries)
        return _scores(logprobs, ([(value, token) for value, token, *_ in entry] for entry in entries[1:]), topk)


def sglang_auto_dtype(config: dict[str, Any]) -> str | None:
    """What SGLang serves a model in when --dtype is "auto", by its config.json; None where that is not known
    (_get_and_verify_dtype in srt/configs/model_config.py)."""
    found = config.get("dtype") or config.get("torch_dtype")
    if found != "float32":
        return found
    return "bfloat16" if str(config.get("model_type", "")).startswith("gemma") else "float16"


def max_logprobs(flags: Sequence[str]) -> float:
    """How many tokens a vLLM server with these flags gives the log-probabilities of in one place; inf: all.

    Raises UsageError for a value that is no number.
    """
    limit, words = str(MAX_LOGPROBS), [word for flag in flags for word in flag.split("=", 1)]
    for word, following in pairwise([*words, ""]):
        if word.replace("_", "-") == "--max-logprobs":
            limit = following
    if not limit.removeprefix("-").isdigit():
        raise UsageError(f"--max-logprobs {limit!r}: expected a number, -1 for no limit")
    return math.inf if limit.startswith("-") else int(limit)


def _scores(logprobs: tuple[float, ...], places: Iterable[list[tuple[float, int]]], topk: int) -> TokenScores:
    """places: of each token the (log-probability, id) of others in its place, in any order."""
    ids, values = array("i"), array("f")
    for place in places:
        best = sorted(place, reverse=True)[:topk]
        lacking = topk - len(best)
        ids.extend([*(token for _, token in best), *[-1] * lacking])
        values.extend([*(value for value, _ in best), *[-math.inf] * lacking])
    return TokenScores(logprobs, ids, values)


def _unscored(path: str, token_ids: Sequence[int], entries: Sequence[Any]) -> MissingLogprobs:
    return MissingLogprobs(
        f"{path} gave no log-probability for each of {len(token_ids)} prompt tokens ({len(entries)} entries came: "
        f"{str(entries[:3])[:120]})"
    )
