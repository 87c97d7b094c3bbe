"""Experts of a mixture by grouped matrix products: the rows of all local experts in one kernel.

torch's grouped product (torch.nn.functional.grouped_mm) has a kernel for bf16 on GPUs of compute capability 9 and 10,
and elsewhere a loop. It is used only after it gave the results of one product per expert, gradients included, on a
small batch of the shape at hand. Parameters, checkpoints and the sharding over ranks stay those of Megatron's
SequentialMLP.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Literal, NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rltool.errors import RltoolError, UsageError
from rltool.megatron.kernels import add_to_each, sum_rows, swiglu
from rltool.megatron.layers import gate_of, with_scaled_bias
from rltool.megatron.runtime import to_device

logger = logging.getLogger(__name__)

ExpertProducts = Literal["auto", "grouped", "sequential"]

PROBE_ROWS = (33, 0, 1, 300, 0)
"""Of each expert in the batch that both ways are compared on."""


class Shape(NamedTuple):
    """One product of each expert: [rows, inputs] @ [inputs, outputs]."""

    device: torch.device
    dtype: torch.dtype
    outputs: int
    inputs: int

    @property
    def tolerance(self) -> float:
        """Largest relative difference (2-norm) of results and gradients."""
        return 1e-5 if self.dtype is torch.float32 else 0.02


class Groups(NamedTuple):
    """How rows, sorted by expert, belong to the local experts. ends: [experts] int32 on the rows' device."""

    rows: list[int]
    ends: Tensor


Product = Callable[[Tensor, Groups, Sequence[Tensor]], Tensor]
"""f(x [T, inputs], groups, weights [outputs, inputs] of each expert) -> [T, outputs]."""


class AddedProduct(Protocol):
    """What adapters add to a product: f(x [T, inputs], groups) -> [T, outputs], or nothing while they are off."""

    def __call__(self, x: Tensor, groups: Groups) -> Tensor | None: ...

    def shapes(self, device: torch.device, dtype: torch.dtype) -> list[Shape]:
        """Of the grouped products in it."""
        ...


