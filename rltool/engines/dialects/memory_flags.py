"""Flags of engines that have no GPU to themselves: those that use the trainer's in turns with it can sleep, and leave
it room; those that share a GPU among themselves take their part of its memory. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rltool.config.serve import POLICY, Device, EngineGroup, EngineLaunch
from rltool.engines.dialects.table import dialect, launches
from rltool.errors import UsageError

MEMORY_FRACTION = 0.6
"""Of each GPU, for weights and KV cache of the engines that take turns with the trainer. While they are awake its
parameters may lie beside them (a weight sync reads them), and a CUDA context and NCCL's buffers always do."""

SHARED_FRACTION = 0.88
"""Of each GPU, for all engines that share it: a little less than one alone takes, for each has a CUDA context."""


@dataclass(frozen=True)
class CacheSize:
    """How much of a GPU's memory an engine's KV cache takes, in bytes; fraction: of the whole GPU, for all of the
    engine: what must be free when it starts."""

    bytes: int
    fraction: float


def with_sleep_flags(
    group: EngineGroup, default: Device, *, from_disk: bool = False, cache: CacheSize | None = None
) -> EngineGroup:
    """The group with what its engines need for it; flags of its own win. On the CPU, where none can sleep and there is
    no GPU to share, without engines_per_gpu. from_disk: they load their weights again when they wake up, and need no
    copy. cache: in place of all that the fraction leaves, where may_set_cache. Raises UsageError for
    engines that cannot sleep."""
    if (group.device or default) == "cpu":
        return group.model_copy(update={"engines_per_gpu": 1})
    if group.role == "placeholder":
        return group
    memory = launches(group.engine).memory
    if not memory.sleep:
        raise UsageError(
            f"group {group.name!r}: {dialect(group.engine).label} engines cannot sleep, so they cannot use the "
            'trainer\'s GPUs in turns with it; use engines.mode = "managed"'
        )
    kept = () if group.model == POLICY or from_disk else memory.keep_weights
    added = [flag for flag in (*memory.sleep, *kept) if not has_flag(group, flag)]
    if cache is not None and memory.kv_cache is not None and memory.fraction is not None:
        added += [memory.kv_cache, str(cache.bytes), memory.fraction, f"{cache.fraction:.3f}"]
    return group.model_copy(update={"flags": (*added, *group.flags)})


def may_set_cache(group: EngineGroup) -> bool:
    """Whether its engines take a KV cache of a set size, and its flags say nothing of it, nor of what it depends on."""
    memory = launches(group.engine).memory
    names = (memory.kv_cache, memory.fraction, *memory.kv_cache_depends)
    return memory.kv_cache is not None and not any(has_flag(group, name) for name in names if name is not None)


def has_flag(group: EngineGroup, name: str) -> bool:
    return any(flag.partition("=")[0].replace("_", "-") == name for flag in group.flags)


def shares_memory(group: EngineGroup, number: int, *, colocated: bool = False) -> EngineGroup:
    """The group with the part of the GPUs' memory that its engine of this number has; a flag of its own wins. One alone
    on its GPUs takes what it takes by itself, unless it uses them in turns with the trainer.

    A part that is of what is free (MemoryFlags.of_free) is of what those that started before it have left. Raises
    UsageError for engines whose part cannot be set.
    """
    sharing = group.engines_per_gpu
    if sharing == 1 and not colocated:
        return group
    name, of_free = launches(group.engine).memory.fraction, launches(group.engine).memory.of_free
    if name is None and sharing == 1:
        return group
    if name is None:
        raise UsageError(
            f"group {group.name!r}: {dialect(group.engine).label} engines cannot be given a part of a GPU's memory; "
            "leave engines_per_gpu out"
        )
    if has_flag(group, name):
        return group
    part = (MEMORY_FRACTION if colocated else SHARED_FRACTION) / sharing
    if of_free:
        part /= 1 - number % sharing * part
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
