"""Weights between a Hugging Face directory and the running model, one parameter at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from rltool.engines.types import TensorMeta
from rltool.megatron.model import global_names
from rltool.megatron.runtime import Runtime
from rltool.models.base import EMBEDDING, FINAL_NORM, HEAD, Family, Parameter
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


def weight_metadata(family: Family, dtype: torch.dtype) -> list[TensorMeta]:
    """What `export_weights` yields: HF names and shapes, in its order."""
    return [TensorMeta(name, str(dtype).removeprefix("torch."), shape) for name, shape in family.hf_tensors()]


@torch.no_grad()
def export_weights(
    model: GPTModel, family: Family, dtype: torch.dtype, runtime: Runtime, *, everywhere: bool = False
) -> Iterator[tuple[TensorMeta, Tensor | None]]:
    """HF tensors in the order of `weight_metadata`: the tensor on global rank 0, None elsewhere; everywhere: on every
    rank.

    A generator that is collective over the ranks of replica 0, and over all that experts are sharded over (everywhere:
    over all ranks): each of them must run it to its end. Besides the model, a rank that gets the tensors holds one
    merged parameter at a time. Tensors alias the parameters where nothing had to be merged: use them before the next
    optimizer step.
    """
    metadata = iter(weight_metadata(family, dtype))
    local = global_names(model)
    for parameter in family.parameters:
        full = _gather(parameter, local, family, runtime, everywhere=everywhere)
        parts = [None] * len(parameter.hf) if full is None else parameter.split(full)
        for part in parts:
            yield next(metadata), None if part is None else part.contiguous()


def _gather(
    parameter: Parameter, local: dict[str, torch.nn.Parameter], family: Family, runtime: Runtime, *, everywhere: bool
) -> Tensor | None:
    """The unsharded parameter on global rank 0, None elsewhere: over TP where it is held, then from there to rank 0.
    everywhere: on every rank; replicas that hold all layers and experts gather it each for itself."""
    at = runtime.coordinates
    stage = owner_stage(parameter, family, at.layout.pp)
    # Experts are sharded in order over the first replicas, and from there on again.
    replica = 0 if parameter.expert is None else parameter.expert * at.layout.ep // family.num_experts
    in_each_replica = at.layout.pp == 1 and (parameter.expert is None or at.layout.ep == 1)
    full = None
    if at.pp_rank == stage and (at.replica_rank == replica or (everywhere and in_each_replica)):
        shard = local[parameter.name].detach()
        shards = [shard]
        if parameter.shard_dim is not None and at.layout.tp > 1:
            shards = [torch.empty_like(shard) for _ in range(at.layout.tp)]
            dist.all_gather(shards, shard.contiguous(), group=runtime.tp_group)
        full = parameter.unshard(shards)
    sender = runtime.global_rank(tp=0, pp=stage, replica=replica)
    if everywhere:
        return full if in_each_replica else _broadcast(full, sender, parameter, local, runtime)
    if sender == 0:
        return full if at.rank == 0 else None
    if at.rank == sender:
        assert full is not None  # the sender is a rank of that stage and replica
        dist.send(full.contiguous(), dst=0)
    elif at.rank == 0:
        full = _room_for(parameter, local, runtime)
        dist.recv(full, src=sender)
        return full
    return None


def _broadcast(
    full: Tensor | None, sender: int, parameter: Parameter, local: dict[str, torch.nn.Parameter], runtime: Runtime
) -> Tensor:
    """From `sender` to all ranks; never into what others have gathered, which may alias their parameters."""
    if runtime.coordinates.rank == sender:
        assert full is not None  # the sender is a rank of that stage and replica
        sent = full.contiguous()
    else:
        sent = _room_for(parameter, local, runtime)
    dist.broadcast(sent, src=sender)
    return sent


def _room_for(parameter: Parameter, local: dict[str, torch.nn.Parameter], runtime: Runtime) -> Tensor:
    return torch.empty(parameter.merged_shape, dtype=next(iter(local.values())).dtype, device=runtime.device)


def owner_stage(parameter: Parameter, family: Family, stages: int) -> int:
    """The pipeline stage that holds this parameter; layers are cut evenly."""
    if parameter.layer is not None:
        return parameter.layer * stages // family.num_layers
    return {EMBEDDING: 0, FINAL_NORM: stages - 1, HEAD: stages - 1}[parameter.name]
