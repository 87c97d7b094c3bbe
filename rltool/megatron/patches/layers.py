"""Layers without Transformer Engine and Apex, and with our own kernels."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rltool.megatron.kernels import rotate, sum_rows
from rltool.megatron.patches.registry import Target, patch, replace
from rltool.megatron.products import add_product


@patch(
    "0.16",
    targets=(
        Target(
            "megatron.core.transformer.moe.moe_utils:te_general_gemm",
            used="if te_general_gemm is not None",
            may_be_absent=True,
        ),
    ),
)
def route_without_transformer_engine() -> None:
    """Lets the router of Megatron-core 0.16 run where Transformer Engine is not installed.

    It asks whether `te_general_gemm` is None, but defines that name only when Transformer Engine could be imported.
    """
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


@patch(
    "0.16",
    "0.19",
    targets=(
        Target(
            "megatron.core.tensor_parallel.random:CheckpointWithoutOutput.__init__",
            ("self", "fp8"),
            used="self.fp8 = fp8 is not None",
        ),
    ),
)
@patch(
    "0.19",
    targets=(
        Target(
            "megatron.core.tensor_parallel.random:_get_share_storage",
            (),
            used="share_storage = _get_share_storage()",
        ),
    ),
)
def recompute_without_transformer_engine() -> None:
    """Lets Megatron compute norms and activations again without Transformer Engine and without a C++ compiler.

    Its helper takes "fp8 is not None" for fp8, with False as the default, and then asks Transformer Engine. That of
    0.19 compiles an extension in the first backward pass, to give one tensor another's memory; a copy, as in 0.16,
    costs little.
    """
    from megatron.core.tensor_parallel import random

    random.CheckpointWithoutOutput.__init__.__defaults__ = (None,)
    if hasattr(random, "_get_share_storage"):
        replace(random, "_get_share_storage", lambda: _copy_storage)


def _copy_storage(target: torch.Tensor, source: torch.Tensor) -> None:
    memory = target.untyped_storage()
    memory.resize_(source.untyped_storage().size())
    memory.copy_(source.untyped_storage())


@patch(
    "0.16",
    "0.19",
    targets=(
        Target(
            "megatron.core.tensor_parallel.layers:fused_weight_gradient_mlp_cuda",
            used="fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(",
            may_be_absent=True,
        ),
        Target(
            "megatron.core.tensor_parallel.layers:_grad_accum_fusion_available",
            used="config.gradient_accumulation_fusion and not _grad_accum_fusion_available",
        ),
    ),
)
def fuse_weight_gradients(device: torch.device) -> bool:
    """Lets Megatron's linear layers add the gradients of their weights to fp32 `main_grad` as they are computed.

    By `add_product` in the place of Apex's extension: less traffic, and no rounding to bf16 in between. False where
    Megatron cannot: it makes a stand-in for the gradient on the current CUDA device.
    """
    from megatron.core.tensor_parallel import layers

    if device.type != "cuda":
        return False
    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(
        wgrad_gemm_accum_fp32=lambda inputs, gradient, total: add_product(total, gradient.t(), inputs)
    )
    replace(layers, "_grad_accum_fusion_available", True)
    return True


@patch(
    "0.16",
    "0.19",
    targets=(Target("megatron.core.transformer.attention:apply_rotary_pos_emb", used="query = apply_rotary_pos_emb("),),
)
def rotate_in_one_kernel() -> None:
    """Makes Megatron's attention rotate queries and keys by `kernels.rotate`.

    Its own takes seven kernels and rounds in between. Its angles are what `RotaryPositions` made.
    """
    from megatron.core.transformer import attention

    replace(attention, "apply_rotary_pos_emb", lambda x, turn, *_, **__: rotate(x, turn))


class DispatchedRows(NamedTuple):
    """Which tokens the rows of a mixture's dispatch are, a row for each token and expert, sorted by expert.

    tokens: [R] int64, each row's token; order: [R] int64, the rows sorted by token; ends: [N] int64, where in `order`
    each token's rows end.
    """

    tokens: Tensor
    order: Tensor
    ends: Tensor


class _Dispatch(torch.autograd.Function):
    """[N, H] -> [R, H]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: DispatchedRows) -> Tensor:
        ctx.save_for_backward(rows.order, rows.ends)
        return x.index_select(0, rows.tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        return sum_rows(grad, *ctx.saved_tensors), None


class _Combine(torch.autograd.Function):
    """[R, H] -> [N, H]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: DispatchedRows) -> Tensor:
        ctx.save_for_backward(rows.tokens)
        return sum_rows(x, rows.order, rows.ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        return grad.index_select(0, *ctx.saved_tensors), None


_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher"


@patch(
    "0.16",
    "0.19",
    targets=(
        Target(
            f"{_DISPATCHER}:permute",
            ("tokens", "routing_map", "probs", "num_out_tokens", "fused", "drop_and_pad"),
            used="self.reversed_local_input_permutation_mapping,",
        ),
        Target(
            f"{_DISPATCHER}:unpermute",
            ("permuted_tokens", "sorted_indices", "restore_shape"),
            used="self.reversed_local_input_permutation_mapping,\n            restore_shape=",
        ),
        Target(
            f"{_DISPATCHER}:sort_chunks_by_idxs",
            ("input", "split_sizes", "sorted_idxs", "probs", "fused"),
            used="self.sort_input_by_local_experts,",
        ),
    ),
)
def dispatch_without_atomics() -> None:
    """Makes Megatron's dispatch of tokens to experts gather and sum rows, in place of adding them up atomically.

    Its backward pass of the dispatch (`index_add_`) and its combination (`scatter_add_`) add bf16 numbers in whatever
    order they come, take 3.4 of the 28 ms of a layer of Qwen3-30B-A3B on an H200 (16,384 tokens), and give other bits
    each time. With all experts on one rank it also copies all rows twice to sort chunks that are sorted.
    """
    from megatron.core.transformer.moe import token_dispatcher

    its_permute, its_unpermute = token_dispatcher.permute, token_dispatcher.unpermute
    its_sort = token_dispatcher.sort_chunks_by_idxs
    if getattr(its_permute, "without_atomics", False):
        return
    # 0.19 also returns pad_offsets and the padded number of tokens of each expert, for fp8.
    more = len(inspect.signature(its_permute).parameters) - 6

    def permute(
        tokens: Tensor,
        routing_map: Tensor,
        probs: Tensor | None = None,
        num_out_tokens: int | None = None,
        fused: bool = False,
        drop_and_pad: bool = False,
        *arguments: Any,
        **keywords: Any,
    ) -> tuple[Any, ...]:
        if fused or drop_and_pad:
            return its_permute(tokens, routing_map, probs, num_out_tokens, fused, drop_and_pad, *arguments, **keywords)
        by_expert = routing_map.bool().T.reshape(-1).nonzero().squeeze(1)
        of_token = by_expert % len(tokens)
        rows = DispatchedRows(of_token, of_token.argsort(stable=True), routing_map.sum(1).cumsum(0))
        row_probs = None if probs is None else probs.T.reshape(-1)[by_expert]
        counts = (None, arguments[0] if arguments else keywords.get("tokens_per_expert"))
        return _Dispatch.apply(tokens, rows), row_probs, rows, *counts[:more]

    def unpermute(permuted_tokens: Tensor, sorted_indices: Any, restore_shape: Any, *arguments: Any, **keywords: Any):
        if not isinstance(sorted_indices, DispatchedRows):
            return its_unpermute(permuted_tokens, sorted_indices, restore_shape, *arguments, **keywords)
        if arguments or keywords.get("probs") is not None:
            return its_unpermute(permuted_tokens, sorted_indices.tokens, restore_shape, *arguments, **keywords)
        return _Combine.apply(permuted_tokens, sorted_indices)

    def sort_chunks_by_idxs(
        input: Tensor, split_sizes: Tensor, sorted_idxs: Tensor, probs: Tensor | None = None, fused: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        if not fused and bool((sorted_idxs.diff() == 1).all()):
            return input, probs
        return its_sort(input, split_sizes, sorted_idxs, probs, fused)

    permute.without_atomics = True  # pyright: ignore[reportFunctionMemberAccess]
    replace(token_dispatcher, "permute", permute)
    replace(token_dispatcher, "unpermute", unpermute)
    replace(token_dispatcher, "sort_chunks_by_idxs", sort_chunks_by_idxs)