def wanted(products: ExpertProducts, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether grouped products are to be tried. UsageError where they are demanded and a GPU has none."""
    if products == "grouped":
        if device.type == "cuda" and dtype is not torch.bfloat16:
            raise UsageError(
                'trainer.expert_products = "grouped" on a GPU needs model.dtype = "bfloat16"; set that, or leave '
                'trainer.expert_products at "auto"'
            )
        return True
    if products == "sequential" or device.type != "cuda" or dtype is not torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


def computes(config: TransformerConfig) -> bool:
    """Whether experts of this configuration are those of `GroupedExperts`: SwiGLU, its output scaled by the router, or
    with biases those of `BiasedExpert`."""
    plain = (
        config.activation_func is F.silu
        and config.activation_func_clamp_value is None
        and config.glu_linear_offset == 0
    )
    return config.gated_linear_unit and (plain or config.add_bias_linear) and not config.moe_apply_probs_on_input


class GroupedExperts(SequentialMLP):
    """Megatron's SequentialMLP, where `computes` its configuration, with the products of all experts at once."""

    demanded = False
    added: Sequence[AddedProduct | None] = (None, None)
    """Adapters of the first and of the second product."""

    @property
    def grouped(self) -> bool:
        """Whether they run by grouped products; tried when it is first asked for."""
        firsts = [weights[0] for weights in weights_of(self)]
        shapes = [Shape(first.device, first.dtype, *first.shape) for first in firsts]
        for added in filter(None, self.added):
            shapes += added.shapes(firsts[0].device, firsts[0].dtype)
        return all(judged(shape, self.demanded) for shape in shapes)

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """[T, hidden], sorted by expert; [local experts]; [T]. Returns [T, hidden] and no bias."""
        x = permuted_local_hidden_states
        if not self.grouped:
            return super().forward(x, tokens_per_expert, permuted_probs)
        up, down = weights_of(self)
        rows = tokens_per_expert.tolist()
        groups = Groups(rows, to_device(torch.tensor(list(accumulate(rows)), dtype=torch.int32), x.device))
        if not self.config.add_bias_linear:
            scaled = swiglu(self._product(x, groups, up, self.added[0]), permuted_probs)
            return self._product(scaled, groups, down, self.added[1]), None
        up_biases, down_biases = biases_of(self)
        gated = self._product(x, groups, up, self.added[0]) + rows_of(up_biases, groups)
        scaled = swiglu(gated, permuted_probs, gate_of(self.config))
        output = self._product(scaled, groups, down, self.added[1])
        return with_scaled_bias(self.config, output, rows_of(down_biases, groups), permuted_probs), None

    @staticmethod
    def _product(x: Tensor, groups: Groups, weights: Sequence[Tensor], added: AddedProduct | None) -> Tensor:
        product = grouped_product(x, groups, weights)
        more = None if added is None else added(x, groups)
        return product if more is None else product + more


def group_products(experts: SequentialMLP, *, demanded: bool) -> None:
    """From now on these experts, which lie on their device, run by grouped products where torch's are right.

    demanded: RltoolError at the first forward where they are not. Each of the two weights of all experts comes to lie
    in one piece of memory, so that the product reads it there. The distributed optimizer moves weights into buffers of
    its own; then every product copies them first.
    """
    grouped = cast(GroupedExperts, experts)
    grouped.__class__ = GroupedExperts
    grouped.demanded = demanded
    for weights in weights_of(grouped):
        whole = torch.stack([weight.detach() for weight in weights])
        for weight, part in zip(weights, whole.unbind(), strict=True):
            weight.data = part


def weights_of(experts: SequentialMLP) -> tuple[list[Tensor], list[Tensor]]:
    """Of the local experts' first products (gate and up) [2 * ffn, hidden], and of their second [hidden, ffn]."""
    held = [cast(Any, expert) for expert in experts.local_experts]
    return [expert.linear_fc1.weight for expert in held], [expert.linear_fc2.weight for expert in held]


def biases_of(experts: SequentialMLP) -> tuple[list[Tensor], list[Tensor]]:
    """Those of `weights_of`: [2 * ffn] and [hidden]."""
    held = [cast(Any, expert) for expert in experts.local_experts]
    return [expert.linear_fc1.bias for expert in held], [expert.linear_fc2.bias for expert in held]


class _RowsOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, groups: Groups, *biases: Tensor) -> Tensor:
        ctx.ends = groups.ends
        return torch.stack(biases).index_select(0, _expert_of_row(groups))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (by_rows,) = grads
        if not len(by_rows):
            return None, *by_rows.new_zeros(len(ctx.ends), by_rows.size(1)).unbind()
        order = torch.arange(len(by_rows), device=by_rows.device)
        return None, *sum_rows(by_rows, order, ctx.ends.long()).unbind()


def _expert_of_row(groups: Groups) -> Tensor:
    """[T]."""
    rows = torch.arange(sum(groups.rows), dtype=groups.ends.dtype, device=groups.ends.device)
    return torch.bucketize(rows, groups.ends, right=True)


def rows_of(biases: Sequence[Tensor], groups: Groups) -> Tensor:
    """[width] of each expert -> [T, width]. Gradients are summed in one order, in fp32 (`kernels.sum_rows`)."""
    return cast(Tensor, _RowsOf.apply(groups, *biases))


def stacked(weights: Sequence[Tensor]) -> Tensor:
    """[experts, outputs, inputs], without a gradient: a view where they lie in one piece of memory, else a copy."""
    first = weights[0].detach()
    behind = first.untyped_storage().nbytes() - first.storage_offset() * first.element_size()
    if behind >= len(weights) * first.nbytes and all(
        weight.data_ptr() == first.data_ptr() + i * first.nbytes for i, weight in enumerate(weights)
    ):
        return first.as_strided((len(weights), *first.shape), (first.numel(), *first.stride()))
    return torch.stack([weight.detach() for weight in weights])


