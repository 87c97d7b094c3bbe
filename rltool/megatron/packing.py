"""Several sequences of different lengths in one row, as the model and its attention see them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


@dataclass
class PackedSequences(PackedSeqParams):
    """The layout of T packed tokens; travels through Megatron as its `packed_seq_params`.

    positions: [T] position of each token in its sequence
    gather: [N * longest] token index of each slot of the padded layout (padding points at token 0); None when all
        sequences have one length, where packed and padded are the same memory
    slots: [T] slot of each token; None likewise

    The format says "sbhd", not Megatron's "thd": its thd path splits queries and keys into single sequences in every layer to
    rotate them, which costs more than the attention on short samples. `RotaryPositions` rotates by `positions`.
    """

    positions: Tensor | None = None
    num_sequences: int = 0
    gather: Tensor | None = None
    slots: Tensor | None = None


def pack(lengths: Tensor, device: torch.device) -> PackedSequences:
    """lengths: [N] int64, tokens per sequence, in the order in which they lie in the row."""
    longest, total = int(lengths.max()), int(lengths.sum())
    starts = lengths.cumsum(0) - lengths
    positions = torch.arange(total) - starts.repeat_interleave(lengths)
    boundaries = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(device, torch.int32)
    gather = slots = None
    if longest * len(lengths) != total:
        slots = positions + (torch.arange(len(lengths)) * longest).repeat_interleave(lengths)
        gather = torch.zeros(len(lengths) * longest, dtype=torch.int64)
        gather[slots] = torch.arange(total)
        gather, slots = gather.to(device), slots.to(device)
    return PackedSequences(
        qkv_format="sbhd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        positions=positions.to(device),
        num_sequences=len(lengths),
        gather=gather,
        slots=slots,
    )
