"""Digests of a tensor's bytes, as engines make them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from rltool.engines.dialects.checksums import DigestKind

TILE = 8192
"""32-bit words whose hashes one program of SGLang's kernel adds up."""
TILES_AT_ONCE = 64
"""2 MiB of words: hashing takes a few times that memory, and on a CPU stays in its cache."""


def _signed(word: int) -> int:
    """The int32 with the lowest 32 bits of `word`."""
    return (word & 0xFFFFFFFF) - ((word & 0x80000000) << 1)


SEED = 0x243F6A88
LANES = (
    (_signed(0x27D4EB2D), _signed(SEED), 15),
    (_signed(0x165667B1), _signed(SEED * 0x9E3779B1 ^ 0xDEADBEEF), 13),
)
"""Of the upper and the lower half of the digest: factor, seed and rotation of a word's index."""


def sha256(tensor: Tensor) -> str:
    """vLLM's."""
    return hashlib.sha256(_bytes(tensor.cpu()).numpy().data).hexdigest()


def sha256_64(tensor: Tensor) -> str:
    """SGLang's, of a tensor in the host's memory (tensor_hash in srt/managers/mm_utils.py)."""
    return sha256(tensor)[:16]


def sglang_cuda(tensor: Tensor) -> str:
    """SGLang's, of a tensor on a GPU; computed where `tensor` is (sglang/kernels/ops/memory/gpu_tensor_hash.py).

    Each 32-bit word is mixed with its index by MurmurHash3's finaliser and summed over tiles, twice; the tiles' sums
    are mixed with the size, added up, and finished as SplitMix64 does. All arithmetic is modulo 2^32 or 2^64.
    """
    words = _words(tensor)
    if not len(words):
        return f"{0:016x}"
    size, total = _signed(4 * len(words)), 0
    for start in range(0, len(words), TILE * TILES_AT_ONCE):
        part = words[start : start + TILE * TILES_AT_ONCE]
        index = torch.arange(start, start + len(part), device=part.device).to(torch.int32)
        upper, lower = (
            _mixed(_tile_sums(_mixed(part ^ (index * factor + seed) ^ _rotated(index, by))) ^ size).long()
            for factor, seed, by in LANES
        )
        total += int((upper << 32 | lower & 0xFFFFFFFF).sum())
    return f"{_splitmix64(total):016x}"


DIGESTS: Mapping[DigestKind, Callable[[Tensor], str]] = {
    "sha256": sha256, "sha256_64": sha256_64, "sglang_cuda": sglang_cuda,
}  # fmt: skip


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _words(tensor: Tensor) -> Tensor:
    """[bytes / 4] int32, zeros behind the last byte. Copied only where it must be: the largest are gigabytes."""
    data = _bytes(tensor)
    if len(data) % 4 or data.storage_offset() % 4:  # a rank's part of a 16-bit tensor may begin between two words
        data = F.pad(data, (0, -len(data) % 4))
    return data.view(torch.int32)


def _mixed(words: Tensor) -> Tensor:
    """fmix32 of MurmurHash3; int32 in place of uint32, so shifts to the right are masked."""
    words = (words ^ (words >> 16 & 0xFFFF)) * _signed(0x85EBCA6B)
    words = (words ^ (words >> 13 & 0x7FFFF)) * _signed(0xC2B2AE35)
    return words ^ (words >> 16 & 0xFFFF)


def _rotated(words: Tensor, by: int) -> Tensor:
    return words << by | words >> (32 - by) & (1 << by) - 1


def _tile_sums(words: Tensor) -> Tensor:
    """[words] int32 -> [tiles] int32, modulo 2^32."""
    return F.pad(words, (0, -len(words) % TILE)).view(-1, TILE).sum(1).to(torch.int32)


def _splitmix64(state: int) -> int:
    mask = (1 << 64) - 1
    state &= mask
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & mask
    state = (state ^ state >> 27) * 0x94D049BB133111EB & mask
    return state ^ state >> 31