class _GroupedProduct(torch.autograd.Function):
    """Keeps the weights themselves for the backward pass, not a copy of them.

    torch has no grouped product of 16-bit matrices with an fp32 result: the gradients of all experts are made in the
    weights' dtype, then added to Megatron's `main_grad` at once, where there is one.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: Groups, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, groups.ends, *weights)
        ctx.rows = groups.rows
        if not x.size(0):
            return x.new_empty(0, weights[0].size(0))
        return F.grouped_mm(x, stacked(weights).mT, offs=groups.ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (by_output,) = grads
        x, ends, *weights = ctx.saved_tensors
        if not x.size(0):
            return torch.zeros_like(x), None, *map(torch.zeros_like, weights)
        by_output = by_output.contiguous()
        by_input = F.grouped_mm(by_output, stacked(weights), offs=ends) if ctx.needs_input_grad[0] else None
        if not any(ctx.needs_input_grad[2:]):  # frozen
            return by_input, None, *[None] * len(weights)
        by_weights = F.grouped_mm(by_output.mT, x, offs=ends)
        for rows, gradient in zip(ctx.rows, by_weights.unbind(), strict=True):
            if not rows:  # a sum of nothing, which a kernel may leave unwritten
                gradient.zero_()
        return by_input, None, *_added_to_main_grad(weights, by_weights)


def _added_to_main_grad(weights: Sequence[Any], gradients: Tensor) -> Sequence[Tensor]:
    """What autograd gets as the weights' gradients [experts, outputs, inputs].

    Where Megatron's data-parallel wrapper has given the weights a `main_grad`, that is added to here, and autograd
    gets stand-ins of any value: they only make Megatron's hooks run, as those of its own linear layers do.
    """
    if not all(hasattr(weight, "main_grad") and hasattr(weight, "grad_added_to_main_grad") for weight in weights):
        return gradients.unbind()
    add_to_each([weight.main_grad for weight in weights], gradients)
    for weight in weights:
        weight.grad_added_to_main_grad = True
    return [torch.empty_like(weight) for weight in weights]


def grouped_product(x: Tensor, groups: Groups, weights: Sequence[Tensor]) -> Tensor:
    """A `Product` by torch's grouped products."""
    return cast(Tensor, _GroupedProduct.apply(x.contiguous(), groups, *weights))


def sequential_product(x: Tensor, groups: Groups, weights: Sequence[Tensor]) -> Tensor:
    """A `Product`, one expert after the other."""
    return torch.cat([part @ weight.t() for part, weight in zip(x.split(groups.rows), weights, strict=True)])


@functools.cache
def judged(shape: Shape, demanded: bool = False) -> bool:
    """Whether torch's grouped product gives what single products give; if not, RltoolError where it is demanded."""
    try:
        error = disagreement(grouped_product, sequential_product, shape)
        problem = None if error <= shape.tolerance else f"differ by a relative {error:.2g}"
    except Exception as failure:
        problem = f"fail: {type(failure).__name__}: {failure}"
    if problem is None:
        return True
    message = f"grouped products of experts ({shape.inputs} to {shape.outputs} features) {problem}"
    if demanded:
        raise RltoolError(f'{message}; set trainer.expert_products = "sequential"')
    logger.warning("%s; experts run one after the other", message)
    return False


def disagreement(product: Product, reference: Product, shape: Shape) -> float:
    """Largest relative difference of output and gradients on a small batch; inf where something is not finite."""
    # Its own generator: training's random numbers are not to depend on what was tried.
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(shape.device, shape.dtype)

    total, experts = sum(PROBE_ROWS), len(PROBE_ROWS)
    groups = Groups(
        list(PROBE_ROWS), torch.tensor(list(accumulate(PROBE_ROWS)), dtype=torch.int32, device=shape.device)
    )
    x, by_output = draw(total, shape.inputs), draw(total, shape.outputs)
    weights = draw(experts, shape.outputs, shape.inputs)

    def run(multiply: Product) -> list[Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in (x, *weights)]
        with torch.enable_grad():
            output = multiply(leaves[0], groups, leaves[1:])
            by_input, *by_weights = torch.autograd.grad(output, leaves, by_output)
        return [output.detach(), by_input, torch.stack(by_weights)]

    errors = [
        float((a.float() - b.float()).norm() / b.float().norm())
        for a, b in zip(run(product), run(reference), strict=True)
    ]
    return max(errors) if all(map(math.isfinite, errors)) else math.inf
