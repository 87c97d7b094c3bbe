"""Low-rank adapters beside the products of a built model, whose own weights are frozen (see `models.adapters`).

All adapters of a rank are one part of the model, `GPTModel.adapters`, with checkpoint names of their own. A hook adds
each one's output to that of its Megatron module. They are float32 and compute in the activations' dtype.

How a module's adapter is cut over tensor-parallel ranks, and which gradients are summed over them:

| module | A | B | between A and B |
|---|---|---|---|
| column | whole | by outputs | the sequence is gathered, where it is cut: rank values a token |
| row | by inputs | whole | summed; where the sequence is cut, each rank gets its tokens |
| copied (latent attention) | whole | whole | nothing |
| column and row of experts | as above | as above | nothing: Megatron's dispatcher gathers and sums |
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from rltool.config.sections import LoraConfig
from rltool.errors import UsageError
from rltool.megatron.experts import GroupedExperts, Groups, Shape, grouped_product
from rltool.megatron.family_layers import CopiedLinear
from rltool.megatron.model import global_name, global_names
from rltool.megatron.runtime import Coordinates
from rltool.models.adapters import PART, Adapted, adapters_of, merged
from rltool.models.base import Family, Parameter

Between = Callable[[Tensor], Tensor]
"""What happens to A x on its way to B."""


class Adapter(torch.nn.Module):
    """Of one Megatron module. Its parameters are this rank's shards of `adapted`."""

    def __init__(self, adapted: Adapted, linear: torch.nn.Module, scale: float, coordinates: Coordinates) -> None:
        super().__init__()
        self.adapted, self.scale = adapted, scale
        self.at = coordinates
        self.groups = adapted.base.query_groups // coordinates.layout.tp
        self.between, summed = _communication(linear)
        expert = adapted.base.expert is not None

        def hold(parameters: Sequence[Parameter], *, summed: bool) -> torch.nn.ParameterList:
            return torch.nn.ParameterList([self._held(each, summed=summed, expert=expert) for each in parameters])

        self.a, self.b = hold(adapted.a, summed=summed[0]), hold(adapted.b, summed=summed[1])

    def _held(self, parameter: Parameter, *, summed: bool, expert: bool) -> torch.nn.Parameter:
        held = cast(Any, torch.nn.Parameter(torch.zeros(parameter.shard_shape(self.at.layout.tp))))
        # Megatron's marks: sum the gradient over tensor-parallel ranks; one shard of many, or a copy; of an expert.
        held.sequence_parallel = summed
        if parameter.shard_dim is not None:
            held.tensor_model_parallel, held.partition_dim, held.partition_stride = True, parameter.shard_dim, 1
        # Also without expert parallelism, so that a checkpoint has the same optimizers in every layout.
        held.allreduce = not expert
        return held

    def forward(self, x: Tensor) -> Tensor:
        """x: what the module gets, [..., inputs of this rank]. Returns what is added to its output."""
        low = self.between(F.linear(x, torch.cat([a.to(x.dtype) for a in self.a]))) * self.scale
        parts = [F.linear(u, b.to(x.dtype)) for u, b in zip(low.chunk(len(self.a), dim=-1), self.b, strict=True)]
        return self.adapted.put_together(parts, self.groups)

    def held(self) -> Iterator[tuple[Parameter, torch.nn.Parameter]]:
        return zip(self.adapted.parameters, (*self.a, *self.b), strict=True)

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """This rank's shard of W + scale B A, in W's dtype. A copy."""
        return merged(self.adapted, weight.detach(), [*self.a], [*self.b], scale=self.scale, groups=self.groups)


class AddedInGroups:
    """The adapters of one product of all local experts, by grouped products."""

    def __init__(self, adapters: Sequence[Adapter], is_on: Callable[[], bool]) -> None:
        self._adapters, self._is_on = adapters, is_on

    def shapes(self, device: torch.device, dtype: torch.dtype) -> list[Shape]:
        """Of the products."""
        first = self._adapters[0]
        outputs, inputs = len(first.a) * len(first.a[0]), first.a[0].size(1)
        return [Shape(device, dtype, outputs, inputs), *(Shape(device, dtype, *b.shape) for b in first.b)]

    def __call__(self, x: Tensor, groups: Groups) -> Tensor | None:
        """x: [T, inputs], sorted by expert. Returns what is added to the product, if anything is."""
        if not self._is_on():
            return None
        first, dtype = self._adapters[0], x.dtype
        low = grouped_product(x, groups, [torch.cat([a.to(dtype) for a in each.a]) for each in self._adapters])
        parts = [
            grouped_product(u, groups, [each.b[i].to(dtype) for each in self._adapters])
            for i, u in enumerate((low * first.scale).chunk(len(first.a), dim=-1))
        ]
        return first.adapted.put_together(parts, first.groups)


