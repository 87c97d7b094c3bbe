"""One micro-batch as one rank computes it, prepared so that nothing in its pass waits for the host."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rltool.algorithms.batch import TrainBatch
from rltool.algorithms.fields import fields_of
from rltool.megatron.packing import PackedSequences, pack, pack_shared
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
    repeats: [R] where among the H each of `rows` is, where samples share some; None: they are `rows`, or `held`
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
    repeats: Tensor | None = None


def prepare(
    batch: TrainBatch, rows: Tensor, at: Coordinates, device: torch.device, *, sequence_parallel: bool,
    inputs: Collection[str] = (), shared: bool = False,
) -> MicroBatch:  # fmt: skip
    """rows: [R] int64 on the CPU, none the first token of a sample. All context-parallel ranks pass the same.
    inputs: the fields that the model reads beside its tokens, where the batch has them. shared: tokens that samples
    begin with alike are computed once; without context parallelism and inputs."""
    multiple_of = at.layout.tp if sequence_parallel else 1
    if shared:
        packed = pack_shared(batch.tokens, batch.lengths, device, multiple_of=multiple_of)
    else:
        packed = pack(batch.lengths, device, cp_rank=at.cp_rank, cp_size=at.layout.cp, multiple_of=multiple_of)
    tokens = to_device(batch.tokens, device)
    sources, wanted, held, repeats = rows - 1, rows, None, None
    if packed.place is not None:
        places = packed.place[rows - 1]
        held = (places >= 0).nonzero().squeeze(-1)
        sources, wanted = places[held], rows[held]
        held = to_device(held, device) if len(held) < len(rows) else None
    if packed.blocks is not None and not _differs(batch):
        assert packed.place is not None
        # A target that samples share has one log-probability; its gradient is the sum of theirs.
        distinct, repeats = packed.place[rows].unique(return_inverse=True)
        one = torch.empty_like(distinct)
        one[repeats] = torch.arange(len(rows))
        sources, wanted, repeats = sources[one], rows[one], to_device(repeats, device)
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
        repeats=repeats,
    )


def _differs(batch: TrainBatch) -> bool:
    """Whether the log-probability of a token may be another in two samples that are the same up to it."""
    cut = [name for name, item in fields_of(batch).items() if item.cut == "target"]
    return any(getattr(batch, name) is not None for name in [*cut, "target_ids"])
