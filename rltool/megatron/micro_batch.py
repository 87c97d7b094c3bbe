"""One micro-batch as one rank computes it, prepared before the schedule: inside that nothing waits for the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rltool.algorithms.batch import TrainBatch
from rltool.megatron.packing import PackedSequences, pack
from rltool.megatron.runtime import Coordinates, to_device


@dataclass(frozen=True)
class MicroBatch:
    """tokens, packed, targets, sources, held, topk_ids and sampling_mask are on the device, the rest on the CPU.

    tokens: [T] what this rank's model reads
    rows: [R] indices into batch.tokens of the tokens whose log-probabilities are wanted, in order
    sources: [H] where, among this rank's T, the state lies that predicts each of the wanted tokens that fall to this
        rank
    targets: [H] ids of these tokens
    held: [H] their indices into `rows`; None: this rank has all of them
    topk_ids: [H, K] the teacher's most probable tokens in their places, int32; None where the batch has none
    sampling_mask: [H, K] the tokens that top-p and top-k kept there, int32, -1 beyond; None where the batch has none
    """

    batch: TrainBatch
    tokens: Tensor
    packed: PackedSequences
    rows: Tensor
    sources: Tensor
    targets: Tensor
    held: Tensor | None
    topk_ids: Tensor | None = None
    sampling_mask: Tensor | None = None


def prepare(
    batch: TrainBatch, rows: Tensor, at: Coordinates, device: torch.device, *, sequence_parallel: bool, layers: int
) -> MicroBatch:
    """rows: [R] int64 on the CPU, none the first token of a sample. All context-parallel ranks pass the same.
    layers: of the whole model."""
    packed = pack(
        batch.lengths,
        device,
        cp_rank=at.cp_rank,
        cp_size=at.layout.cp,
        multiple_of=at.layout.tp if sequence_parallel else 1,
    )
    if batch.routed_experts is not None:
        packed.routed_experts = to_device(_placed(batch.routed_experts, packed), device).unflatten(1, (layers, -1))
    tokens = to_device(batch.tokens, device)
    sources, wanted, held = rows - 1, rows, None
    if packed.place is not None:
        places = packed.place[rows - 1]
        held = (places >= 0).nonzero().squeeze(-1)
        sources, wanted = places[held], rows[held]
        held = to_device(held, device) if len(held) < len(rows) else None
    return MicroBatch(
        batch=batch,
        tokens=packed.take(tokens),
        packed=packed,
        rows=rows,
        sources=to_device(sources, device),
        targets=to_device(batch.tokens[wanted], device),
        held=held,
        topk_ids=_of(batch.teacher_topk_ids, wanted, device),
        sampling_mask=_of(batch.sampling_mask, wanted, device),
    )


def _of(values: Tensor | None, wanted: Tensor, device: torch.device) -> Tensor | None:
    return None if values is None else to_device(values[wanted], device)


def _placed(routed: Tensor, packed: PackedSequences) -> Tensor:
    """[tokens of the row, choices] -> [T, choices] of what this rank holds, nothing chosen where that is padding."""
    if packed.place is None or packed.tokens is None:
        return routed
    here = packed.place >= 0
    held = routed.new_full((len(packed.tokens), routed.size(1)), torch.iinfo(routed.dtype).max)
    held[packed.place[here]] = routed[here]
    return held
