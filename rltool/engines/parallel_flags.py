"""How many GPUs an engine takes, from its tensor-parallel size and its own flags."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rltool.config.serve import EngineGroup
from rltool.errors import UsageError

PIPELINE = {"vllm": ("--pipeline-parallel-size", "-pp"), "sglang": ("--pp-size", "--pipeline-parallel-size")}
DATA = {"vllm": ("--data-parallel-size", "-dp"), "sglang": ("--dp-size", "--data-parallel-size", "--dp")}
TENSOR = {
    "vllm": ("--tensor-parallel-size", "-tp"),
    "sglang": ("--tp-size", "--tensor-parallel-size", "--tp"),
}
"""vllm/engine/arg_utils.py; sglang/srt/arg_groups/fields/parallel.py. Expert parallelism shares the GPUs of these."""
DP_ATTENTION = "--enable-dp-attention"
"""SGLang: data-parallel attention replicas live on the ranks of the tensor-parallel group."""


@dataclass(frozen=True)
class Sizes:
    """Of one engine; their product is its GPUs."""

    tp: int
    pp: int = 1
    dp: int = 1

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp


def parallel_sizes(group: EngineGroup) -> Sizes:
    """Raises UsageError for a second tensor-parallel size among the flags, and for a size that is no number."""
    kind, flags = group.engine, group.flags
    if _size(flags, TENSOR[kind]) is not None:
        raise UsageError(f"group {group.name!r}: set tp in place of {TENSOR[kind][0]} among its flags: plans go by it")
    data = 1 if DP_ATTENTION in flags else _size(flags, DATA[kind]) or 1
    return Sizes(group.tp, _size(flags, PIPELINE[kind]) or 1, data)


def _size(flags: Sequence[str], names: Sequence[str]) -> int | None:
    """The value of the last of these flags, given as `--flag 2` or `--flag=2`."""
    found = None
    for position, word in enumerate(flags):
        name, equals, value = word.replace("_", "-").partition("=")
        if name not in names:
            continue
        if not equals:
            value = flags[position + 1] if position + 1 < len(flags) else ""
        if not value.isdigit() or int(value) < 1:
            raise UsageError(f"{name} {value!r}: expected a number of at least 1")
        found = int(value)
    return found
