"""Every change that rltool makes to Megatron-core in memory, each with the versions that it is for and its reason.

`PATCHES` lists them. A test asks `broken_targets` whether the installed Megatron-core still has, in the expected form,
what each of them replaces: another version fails there, and not as wrong numbers in a run.
Not here: what a setting of Megatron-core can do.
"""

from rltool.megatron.patches.cpu_mode import cpu_mode
from rltool.megatron.patches.layers import (
    dispatch_without_atomics,
    fuse_weight_gradients,
    recompute_without_transformer_engine,
    rotate_in_one_kernel,
    route_without_transformer_engine,
)
from rltool.megatron.patches.optimizer import use_group_step_adamw, use_multi_tensor_kernels
from rltool.megatron.patches.registry import PATCHES, Patch, PatchTargetMissing, Target, broken_targets
from rltool.megatron.patches.saving import save_without_manager_process, unsharded_state_kept

__all__ = [
    "PATCHES",
    "Patch",
    "PatchTargetMissing",
    "Target",
    "broken_targets",
    "cpu_mode",
    "dispatch_without_atomics",
    "fuse_weight_gradients",
    "recompute_without_transformer_engine",
    "rotate_in_one_kernel",
    "route_without_transformer_engine",
    "save_without_manager_process",
    "unsharded_state_kept",
    "use_group_step_adamw",
    "use_multi_tensor_kernels",
]
