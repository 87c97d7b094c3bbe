"""Checksums of the parameters that an engine holds, and how two sets of them compare. Pure.

A parameter is named RANK:NAME, where RANK is the engine's rank ("dp0:pp0:pcp0:tp1" in vLLM, "dp0:pp0:tp1" of
SGLang's) and NAME is the engine's own: vLLM and SGLang keep the query, key and value projections of a layer in one
matrix, and those of gate and up.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Checksums = dict[str, str]
"""RANK:NAME -> hexadecimal digest, rank after rank, each in the order of the model's layers."""

EMPTY = hashlib.sha256().hexdigest()
"""vLLM on a CPU gives this for a matrix that it has packed for its kernels: the parameter itself is empty then."""

FUSED = {
    "q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1),
    "q_a_proj": ("fused_qkv_a_proj", 0), "kv_a_proj_with_mqa": ("fused_qkv_a_proj", 1),
}  # fmt: skip
"""A checkpoint's projection -> the engine's, and its place there, from the top."""
_FUSED_PART = re.compile(rf"\.({'|'.join(FUSED)})\.(weight|bias)$")
STACKED = {
    "gate_proj": ("w13", 0), "w1": ("w13", 0), "up_proj": ("w13", 1), "w3": ("w13", 1), "gate_up_proj": ("w13", 0),
    "down_proj": ("w2", 0), "w2": ("w2", 0),
}  # fmt: skip
"""The same of experts: an expert's projection, or that of all (gpt-oss, Qwen3-VL) -> the parameter in which they stand
expert after expert."""
_EXPERTS_PART = re.compile(rf"(.+\.experts)\.(?:(\d+)\.)?({'|'.join(STACKED)})(?:\.|_)?(weight|bias|)$")
_EXPERTS = re.compile(r"\.experts\.(w13|w2)_(weight|bias)$")
BY_EXPERT = " by expert"
"""Behind the name of a parameter of experts: its digests where each rank has some experts (expert parallelism), in
place of a part of each."""
IN_FP32 = " in fp32"
"""Behind a router's name: its digests in an engine that keeps it in fp32 whatever the model's dtype."""
DERIVED = ".mla_attn.mla_attn."
"""In vLLM's names of what it makes of latent attention's product of keys and values, and decodes with."""
_TENSOR_PARALLEL = re.compile(r"(?:^|:)tp(\d+)$")

DigestKind = Literal["sha256", "sha256_64", "sglang_cuda"]
"""SHA-256; its first 64 bits; what SGLang's kernel makes of a tensor on a GPU (rltool.weights.verify.digests)."""


@dataclass(frozen=True)
class ParameterLayout:
    """dtype: torch's name; tensor_parallel: how many ranks the parameters are cut over; digest: of a rank's part."""

    dtype: str
    tensor_parallel: int = 1
    digest: DigestKind = "sha256"


@dataclass(frozen=True)
class Compared:
    """By parameter, over all ranks that hold it or a part of it.

    equal: how many are equal on every rank; differing: those that are not, in the order of the model's layers, each
    with the ranks where it differs; unknown: those that only one side has, or that cannot be compared. ranks: of the
    engine.
    """

    equal: int
    differing: Mapping[str, tuple[str, ...]]
    unknown: tuple[str, ...]
    ranks: int = 1


def compare(engine: Checksums, other: Mapping[str, str]) -> Compared:
    """Two sets of digests under the same keys. A key without a rank is a parameter that no rank of the engine has."""
    of_parameter: dict[str, list[str]] = {}
    for key in {**engine, **other}:
        of_parameter.setdefault(_split(key)[1], []).append(key)
    equal = 0
    differing: dict[str, tuple[str, ...]] = {}
    unknown: list[str] = []
    for parameter, keys in of_parameter.items():
        if any(key not in engine or key not in other or EMPTY in (engine[key], other[key]) for key in keys):
            unknown.append(parameter)
        elif ranks := tuple(_split(key)[0] for key in keys if engine[key] != other[key]):
            differing[parameter] = ranks
        else:
            equal += 1
    return Compared(equal, differing, tuple(unknown), len({_split(key)[0] for key in engine}))


