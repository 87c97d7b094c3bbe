"""How an engine keeps a model's parameters and what its digests of them are, where that can be worked out beside it:
for vLLM and SGLang. Pure.

Sources: QKVParallelLinear, VocabParallelEmbedding and weight_checksum.py of vLLM 0.32; the same layers,
srt/utils/weight_checker.py, srt/layers/amx_utils.py, and tensor_hash in srt/managers/mm_utils.py of SGLang 0.5.23;
the digests are those of 0.5.17 too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rltool.engines.checksums import Checksums, tensor_parallel_size
from rltool.engines.types import EngineInfo

DigestKind = Literal["sha256", "sha256_64", "sglang_cuda"]
"""SHA-256; its first 64 bits; what SGLang's kernel makes of a tensor on a GPU (rltool.weights.digests)."""


@dataclass(frozen=True)
class ParameterLayout:
    """dtype: torch's name; tensor_parallel: how many ranks the parameters are cut over; digest: of a rank's part."""

    dtype: str
    tensor_parallel: int = 1
    digest: DigestKind = "sha256"


def layout_of(info: EngineInfo, checksums: Checksums, fallback_dtype: str) -> ParameterLayout | str:
    """Of the engine that gave these checksums; or why they say nothing about a model in Hugging Face's names.

    fallback_dtype: of a vLLM that does not tell its own. An SGLang that was left to choose says so, and chooses by its
    model's configuration.
    """
    who = f"{info.dialect} {info.engine_version}"
    if not checksums:
        return why_no_checksums(info)
    ranks = tensor_parallel_size(checksums)
    if ranks is None:
        return f"checksums were not compared: {who} names its ranks in a way that rltool does not know"
    if info.dialect == "vllm":
        return ParameterLayout(info.dtype or fallback_dtype, ranks)
    if info.dp_size > 1:
        return f"checksums were not compared: {who} with data parallelism cuts attention in a way of its own"
    if info.device is None:
        return f"checksums were not compared: {who} does not tell its device, on which theirs depend"
    if info.device not in ("cpu", "cuda"):
        return f"checksums were not compared: {who} on {info.device} makes them in a way of its own"
    dtype = info.dtype or sglang_auto_dtype(info.model_config)
    if dtype is None:
        return f"checksums were not compared: {who} does not tell its dtype; start it with --dtype"
    if info.device == "cpu" and dtype != "float32":
        return f"checksums were not compared: {who} on a CPU may have packed matrices in {dtype} for AMX"
    return ParameterLayout(dtype, ranks, "sha256_64" if info.device == "cpu" else "sglang_cuda")


def why_no_checksums(info: EngineInfo) -> str:
    return f"checksums were not compared: {info.dialect} {info.engine_version} has none"


def sglang_auto_dtype(config: dict[str, Any]) -> str | None:
    """What SGLang serves a model in when --dtype is "auto", by its config.json; None where that is not known
    (_get_and_verify_dtype in srt/configs/model_config.py)."""
    found = config.get("dtype") or config.get("torch_dtype")
    if found != "float32":
        return found
    return "bfloat16" if str(config.get("model_type", "")).startswith("gemma") else "float16"
