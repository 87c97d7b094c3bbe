"""Flags of engines that have no GPU to themselves: those that use the trainer's in turns with it can sleep, and leave
it room; those that share a GPU among themselves take their part of its memory. Pure."""

from __future__ import annotations

from rltool.config.serve import POLICY, Device, EngineGroup, EngineLaunch
from rltool.engines.dialects.table import dialect, launches
from rltool.errors import UsageError

MEMORY_FRACTION = "0.6"
"""Of each GPU, for weights and KV cache of an engine. While an engine is awake the trainer's parameters may lie beside
it (a weight sync reads them), and a CUDA context and NCCL's buffers always do."""

SHARED_FRACTION = 0.88
"""Of each GPU, for all engines that share it: a little less than one alone takes, for each has a CUDA context."""

def takes_turns(group: EngineGroup, default: Device, *, from_disk: bool = False) -> EngineGroup:
    """The group with what its engines need for it; flags of its own win. On the CPU, where none can sleep, as it is.
    from_disk: they load their weights again when they wake up, and need no copy. Raises UsageError for engines that
    cannot sleep."""
    if (group.device or default) == "cpu" or group.role == "placeholder":
        return group
    given = {flag.partition("=")[0] for flag in group.flags}
    memory = launches(group.engine).memory
    if not memory.sleep:
        raise UsageError(
            f"group {group.name!r}: {dialect(group.engine).label} engines cannot sleep, so they cannot use the "
            'trainer\'s GPUs in turns with it; use engines.mode = "managed"'
        )
    kept = () if group.model == POLICY or from_disk else memory.keep_weights
    added = [flag for flag in (*memory.sleep, *kept) if flag not in given]
    if memory.fraction is not None and memory.fraction not in given:
        added += [memory.fraction, MEMORY_FRACTION]
    return group.model_copy(update={"flags": (*added, *group.flags)})


def shares_memory(group: EngineGroup, number: int) -> EngineGroup:
    """The group with the part of the GPUs' memory that its engine of this number has, where several share them; a flag
    of its own wins.

    One that is of what is free (MemoryFlags.of_free) is of what those that started before it have left. Raises
    UsageError for engines whose part cannot be set.
    """
    if group.engines_per_gpu == 1:
        return group
    memory = launches(group.engine).memory
    name = memory.fraction
    if name is None:
        raise UsageError(
            f"group {group.name!r}: {dialect(group.engine).label} engines cannot be given a part of a GPU's memory; "
            "leave engines_per_gpu out"
        )
    if any(flag.partition("=")[0] == name for flag in group.flags):
        return group
    part = SHARED_FRACTION / group.engines_per_gpu
    if memory.of_free:
        part /= 1 - number % group.engines_per_gpu * part
    return group.model_copy(update={"flags": (name, f"{part:.3f}", *group.flags)})


def measures_memory(launch: EngineLaunch) -> bool:
    """Whether the engine finds out while it starts how much memory is left for its KV cache (MemoryFlags.kv_cache)."""
    names = {flag.partition("=")[0].replace("_", "-") for flag in launch.extra_args}
    return launches(launch.engine).memory.kv_cache not in names


def memory_flag(group: EngineGroup) -> str:
    """The group's GPU memory settings, as on a command line."""
    name = launches(group.engine).memory.fraction
    if name is None:
        return "what the engine takes"
    for flag, following in zip(group.flags, (*group.flags[1:], ""), strict=True):
        if flag.partition("=")[0] == name:
            return flag if "=" in flag else f"{name} {following}"
    return f"{name} as the engine has it"
