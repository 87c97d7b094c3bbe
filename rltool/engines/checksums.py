"""Checksums of the parameters that an engine holds, and those that a checkpoint implies for them. Pure but for hashing.

A parameter is named RANK:NAME, where RANK tells the engine's ranks apart and NAME is the engine's own: vLLM and SGLang
keep the query, key and value projections of a layer in one matrix, and those of gate and up.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Checksums = dict[str, str]
"""RANK:NAME -> hexadecimal digest, in the order of the engine's layers."""

EMPTY = hashlib.sha256().hexdigest()
"""vLLM on a CPU gives this for a matrix that it has packed for its kernels: the parameter itself is empty then."""

FUSED = {
    "q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1),
}  # fmt: skip
"""A checkpoint's projection -> the engine's, and its place there, from the top."""
_FUSED_PART = re.compile(rf"\.({'|'.join(FUSED)})\.(weight|bias)$")


@dataclass(frozen=True)
class Compared:
    """equal: how many parameters were found equal; differing: those that are not, in the engine's order; unknown: those
    that only one side has, or that cannot be compared."""

    equal: int
    differing: tuple[str, ...]
    unknown: tuple[str, ...]


def compare(engine: Mapping[str, str], other: Mapping[str, str]) -> Compared:
    """Two sets of digests under the same names."""
    both = [name for name in engine if name in other and EMPTY not in (engine[name], other[name])]
    differing = tuple(name for name in both if engine[name] != other[name])
    unknown = tuple(name for name in {**engine, **other} if name not in both)
    return Compared(len(both) - len(differing), differing, unknown)


def of_one_rank(checksums: Checksums) -> dict[str, str] | None:
    """NAME -> digest where the engine has one rank; None where its parameters are spread over several."""
    ranks = {name.rpartition(":")[0] for name in checksums}
    return {name.rpartition(":")[2]: digest for name, digest in checksums.items()} if len(ranks) == 1 else None


def parts_of_parameters(names: Sequence[str]) -> dict[str, list[str]]:
    """The engine's name of a parameter -> the checkpoint's tensors that stand in it, from the top."""
    parts: dict[str, dict[int, str]] = {}
    for name in names:
        found = _FUSED_PART.search(name)
        if found is None:
            parts[name] = {0: name}
            continue
        fused, place = FUSED[found[1]]
        parts.setdefault(f"{name[: found.start()]}.{fused}.{found[2]}", {})[place] = name
    return {parameter: [tensors[place] for place in sorted(tensors)] for parameter, tensors in parts.items()}
