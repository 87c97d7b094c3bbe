"""Flags of engines that use the trainer's GPUs in turns with it: they can sleep, and leave it room. Pure."""

from __future__ import annotations

from rltool.config.serve import POLICY, Device, EngineGroup, EngineKind

MEMORY_FRACTION = "0.6"
"""Of each GPU, for weights and KV cache of an engine. While an engine is awake the trainer's parameters may lie beside
it (a weight sync reads them), and a CUDA context and NCCL's buffers always do."""

_SLEEP: dict[EngineKind, tuple[str, ...]] = {"vllm": ("--enable-sleep-mode",), "sglang": ("--enable-memory-saver",)}
_KEEP_WEIGHTS: dict[EngineKind, tuple[str, ...]] = {"vllm": (), "sglang": ("--enable-weights-cpu-backup",)}
_FRACTION: dict[EngineKind, str] = {"vllm": "--gpu-memory-utilization", "sglang": "--mem-fraction-static"}


def takes_turns(group: EngineGroup, default: Device) -> EngineGroup:
    """The group with what its engines need for it; flags of its own win. On the CPU, where none can sleep, as it is."""
    if (group.device or default) == "cpu" or group.role == "placeholder":
        return group
    given = {flag.partition("=")[0] for flag in group.flags}
    kept = () if group.model == POLICY else _KEEP_WEIGHTS[group.engine]
    added = [flag for flag in (*_SLEEP[group.engine], *kept) if flag not in given]
    if _FRACTION[group.engine] not in given:
        added += [_FRACTION[group.engine], MEMORY_FRACTION]
    return group.model_copy(update={"flags": (*added, *group.flags)})


def memory_flag(group: EngineGroup) -> str:
    """What the group says of the GPUs' memory, as on a command line."""
    name = _FRACTION[group.engine]
    for flag, following in zip(group.flags, (*group.flags[1:], ""), strict=True):
        if flag.partition("=")[0] == name:
            return flag if "=" in flag else f"{name} {following}"
    return f"{name} as the engine has it"