def with_ranks(engine: Checksums, implied: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """What `compare` takes for the other side: the digests that a checkpoint implies, under the engine's keys.

    implied: NAME -> a digest for each tensor-parallel rank. Ranks that differ in anything else, replicas and pipeline
    stages, hold the same of what they hold.

    How an engine arranges experts depends on its kernel, which it does not report. A kind of parameter (w13_weight) is
    compared if one of its layers agrees: the others are arranged alike. A router is compared in either dtype. What is
    DERIVED other engines do not have.
    """
    found: dict[str, str] = {}
    held: set[str] = set()
    of_experts: dict[str, list[tuple[str, str, int]]] = {}
    for key in engine:
        rank, parameter = _split(key)
        if parameter not in implied:
            parameter = _usual_name(parameter)
        if parameter in implied and (place := _TENSOR_PARALLEL.search(rank)) is not None:
            held.add(parameter)
            if (cut := _EXPERTS.search(parameter)) is None:
                either = [implied[name][int(place[1])] for name in (parameter, parameter + IN_FP32) if name in implied]
                found[key] = engine[key] if engine[key] in either else either[0]
            else:
                of_experts.setdefault(cut[0], []).append((key, parameter, int(place[1])))
    for stacked in of_experts.values():
        for suffix in ("", BY_EXPERT):
            digests = {key: implied[name + suffix][rank] for key, name, rank in stacked if name + suffix in implied}
            if any(engine[key] == digest for key, digest in digests.items()):
                found |= digests
                break
    others = (name for name in implied if not name.endswith((BY_EXPERT, IN_FP32)) and DERIVED not in name)
    names = (name for name in others if name not in held)
    return found | {name: implied[name][0] for name in names}


def _usual_name(parameter: str) -> str:
    """Of a parameter that an engine names in a way of its own: vLLM experts, attention in gpt-oss, and what stands
    beside a vision tower; SGLang the low ranks of latent attention."""
    if parameter.startswith("language_model."):
        parameter = parameter.removeprefix("language_model.").replace("model.", "model.language_model.", 1)
    parameter = parameter.replace(".experts.routed_experts.", ".experts.").replace("_a_proj_with_mqa.", "_a_proj.")
    return parameter.replace(".attn.", ".self_attn.").replace("model.embedding.", "model.embed_tokens.")


def tensor_parallel_size(checksums: Checksums) -> int | None:
    """The number of tensor-parallel ranks; None where the ranks' names do not hold it."""
    found = [_TENSOR_PARALLEL.search(_split(key)[0]) for key in checksums]
    return None if None in found else 1 + max((int(match[1]) for match in found if match is not None), default=0)


def parts_of_parameters(names: Sequence[str]) -> dict[str, list[str]]:
    """The engine's name of a parameter -> the checkpoint's tensors that stand in it, from the top."""
    parts: dict[str, dict[tuple[int, int], str]] = {}
    for name in names:
        if (found := _EXPERTS_PART.match(name)) is not None:
            fused, place = STACKED[found[3]]
            parameter = f"{found[1]}.{fused}_{found[4] or 'weight'}"
            parts.setdefault(parameter, {})[int(found[2] or 0), place] = name
        elif (found := _FUSED_PART.search(name)) is not None:
            fused, place = FUSED[found[1]]
            parts.setdefault(f"{name[: found.start()]}.{fused}.{found[2]}", {})[0, place] = name
        else:
            parts[name] = {(0, 0): name}
    result: dict[str, list[str]] = {}
    for parameter, tensors in parts.items():
        if len(tensors) == 1 and _EXPERTS.search(parameter) is None:  # latent attention's queries stand alone
            [name] = tensors.values()
            result[name] = [name]
        else:
            result[parameter] = [tensors[place] for place in sorted(tensors)]
    return result


def _split(key: str) -> tuple[str, str]:
    """(RANK, NAME)"""
    rank, _, name = key.rpartition(":")
    return rank, name
