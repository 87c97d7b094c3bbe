"""What each rank holds of the exported tensors, as boxes of them: for sharded weight syncs, in which nothing is
gathered. Pure, but for the rank's own tensors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from torch import Tensor

from rltool.config.parallel import ParallelLayout
from rltool.engines.transfer.shards import Box, Held
from rltool.engines.transfer.wire import tensor_bytes
from rltool.engines.types import Bucket, TensorMeta
from rltool.errors import UsageError
from rltool.megatron.export_plan import Export, ExportPlan, Stream
from rltool.models.base import Family, Parameter
from rltool.models.layout import owner_stage

LEAVE_OUT = "leave weights.sharded out"
QUANTISED = "weights.sharded is not implemented for quantised engines (engines.quantization)"


def check_family(family: Family) -> None:
    """UsageError for a model of which no sharded plan is made."""
    if family.attention.latent is not None:
        raise UsageError(
            f"weights.sharded is not implemented for multi-head latent attention, which {family.architecture} has: "
            f"{LEAVE_OUT}"
        )
    if family.attention.delta is not None:
        raise UsageError(
            f"weights.sharded is not implemented for a gated delta net, which {family.architecture} has: {LEAVE_OUT}"
        )
    for parameter in family.parameters:
        if parameter.parts or parameter.transposed or parameter.experts:
            raise UsageError(
                f"weights.sharded is not implemented for {family.architecture}: {parameter.hf[0][0]} is fused or "
                f"transposed in its checkpoint; {LEAVE_OUT}"
            )


def check_plan(plan: ExportPlan) -> None:
    """UsageError for tensors that are not cut as the parameters are."""
    if plan.peft is not None:
        raise UsageError(f"weights.sharded sends whole models, and adapters go by rank 0: {LEAVE_OUT}")
    if plan.quantization is not None or any(export.make is not Parameter.split for export in plan.exports):
        raise UsageError(f"{QUANTISED}: {LEAVE_OUT}")


def interleaved(plan: ExportPlan, stages: int) -> ExportPlan:
    """The plan with parameters of all pipeline stages in turn, evenly by bytes, each stage's in their order: in the
    model's own order a bucket is of one stage, and the ranks of the others would wait."""
    if stages == 1:
        return plan
    sizes = [sum(map(tensor_bytes, export.tensors)) for export in plan.exports]
    owner = [owner_stage(export.parameter, plan.num_layers, stages) for export in plan.exports]
    total, before, place = Counter[int](), Counter[int](), list[float]()
    for stage, size in zip(owner, sizes, strict=True):
        total[stage] += size
    for stage, size in zip(owner, sizes, strict=True):
        place.append(before[stage] / total[stage])
        before[stage] += size
    return replace(plan, exports=tuple(plan.exports[k] for k in sorted(range(len(place)), key=place.__getitem__)))


