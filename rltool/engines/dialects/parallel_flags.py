"""How many GPUs an engine takes, from its tensor-parallel size and its own flags. Expert parallelism shares them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rltool.config.serve import EngineGroup
from rltool.engines.dialects.table import launches
from rltool.errors import UsageError


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
    names, flags = launches(group.engine).parallel, group.flags
    if _size(flags, names.tensor) is not None:
        raise UsageError(f"group {group.name!r}: set tp in place of {names.tensor[0]} among its flags: plans go by it")
    data = 1 if names.within_tensor in flags else _size(flags, names.data) or 1
    return Sizes(group.tp, _size(flags, names.pipeline) or 1, data)


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
