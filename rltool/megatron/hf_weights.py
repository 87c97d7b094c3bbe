"""Weights between a Hugging Face directory and the running model, a few parameters at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from rltool.engines.types import TensorMeta
from rltool.megatron.export_plan import Export, ExportPlan, Join
from rltool.megatron.gathering import GATHER_BYTES, gathered, plan_gathers
from rltool.megatron.model import global_names
from rltool.megatron.runtime import Runtime
from rltool.models.base import Family
from rltool.models.hf_directory import HFTensors, check_tensors


@torch.no_grad()
def load_hf(
    model: GPTModel, family: Family, directory: Path, runtime: Runtime, *, without: str | None = None
) -> None:
    """Fills every parameter of this rank from the directory: read, merge, cut, check the shape, copy (and cast).

    without: a part of the model, by its attribute's name, that is no part of the family and is left as it is.

    UsageError for unknown or missing tensors, ShapeMismatch for shapes that config.json does not imply.
    """
    at = runtime.coordinates
    with HFTensors(directory) as tensors:
        check_tensors(family, tensors, directory)
        for name, target in global_names(model).items():
            if name.split(".")[0] == without:
                continue
            parameter = family.parameter(name)
            shard = parameter.shard(tensors.merged(parameter), at.tp_rank, at.layout.tp)
            if shard.shape != target.shape:
                raise RuntimeError(f"{name}: shard {tuple(shard.shape)} for parameter {tuple(target.shape)}")
            target.copy_(shard)


def export_weights(
    model: GPTModel,
    plan: ExportPlan,
    runtime: Runtime,
    *,
    weights: Mapping[str, Tensor] | None = None,
    everywhere: bool = False,
    bound: int = GATHER_BYTES,
) -> Iterator[tuple[TensorMeta, Tensor | None]]:
    """The plan's tensors in its order: the tensor on global rank 0, None elsewhere; everywhere: on every rank. weights:
    by global name, what is exported in the place of the model's own; bound: bytes of parameters that are gathered
    together.

    A generator that is collective over the ranks of replica 0, and over all that experts are sharded over (everywhere:
    over all ranks): each of them must run it to its end. Besides the model, a rank holds one buffer of `bound` bytes,
    or of the largest parameter if that has more, and one that gets the tensors one merged parameter at a time, or all
    parts of one tensor of all experts (`gather_bytes`), as long as its caller keeps no tensor. Tensors alias the
    parameters where nothing had to be gathered or merged: use them before the next optimizer step.
    """
    # Without torch.no_grad(), which keeps what a generator has yielded last: no operation here is on a parameter.
    exports, join = iter(plan.exports), Join()
    local = global_names(model) if weights is None else weights
    for gather in plan_gathers(plan, runtime.coordinates.layout, everywhere=everywhere, bound=bound):
        shards = gathered(gather, local, runtime, everywhere=everywhere)
        for parameter in gather.parameters:
            # No name for them: it would hold the buffer, too.
            yield from _tensors(join, next(exports), None if shards is None else _found(parameter.name, shards, local))
        del shards  # its buffer goes before there is another one


def _found(name: str, shards: dict[str, list[Tensor]], local: Mapping[str, Tensor]) -> list[Tensor]:
    return shards.get(name) or [local[name].detach()]


def _tensors(
    join: Join, export: Export, shards: list[Tensor] | None
) -> Iterator[tuple[TensorMeta, Tensor | None]]:
    """What one parameter is exported as; None each where this rank does not get its shards."""
    if shards is None:
        yield from ((meta, None) for meta in export.tensors)
        return
    for meta, tensor in join.made(export, export.parameter.unshard(shards)):
        yield meta, tensor.contiguous()