def _communication(linear: torch.nn.Module) -> tuple[Between, tuple[bool, bool]]:
    """Between A and B of this module's adapter; and whether the gradients of A and of B are summed over tensor-parallel
    ranks: each of these has seen other tokens, or goes on to other outputs."""
    if isinstance(linear, CopiedLinear):
        cut = bool(cast(Any, linear.weight).sequence_parallel)
        return _nothing, (cut, cut)
    if not isinstance(linear, ColumnParallelLinear | RowParallelLinear):
        raise UsageError(f"lora: {type(linear).__name__} has no adapters; leave it out of lora.targets")
    column, cut = isinstance(linear, ColumnParallelLinear), linear.sequence_parallel
    group = cast("dist.ProcessGroup", linear.tp_group)
    if group.size() == 1:
        return _nothing, (False, False)
    if linear.explicit_expert_comm:
        return _nothing, (column, not column)
    if column and cut:
        return lambda u: gather_from_sequence_parallel_region(u, tensor_parallel_output_grad=True, group=group), (
            True,
            False,
        )
    if column:
        return lambda u: copy_to_tensor_model_parallel_region(u, group=group), (False, False)
    if cut:
        return lambda u: reduce_scatter_to_sequence_parallel_region(u, group=group), (False, True)
    return lambda u: reduce_from_tensor_model_parallel_region(u, group=group), (False, False)


def _nothing(u: Tensor) -> Tensor:
    return u


def _grouped_experts(model: GPTModel) -> list[GroupedExperts]:
    found = [getattr(cast(Any, layer).mlp, "experts", None) for layer in model.decoder.layers]
    return [experts for experts in found if isinstance(experts, GroupedExperts)]


