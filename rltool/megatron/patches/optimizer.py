"""Our AdamW in the place of those that Megatron-core looks for."""

from __future__ import annotations

from rltool.megatron.adamw import GroupStepAdamW
from rltool.megatron.multi_tensor import l2_norm, scale
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
    """Makes Megatron clip by torch's multi-tensor kernels where it would by its loops, which wait for the device once
    for each parameter. Idempotent."""
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads

    if clip_grads.l2_norm_impl is getattr(utils, "local_multi_tensor_l2_norm", None):
        replace(clip_grads, "l2_norm_impl", l2_norm)
    if clip_grads.multi_tensor_scale_impl is getattr(utils, "local_multi_tensor_scale", None):
        replace(clip_grads, "multi_tensor_scale_impl", scale)
