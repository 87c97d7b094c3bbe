"""Flags of engines that have no GPU to themselves: those that use the trainer's in turns with it can sleep, and leave
it room; those that share a GPU among themselves take their part of its memory. Pure."""

from __future__ import annotations

from rltool.config.serve import POLICY, Device, EngineGroup, EngineKind, EngineLaunch

MEMORY_FRACTION = "0.6"
"""Of each GPU, for weights and KV cache of an engine. While an engine is awake the trainer's parameters may lie beside
it (a weight sync reads them), and a CUDA context and NCCL's buffers always do."""

SHARED_FRACTION = 0.88
"""Of each GPU, for all engines that share it: a little less than one alone takes, for each has a CUDA context."""

_SLEEP: dict[EngineKind, tuple[str, ...]] = {"vllm": ("--enable-sleep-mode",), "sglang": ("--enable-memory-saver",)}
_KEEP_WEIGHTS: dict[EngineKind, tuple[str, ...]] = {"vllm": (), "sglang": ("--enable-weights-cpu-backup",)}
_FRACTION: dict[EngineKind, str] = {"vllm": "--gpu-memory-utilization", "sglang": "--mem-fraction-static"}


def takes_turns(group: EngineGroup, default: Device, *, from_disk: bool = False) -> EngineGroup:
    """The group with what its engines need for it; flags of its own win. On the CPU, where none can sleep, as it is.
    from_disk: they load their weights again when they wake up, and need no copy."""
    if (group.device or default) == "cpu" or group.role == "placeholder":
        return group
    given = {flag.partition("=")[0] for flag in group.flags}
    kept = () if group.model == POLICY or from_disk else _KEEP_WEIGHTS[group.engine]
    added = [flag for flag in (*_SLEEP[group.engine], *kept) if flag not in given]
    if _FRACTION[group.engine] not in given:
        added += [_FRACTION[group.engine], MEMORY_FRACTION]
    return group.model_copy(update={"flags": (*added, *group.flags)})


def shares_memory(group: EngineGroup, number: int) -> EngineGroup:
    """The group with the part of the GPUs' memory that its engine of this number has, where several share them; a flag
    of its own wins.

    vLLM's part is of the whole memory; SGLang's of what is free when it starts (kv_pool_runtime.py), after those that
    started before it.
    """
    name = _FRACTION[group.engine]
    if group.engines_per_gpu == 1 or any(flag.partition("=")[0] == name for flag in group.flags):
        return group
    part = SHARED_FRACTION / group.engines_per_gpu
    if group.engine == "sglang":
        part /= 1 - number % group.engines_per_gpu * part
    return group.model_copy(update={"flags": (name, f"{part:.3f}", *group.flags)})


def measures_memory(launch: EngineLaunch) -> bool:
    """Whether the engine finds out while it starts how much memory is left for its KV cache; vLLM does not where it is
    told (vllm/v1/worker/gpu_worker.py, determine_available_memory)."""
    names = {flag.partition("=")[0].replace("_", "-") for flag in launch.extra_args}
    return launch.engine != "vllm" or "--kv-cache-memory-bytes" not in names


def memory_flag(group: EngineGroup) -> str:
    """What the group says of the GPUs' memory, as on a command line."""
    name = _FRACTION[group.engine]
    for flag, following in zip(group.flags, (*group.flags[1:], ""), strict=True):
        if flag.partition("=")[0] == name:
            return flag if "=" in flag else f"{name} {following}"
    return f"{name} as the engine has it"
