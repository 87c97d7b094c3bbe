"""Parameters of a sharded model on their way to the ranks that send them: many of them in each collective.

Pure planning, and one function that carries a gather out. Merging and cutting into Hugging Face's tensors is left to
`rltool.megatron.hf_weights`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor

from rltool.config.parallel import ParallelLayout
from rltool.megatron.export_plan import ExportPlan
from rltool.megatron.runtime import Runtime
from rltool.models.base import Parameter
from rltool.models.layout import owner_stage

GATHER_BYTES = 64 << 20
"""Of one buffer, the shards of all tensor-parallel ranks together: 8 MiB from each of eight, so that a collective's
latency no longer counts, and a quarter of what weights.bucket_bytes is by default."""


@dataclass(frozen=True)
class Route:
    """stage, replica: of the ranks that hold a parameter, the first of which sends it on; travels: whether others need
    it from them; in_each_replica: otherwise, whether every replica gathers its own."""

    stage: int
    replica: int
    travels: bool
    in_each_replica: bool


@dataclass(frozen=True)
class Gather:
    """Consecutive parameters of one route and dtype, in one flat buffer: [tp, shard elements] of those that tensor
    parallelism cuts, and behind them those that it does not, if they travel. Empty where ranks have all they need."""

    route: Route
    dtype: torch.dtype
    tp: int
    parameters: tuple[Parameter, ...]

    @property
    def cut(self) -> list[Parameter]:
        return [parameter for parameter in self.parameters if _is_cut(parameter, self.tp)]

    @property
    def whole(self) -> list[Parameter]:
        """Those that are not cut and travel."""
        return [p for p in self.parameters if self.route.travels and not _is_cut(p, self.tp)]

    @property
    def cut_elements(self) -> int:
        """Of each tensor-parallel rank."""
        return sum(math.prod(parameter.shard_shape(self.tp)) for parameter in self.cut)

    @property
    def elements(self) -> int:
        """Of the buffer."""
        return sum(_elements(parameter, self.tp, travels=self.route.travels) for parameter in self.parameters)

    def views(self, flat: Tensor) -> dict[str, list[Tensor]]:
        """Megatron's name -> the shards in rank order, as views of the buffer; one for a parameter that is not cut.
        flat: [elements]."""
        split = self.tp * self.cut_elements
        per_rank = [_views(row, self.cut, self.tp) for row in flat[:split].view(self.tp, -1)] if split else []
        shards = {parameter.name: [views[parameter.name] for views in per_rank] for parameter in self.cut}
        return shards | {name: [view] for name, view in _views(flat[split:], self.whole, self.tp).items()}


def plan_gathers(
    plan: ExportPlan, layout: ParallelLayout, *, everywhere: bool = False, bound: int = GATHER_BYTES
) -> list[Gather]:
    """All parameters of the plan in its order, each in one gather, whose buffer has `bound` bytes at most; a parameter
    larger than that has one to itself. The same on every rank."""
    gathers = []
    parameters = (export.parameter for export in plan.exports)

    def kind(parameter: Parameter) -> tuple[Route, torch.dtype]:
        return _route(parameter, plan, layout, everywhere=everywhere), plan.dtype_of(parameter)

    for (route, dtype), run in groupby(parameters, key=kind):
        together: list[Parameter] = []
        size = 0
        for parameter in run:
            more = dtype.itemsize * _elements(parameter, layout.tp, travels=route.travels)
            if size and more and size + more > bound:
                gathers.append(Gather(route, dtype, layout.tp, tuple(together)))
                together, size = [], 0
            together.append(parameter)
            size += more
        gathers.append(Gather(route, dtype, layout.tp, tuple(together)))
    return gathers


def gather_bytes(
    plan: ExportPlan, layout: ParallelLayout, *, everywhere: bool = False, bound: int = GATHER_BYTES
) -> int:
    """What a rank that gets the tensors holds at most beside the model: a buffer, and one parameter merged from its
    shards, with the tensors that are made of it."""
    exports = iter(plan.exports)

    def assembled(parameter: Parameter) -> int:
        """New memory on a parameter's way from its shards to the exported tensors (`Parameter.unshard`, `Make`)."""
        itemsize = plan.dtype_of(parameter).itemsize
        merged = itemsize * _elements(parameter, layout.tp, travels=False)
        return merged + next(exports).made_bytes(itemsize)

    return max(
        gather.dtype.itemsize * gather.elements + max(map(assembled, gather.parameters))
        for gather in plan_gathers(plan, layout, everywhere=everywhere, bound=bound)
    )


def gathered(
    gather: Gather, local: Mapping[str, Tensor], runtime: Runtime, *, everywhere: bool
) -> dict[str, list[Tensor]] | None:
    """Megatron's name -> the shards in rank order, on global rank 0; None elsewhere; everywhere: on every rank. Shards
    are views of the gather's buffer; a parameter of which there was nothing to gather is left out: it is in `local`.

    Collective: one all-gather over TP, if anything is cut, and one send to rank 0, or a broadcast, if it travels.
    """
    at, route = runtime.coordinates, gather.route
    sender = runtime.global_rank(tp=0, pp=route.stage, replica=route.replica)
    holds = at.pp_rank == route.stage and (route.in_each_replica or at.replica_rank == route.replica)
    gets = everywhere or at.rank == 0
    if not (holds or (gets and route.travels)):
        return None
    flat = torch.empty(gather.elements, dtype=gather.dtype, device=runtime.device)
    shards = gather.views(flat)
    if holds:
        for name, views in shards.items():
            views[at.tp_rank if len(views) > 1 else 0].copy_(local[name].detach())
        if gather.cut:
            rows = flat[: gather.tp * gather.cut_elements]
            # In place: the input is this rank's row of the output.
            dist.all_gather_into_tensor(rows, rows.view(gather.tp, -1)[at.tp_rank], group=runtime.tp_group)
    if route.travels and everywhere:
        dist.broadcast(flat, src=sender)
    elif route.travels and at.rank == sender:
        dist.send(flat, dst=0)
    elif route.travels and at.rank == 0:
        dist.recv(flat, src=sender)
    if not gets:
        return None
    return shards


def _route(parameter: Parameter, plan: ExportPlan, layout: ParallelLayout, *, everywhere: bool) -> Route:
    stage = owner_stage(parameter, plan.num_layers, layout.pp)
    # Experts are sharded in order over the first replicas, and from there on again.
    replica = 0 if parameter.expert is None else parameter.expert * layout.ep // plan.num_experts
    if everywhere:
        in_each_replica = layout.pp == 1 and (parameter.expert is None or layout.ep == 1)
        return Route(stage, replica, travels=not in_each_replica, in_each_replica=in_each_replica)
    travels = layout.global_rank(tp=0, pp=stage, replica=replica) != 0
    return Route(stage, replica, travels=travels, in_each_replica=False)


def _is_cut(parameter: Parameter, tp: int) -> bool:
    return tp > 1 and parameter.shard_dim is not None


def _elements(parameter: Parameter, tp: int, *, travels: bool) -> int:
    """In the buffer of its gather."""
    if _is_cut(parameter, tp):
        return tp * math.prod(parameter.shard_shape(tp))
    return math.prod(parameter.merged_shape) if travels else 0


def _views(flat: Tensor, parameters: list[Parameter], tp: int) -> dict[str, Tensor]:
    """One shard of each, back to back."""

    def views() -> Iterator[tuple[str, Tensor]]:
        at = 0
        for parameter in parameters:
            shape = parameter.shard_shape(tp)
            yield parameter.name, flat[at : at + math.prod(shape)].view(shape)
            at += math.prod(shape)

    return dict(views())
