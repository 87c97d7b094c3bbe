"""How an engine keeps a model's parameters and what its digests of them are, where that can be worked out beside it.
Pure; what differs between engines is in their dialects (rltool/engines/dialects/inspection.py)."""

from __future__ import annotations

from rltool.engines.dialects.checksums import Checksums, ParameterLayout, tensor_parallel_size
from rltool.engines.dialects.table import inspects
from rltool.engines.types import EngineInfo


def layout_of(info: EngineInfo, checksums: Checksums, fallback_dtype: str) -> ParameterLayout | str:
    """Of the engine that gave these checksums; or why they say nothing about a model in Hugging Face's names.

    fallback_dtype: of an engine that does not tell its own.
    """
    if not checksums:
        return why_no_checksums(info)
    ranks = tensor_parallel_size(checksums)
    if ranks is None:
        who = f"{info.dialect} {info.engine_version}"
        return f"checksums were not compared: {who} names its ranks in a way that rltool does not know"
    return inspects(info.dialect).layout(info, ranks, fallback_dtype)


def why_no_checksums(info: EngineInfo) -> str:
    return f"checksums were not compared: {info.dialect} {info.engine_version} has none"
