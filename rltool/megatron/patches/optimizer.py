"""The optimizer: our AdamW in the place of those that Megatron-core looks for, and the gradient norm and clipping
over many tensors without waiting for the device once for each of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rltool.megatron.adamw import GroupStepAdamW
from rltool.megatron.patches.registry import Target, patch, replace


@patch(
    "0.16",
    "0.19",
    targets=(
        Target("megatron.core.optimizer:Adam", used="adam_cls = Adam"),
        Target("megatron.core.optimizer:USING_PYTORCH_OPTIMIZER", used="if USING_PYTORCH_OPTIMIZER:"),
        Target("megatron.core.optimizer.distrib_optimizer:Adam", used="isinstance(optimizer, (Adam"),
        Target("megatron.core.optimizer.distrib_optimizer:HAVE_APEX_OR_TE"),
        Target(
            "megatron.core.optimizer.distrib_optimizer:USING_TE_OPTIMIZER",
            used="elif USING_TE_OPTIMIZER or USING_APEX_OPTIMIZER:",
        ),
        Target("megatron.core.optimizer.distrib_optimizer:USING_APEX_OPTIMIZER"),
    ),
)
def use_group_step_adamw() -> None:
    """Makes Megatron build its optimizers on `GroupStepAdamW`, whatever else is installed. Idempotent.

    With torch's AdamW its distributed optimizer cannot be restored from a checkpoint.
    """
    import megatron.core.optimizer as optimizers
    from megatron.core.optimizer import distrib_optimizer

    for module in (optimizers, distrib_optimizer):
        replace(module, "Adam", GroupStepAdamW)
    replace(optimizers, "USING_PYTORCH_OPTIMIZER", False)
    replace(distrib_optimizer, "HAVE_APEX_OR_TE", True)
    replace(distrib_optimizer, "USING_TE_OPTIMIZER", True)
    replace(distrib_optimizer, "USING_APEX_OPTIMIZER", False)


@patch(
    "0.16",
    "0.19",
    targets=(
        Target("megatron.core.optimizer.clip_grads:l2_norm_impl", used="l2_norm_impl,"),
        Target("megatron.core.optimizer.clip_grads:multi_tensor_scale_impl", used="multi_tensor_scale_impl,"),
    ),
)
def use_multi_tensor_kernels() -> None:
    """Makes Megatron clip by torch's multi-tensor kernels where it would by its loops. Idempotent.

    Without Transformer Engine and Apex Megatron-core falls back to loops (megatron/core/utils.py,
    local_multi_tensor_l2_norm and local_multi_tensor_scale): the norm of each gradient is read back by itself, and each
    is multiplied into a new tensor. On a GPU that was 10 ms of an idle device for 170 parameters, twice a step.
    """
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads

    if clip_grads.l2_norm_impl is getattr(utils, "local_multi_tensor_l2_norm", None):
        replace(clip_grads, "l2_norm_impl", l2_norm)
    if clip_grads.multi_tensor_scale_impl is getattr(utils, "local_multi_tensor_scale", None):
        replace(clip_grads, "multi_tensor_scale_impl", scale)


def l2_norm(_chunk_size: int, _noop_flag: Tensor, tensor_lists: list[list[Tensor]], *_: Any) -> tuple[Tensor, None]:
    """The 2-norm of all tensors together, [1], with the interface of amp_C.multi_tensor_l2norm."""
    flat = [tensor for tensors in tensor_lists for tensor in tensors]
    norms = torch._foreach_norm(flat)  # pyright: ignore[reportPrivateImportUsage]: torch's own optimizers use these
    return torch.linalg.vector_norm(torch.stack(norms)).reshape(1), None


def scale(_chunk_size: int, _noop_flag: Tensor, tensor_lists: list[list[Tensor]], factor: float) -> None:
    """second list = first list * factor, with the interface of amp_C.multi_tensor_scale."""
    sources, results = tensor_lists
    if any(source is not result for source, result in zip(sources, results, strict=True)):
        torch._foreach_copy_(results, sources)  # pyright: ignore[reportPrivateImportUsage]
    torch._foreach_mul_(results, factor)  # pyright: ignore[reportPrivateImportUsage]