class Adapters(torch.nn.Module):
    """All of this rank, by `Adapted.name`."""

    def __init__(self, model: GPTModel, family: Family, lora: LoraConfig, coordinates: Coordinates, seed: int) -> None:
        """On the model's device, beside its modules; `install` adds them to it. seed: of A, which does not depend on
        the layout.

        UsageError where a pipeline stage has none, or where there is no adapter for a module.
        """
        super().__init__()
        self.at, self._seed = coordinates, seed
        self._on = True
        self._hooks: list[RemovableHandle] = []
        wanted = {each.base.name: each for each in adapters_of(family, lora.rank, lora.targets)}
        self._beside: dict[torch.nn.Module, Adapter] = {}
        for local, weight in model.named_parameters():
            adapted = wanted.get(global_name(model, local))
            if adapted is None:
                continue
            linear = model.get_submodule(local.rpartition(".")[0])
            adapter = Adapter(adapted, linear, lora.scale, coordinates).to(weight.device)
            self.add_module(adapted.name, adapter)
            self._beside[linear] = adapter
        if not self._beside:
            raise UsageError(
                f"lora.targets leaves pipeline stage {coordinates.pp_rank} without an adapter; name more, or take "
                "fewer stages"
            )
        self.draw()

    def install(self, model: GPTModel) -> None:
        """From now on the frozen model computes with them, and they are its part `PART`."""
        beside = self._beside
        setattr(model, PART, self)
        # Before other hooks: what these do with the module's output, they do with the sum.
        self._hooks = [
            linear.register_forward_hook(self._added(adapter), prepend=True) for linear, adapter in beside.items()
        ]
        for experts in _grouped_experts(model):  # which do not call their modules
            experts.added = [
                self._added_in_groups(beside, [getattr(expert, name) for expert in experts.local_experts])
                for name in ("linear_fc1", "linear_fc2")
            ]
        if model.pre_process and model.config.recompute_granularity is not None:
            # What is computed again has a gradient where its input has one; behind a frozen embedding that has none.
            self._hooks.append(model.embedding.register_forward_hook(_require_gradient))

    def remove(self, model: GPTModel) -> None:
        """The inverse of `install`: the model is as it was before."""
        for hook in self._hooks:
            hook.remove()
        for experts in _grouped_experts(model):
            experts.added = [None, None]
        delattr(model, PART)

    def _added(self, adapter: Adapter) -> Callable[..., Any]:
        def add(_module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Any) -> Any:
            if not self._on:
                return output
            if isinstance(output, Tensor):
                return output + adapter(inputs[0])
            product, bias = output
            return product + adapter(inputs[0]), bias

        return add

    def _added_in_groups(
        self, beside: Mapping[torch.nn.Module, Adapter], modules: Sequence[torch.nn.Module]
    ) -> AddedInGroups | None:
        """beside: the adapter of each module; modules: one of each local expert."""
        here = [beside[module] for module in modules if module in beside]
        return AddedInGroups(here, lambda: self._on) if here else None

    def adapters(self) -> Iterator[Adapter]:
        return cast(Iterator[Adapter], self.children())

    def held(self) -> Iterator[tuple[Parameter, torch.nn.Parameter]]:
        """Each adapter's parameters and this rank's shards of them."""
        for adapter in self.adapters():
            yield from adapter.held()

    @torch.no_grad()
    def draw(self) -> None:
        """A at random, uniform within 1 / sqrt(inputs), as peft draws it (Kaiming with a = sqrt 5); B is 0."""
        for adapter in self.adapters():
            for parameter, held in adapter.held():
                if parameter in adapter.adapted.b:
                    held.zero_()
                    continue
                name = hashlib.sha256(f"{self._seed} {parameter.name}".encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(name[:7], "big"))
                bound = 1 / math.sqrt(parameter.merged_shape[1])
                whole = torch.empty(parameter.merged_shape).uniform_(-bound, bound, generator=generator)
                held.copy_(parameter.shard(whole, self.at.tp_rank, self.at.layout.tp))

    @torch.no_grad()
    def load(self, read: Callable[[Parameter], Tensor]) -> None:
        """read: the merged tensor of a parameter."""
        for parameter, held in self.held():
            held.copy_(parameter.shard(read(parameter), self.at.tp_rank, self.at.layout.tp))

    def merging_bytes(self, dtype: torch.dtype) -> int:
        """Memory that merging one parameter takes at most: its sum and B A in float32, and the sum rounded."""
        largest = max(math.prod(each.adapted.base.merged_shape) for each in self.adapters())
        return (8 + dtype.itemsize) * largest // self.at.layout.tp

    @contextmanager
    def off(self) -> Iterator[None]:
        """The model computes as if it had no adapters."""
        self._on = False
        try:
            yield
        finally:
            self._on = True

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """For Megatron: each tensor under a name of its own, which begins with `PART` as the prefix does."""
        return {parameter.name: sharded(parameter, held, self.at) for parameter, held in self.held()}


def sharded(parameter: Parameter, held: Tensor, at: Coordinates | None) -> Any:
    """As Megatron's checkpoints have this rank's part of a parameter; at: None, one process holds it whole."""
    rank, size, replica = (0, 1, 0) if at is None else (at.tp_rank, at.layout.tp, _replica(parameter))
    dim = parameter.shard_dim
    cut = dim is not None and size > 1
    offsets = [(dim, rank, size)] if dim is not None and cut else []
    entry = ShardedTensor.from_rank_offsets(
        parameter.name, held, *offsets, replica_id=(0, 0 if cut else rank, replica), prepend_axis_num=0
    )
    # Two blocks, each cut by itself.
    return apply_swiglu_sharded_factory(entry, ()) if parameter.blocks == 2 else entry


def _replica(parameter: Parameter) -> int:
    if parameter.expert is not None:
        return parallel_state.get_expert_data_parallel_rank()
    return parallel_state.get_data_parallel_rank(with_context_parallel=True)


def _require_gradient(_module: torch.nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


class MergedWeights(Mapping[str, Tensor]):
    """This rank's parameters by global name, with the adapters merged in as they are asked for, one at a time."""

    def __init__(self, model: GPTModel, adapters: Adapters) -> None:
        self._parameters = global_names(model)
        self._adapters = {adapter.adapted.base.name: adapter for adapter in adapters.adapters()}

    def __getitem__(self, name: str) -> Tensor:
        weight, adapter = self._parameters[name], self._adapters.get(name)
        return weight if adapter is None else adapter.merged(weight)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


def attach(model: GPTModel, family: Family, lora: LoraConfig, coordinates: Coordinates, *, seed: int) -> Adapters:
    """Freezes the model and gives it its adapters, as its part `PART`."""
    model.requires_grad_(False)
    adapters = Adapters(model, family, lora, coordinates, seed)
    adapters.install(model)
    return adapters
