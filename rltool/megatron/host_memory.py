"""Room on the CPU for copies of a model's tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import groupby

import torch
from torch import Tensor

SLAB_BYTES = 1 << 30
"""Torch rounds every block of pinned memory up to a power of two, so small ones share slabs of exactly one."""


def room_for(tensors: Mapping[str, Tensor], *, pinned: bool, slab: int = SLAB_BYTES) -> dict[str, Tensor]:
    """Uninitialised CPU tensors of the same names, shapes and dtypes, each contiguous.

    pinned: in memory that a GPU copies to and from at full speed. A tensor above a slab has a block of its own.
    """
    if not pinned:
        return {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}
    room: dict[str, Tensor] = {}
    by_dtype = sorted(tensors.items(), key=lambda item: str(item[1].dtype))
    for dtype, same in groupby(by_dtype, key=lambda item: item[1].dtype):
        for share in _shares(list(same), slab // dtype.itemsize):
            memory = torch.empty(
                sum(tensor.numel() for _, tensor in share), dtype=dtype, pin_memory=torch.cuda.is_available()
            )
            parts = memory.split([tensor.numel() for _, tensor in share])
            room.update({name: part.view(tensor.shape) for (name, tensor), part in zip(share, parts, strict=True)})
    return room


def _shares(items: list[tuple[str, Tensor]], limit: int) -> list[list[tuple[str, Tensor]]]:
    """In order, cut where the next one would not fit any more; those above the limit by themselves."""
    shares: list[list[tuple[str, Tensor]]] = []
    held = math.inf
    for name, tensor in items:
        if held + tensor.numel() > limit:
            shares.append([])
            held = 0
        shares[-1].append((name, tensor))
        held += tensor.numel()
    return shares