def cuts(parameter: Parameter, rank: int, size: int) -> list[Box]:
    """Of each of its HF tensors, what tensor-parallel `rank` of `size` holds; rows of padding alone are an empty
    box."""
    dim = parameter.shard_dim
    boxes = []
    for _, shape in parameter.hf:
        if dim is None or size == 1:
            boxes.append(Box.whole(shape))
            continue
        if parameter.vocabulary:
            rows = -(-shape[0] // size)
            first = min(rank * rows, shape[0])
            boxes.append(Box((first, *(0,) * (len(shape) - 1)), (min(rows, shape[0] - first), *shape[1:])))
            continue
        start, part = [0] * len(shape), list(shape)
        part[dim] //= size
        start[dim] = rank * part[dim]
        boxes.append(Box(tuple(start), tuple(part)))
    return boxes


def local_tensors(parameter: Parameter, shard: Tensor, rank: int, size: int) -> list[Tensor]:
    """A rank's shard of a parameter -> its boxes of the HF tensors, in the order of `cuts`."""
    boxes = cuts(parameter, rank, size)
    if parameter.vocabulary:
        return [shard[: boxes[0].shape[0]]]
    own = tuple((name, box.shape) for (name, _), box in zip(parameter.hf, boxes, strict=True))
    groups = parameter.query_groups if parameter.shard_dim is None else parameter.query_groups // size
    return replace(parameter, hf=own, query_groups=groups).split(shard)


def owners(parameter: Parameter, plan: ExportPlan | Family, layout: ParallelLayout) -> list[tuple[int, ...]]:
    """The ranks that hold the same of it: one tuple for each tensor-parallel rank, or one of all where it is not
    cut."""
    stage = owner_stage(parameter, plan.num_layers, layout.pp)
    replicas = range(layout.replica_size)
    if parameter.expert is not None:
        # Experts are sharded in order over the first replicas, and from there on again.
        place = parameter.expert * layout.ep // plan.num_experts
        replicas = [replica for replica in replicas if replica % layout.ep == place]
    by_tp = [
        tuple(layout.global_rank(tp=tp, pp=stage, replica=replica) for replica in replicas) for tp in range(layout.tp)
    ]
    return by_tp if parameter.shard_dim is not None else [tuple(sorted(rank for ranks in by_tp for rank in ranks))]


def held_elsewhere(layout: ParallelLayout, ranks: Collection[int]) -> tuple[int, ...]:
    """Ranks that hold what none of these does; () where these hold everything."""
    replicas = range(layout.replica_size)
    for stage, tp, place in product(range(layout.pp), range(layout.tp), range(layout.ep)):
        holders = [layout.global_rank(tp=tp, pp=stage, replica=r) for r in replicas if r % layout.ep == place]
        if not any(rank in ranks for rank in holders):
            return tuple(holders)
    return ()


def held(plan: ExportPlan, layout: ParallelLayout) -> dict[str, list[Held]]:
    """By the exported tensor's name: boxes that do not overlap and make all of it, with the ranks of each."""
    found: dict[str, list[Held]] = {}
    for export in plan.exports:
        parameter = export.parameter
        for tp, ranks in enumerate(owners(parameter, plan, layout)):
            size = 1 if parameter.shard_dim is None else layout.tp
            for (name, _), box in zip(parameter.hf, cuts(parameter, tp, size), strict=True):
                if box.elements:
                    found.setdefault(name, []).append(Held(box, ranks))
    return found


@dataclass(frozen=True, eq=False)
class OwnPart:
    """What one rank holds of a plan. bucket_bytes: what the plan is cut into buckets by. Raises UsageError for a plan
    that is not cut as the parameters are."""

    plan: ExportPlan
    layout: ParallelLayout
    rank: int
    bucket_bytes: int

    def __post_init__(self) -> None:
        check_plan(self.plan)

    @cached_property
    def whole_buckets(self) -> list[Bucket]:
        """Of the plan."""
        return self.plan.buckets(self.bucket_bytes)

    @property
    def tp_rank(self) -> int:
        return self.rank % self.layout.tp

    @cached_property
    def exports(self) -> list[Export]:
        """Of the parameters that lie here."""
        return [
            export
            for export in self.plan.exports
            if any(self.rank in ranks for ranks in owners(export.parameter, self.plan, self.layout))
        ]

    @cached_property
    def boxes(self) -> dict[str, Box]:
        """By the exported tensor's name, without empty ones."""
        return {
            name: box
            for export in self.exports
            for (name, _), box in zip(
                export.parameter.hf, cuts(export.parameter, self.tp_rank, self.layout.tp), strict=True
            )
            if box.elements
        }

    @cached_property
    def buckets(self) -> list[Bucket]:
        """Of each of the plan's buckets what lies here, as it lies here; () where nothing does."""
        boxes = self.boxes
        return [
            tuple(TensorMeta(meta.name, meta.dtype, boxes[meta.name].shape) for meta in bucket if meta.name in boxes)
            for bucket in self.whole_buckets
        ]

    def tensors(self, local: Mapping[str, Tensor]) -> Stream:
        """What lies here, in the plan's order. local: by Megatron's name."""
        for export in self.exports:
            parameter = export.parameter
            made = local_tensors(parameter, local[parameter.name].detach(), self.tp_rank, self.layout.tp)
            for meta, tensor in zip(export.tensors, made, strict=True):
                if tensor.numel():
                    yield TensorMeta(meta.name, meta.dtype, tuple(tensor.shape)), tensor

    @property
    def copy_bytes(self) -> int:
        """That `tensors` holds at most beside the model: one parameter of the rank, where splitting copies."""
        sizes = (
            self.plan.dtype_of(e.parameter).itemsize * math.prod(e.parameter.shard_shape(self.layout.tp))
            for e in self.exports
            if e.parameter.split_copies
        )
        return max(sizes, default=0)
