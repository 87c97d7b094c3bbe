"""One micro-batch as one rank computes it, prepared before the schedule: inside that nothing waits for the host."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rltool.algorithms.batch import TrainBatch
from rltool.algorithms.fields import fields_of
from rltool.megatron.packing import PackedSequences, pack
from rltool.megatron.runtime import Coordinates, to_device


@dataclass(frozen=True)
class MicroBatch:
    """batch and rows are on the CPU, the rest on the device.

    tokens: [T] what this rank's model reads
    rows: [R] indices into batch.tokens of the tokens whose log-probabilities are wanted, in order
    sources: [H] where, among this rank's T, the state lies that predicts each of the wanted tokens that fall to this
        rank
    targets: [H] ids of these tokens
    held: [H] their indices into `rows`; None: this rank has all of them
    at_targets: [H, ...] there, those of the batch's fields that are cut so (algorithms/fields.py)
    """

    batch: TrainBatch
    tokens: Tensor
    packed: PackedSequences
    rows: Tensor
    sources: Tensor
    targets: Tensor
    held: Tensor | None
    at_targets: Mapping[str, Tensor]


def prepare(
    batch: TrainBatch, rows: Tensor, at: Coordinates, device: torch.device, *, sequence_parallel: bool,
    inputs: Collection[str] = (),
) -> MicroBatch:  # fmt: skip
    """rows: [R] int64 on the CPU, none the first token of a sample. All context-parallel ranks pass the same.
    inputs: the fields that the model reads beside its tokens, where the batch has them."""
    packed = pack(
        batch.lengths,
        device,
        cp_rank=at.cp_rank,
        cp_size=at.layout.cp,
        multiple_of=at.layout.tp if sequence_parallel else 1,
    )
    tokens = to_device(batch.tokens, device)
    sources, wanted, held = rows - 1, rows, None
    if packed.place is not None:
        places = packed.place[rows - 1]
        held = (places >= 0).nonzero().squeeze(-1)
        sources, wanted = places[held], rows[held]
        held = to_device(held, device) if len(held) < len(rows) else None
    at_targets: dict[str, Tensor] = {}
    for name, item in fields_of(batch).items():
        if getattr(batch, name) is None:
            continue
        if item.cut == "target":
            at_targets[name] = to_device(batch.at_tokens(name)[wanted], device)
        elif item.cut == "input" and name in inputs:
            values = batch.at_tokens(name)
            packed.inputs[name] = to_device(packed.place_row(values, item.filler(values.dtype)), device)
    return MicroBatch(
        batch=batch,
        tokens=packed.take(tokens),
        packed=packed,
        rows=rows,
        sources=to_device(sources, device),
        targets=to_device((batch.tokens if batch.target_ids is None else batch.target_ids)[wanted], device),
        held=held,
        at_targets=at_targets,
    )
