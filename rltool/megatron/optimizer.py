"""Adam with decoupled weight decay and the learning-rate schedule, both Megatron's."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import MegatronModule

from rltool.config.sections import OptimizerConfig
from rltool.errors import UsageError
from rltool.megatron.adamw import GroupStepAdamW
from rltool.megatron.patches import use_group_step_adamw, use_multi_tensor_kernels

# What a resumed run takes from its own configuration rather than from the checkpoint's parameter groups.
CONFIGURED = ("lr", "max_lr", "min_lr", "betas", "eps")


def build_optimizer(
    model: MegatronModule, config: OptimizerConfig, dtype: torch.dtype, *, distributed: bool = False
) -> MegatronOptimizer:
    """The optimizer of this rank's parameters. Biases and norms have no weight decay (Megatron's default).

    distributed: this rank holds fp32 weights and moments of its share only; `model`'s data-parallel wrapper must have
        the same.
    """
    use_group_step_adamw()
    use_multi_tensor_kernels()
    return get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=min(config.min_lr, config.lr),
            weight_decay=config.weight_decay,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            adam_eps=config.eps,
            clip_grad=config.clip_grad,
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=distributed,
        ),
        [model],
    )


def build_schedule(
    optimizer: MegatronOptimizer, config: OptimizerConfig, total_optimizer_steps: int
) -> OptimizerParamScheduler:
    """Linear warm-up from 0, then the decay to min_lr. Optimizer step i (from 0) has the learning rate of i steps done.

    On resume the configured values win over the checkpoint's; only the number of steps done is restored.
    """
    decay_steps = config.decay_steps or max(total_optimizer_steps, 1)
    if config.warmup_steps >= decay_steps:
        raise UsageError(
            f"optimizer.warmup_steps = {config.warmup_steps} leaves no step at full learning rate: the schedule takes "
            f"{decay_steps} optimizer steps; lower warmup_steps or raise decay_steps"
        )
    if config.min_lr > config.lr:
        raise UsageError(f"optimizer.min_lr = {config.min_lr:g} is above optimizer.lr = {config.lr:g}")
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.warmup_steps,
        lr_decay_steps=decay_steps,
        lr_decay_style=config.decay_style,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=decay_steps,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )


def make_moments(optimizer: Any) -> None:
    """Adam's state before its first step, as that would make it."""
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(each.optimizer, GroupStepAdamW):
            each.optimizer.make_moments()


def chained_as(loaded: dict[Any, Any], optimizer: MegatronOptimizer) -> dict[Any, Any]:
    """A loaded state as this optimizer is built. With expert parallelism Megatron chains one optimizer for experts to
    another for the rest: tensors are found under any layout, settings and steps only where they were saved."""
    optimizers: list[Any] = getattr(optimizer, "chained_optimizers", [optimizer])
    numbered = {key: part for key, part in loaded.items() if isinstance(key, int)}
    rest = {key: part for key, part in loaded.items() if key not in numbered}
    here = list(numbered.values()) if len(optimizers) > 1 else [rest]
    saved = rest if len(optimizers) > 1 else numbered.get(0)
    if not saved:
        return loaded

    def inner(part: dict[Any, Any]) -> dict[Any, Any]:
        return part.get("optimizer", part)

    group_step = {key: value for key, value in inner(saved)["param_groups"][0].items() if key == "step"}
    common_step = {key: value for key, value in inner(saved).get("state", {}).items() if key == "common_step"}
    for part, each in zip(here, optimizers, strict=True):
        if "param_state" in part:  # the distributed optimizer's, whose tensors stand apart from all the rest
            part["param_state_sharding_type"] = saved["param_state_sharding_type"]
            part["optimizer"] = {"param_groups": [{} for _ in each.optimizer.param_groups]}
        else:
            inner(part)["state"].update(common_step)
        for group, own in zip(inner(part)["param_groups"], each.optimizer.param_groups, strict=True):
            group.update({key: value for key, value in own.items() if key != "params"} | group_step)
    return numbered if len(optimizers) > 1 else rest


def keep_configured_values(loaded: dict[str, Any], optimizer: MegatronOptimizer) -> None:
    """Puts this run's learning rates, betas and eps into the parameter groups of a checkpoint that is to be loaded.

    Before loading, because Megatron-core 0.19 finds groups by their learning rates and refuses a checkpoint in which
    these differ, while 0.16 takes the saved ones in silence. The mixed-precision optimizer nests the groups one level
    deeper.
    """
    configured = {key: optimizer.param_groups[0][key] for key in CONFIGURED if key in optimizer.param_groups[0]}
    for part in parts(loaded):
        for group in part.get("optimizer", part)["param_groups"]:
            group.update(configured)


def parts(state: dict[Any, Any]) -> list[dict[str, Any]]:
    """Of an optimizer's state: itself, or those of the optimizers that Megatron chains for a mixture of experts."""
    return list(state.values()) if all(isinstance(key, int) for key in state) else [state]
