"""Layers without Transformer Engine and Apex, and with our own kernels."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from rltool.megatron.kernels import rotate
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

    Its own takes seven kernels and rounds in between. What it hands over as angles is what `RotaryPositions` made.
    """
    from megatron.core.transformer import attention

    replace(attention, "apply_rotary_pos_emb", lambda x, turn, *_, **__: rotate(x, turn))
