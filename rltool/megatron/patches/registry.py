"""The list of patches, and what each of them expects of Megatron-core."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from importlib.metadata import version
from typing import Any, TypeVar, cast

from rltool.errors import RltoolError

F = TypeVar("F", bound=Callable[..., Any])


class PatchTargetMissing(RltoolError):
    """The installed Megatron-core lacks something that rltool replaces in it."""


@dataclass(frozen=True)
class Target:
    """What a patch replaces, or code elsewhere relies on although it is private.

    path: "module:attribute", the attribute possibly of a class
    parameters: names of its first parameters; None: not looked at
    used: text in the module's source by which Megatron still looks the attribute up where the patch means it to
    may_be_absent: Megatron defines the name only where another package is installed
    """

    path: str
    parameters: tuple[str, ...] | None = None
    used: str | None = None
    may_be_absent: bool = False

    def problem(self) -> str | None:
        """What is not as expected in the installed packages; None if nothing."""
        module_name, _, attribute = self.path.partition(":")
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            return f"{self.path} does not exist: {error}"
        try:
            found = cast(Any, reduce(getattr, attribute.split("."), module))
        except AttributeError as error:
            if not self.may_be_absent:
                return f"{self.path} does not exist: {error}"
            found = None
        if self.used is not None and self.used not in inspect.getsource(module):
            return f"{module_name} does not use {self.used!r} any more: is {attribute} still used as it was?"
        if self.parameters is not None and found is not None:
            names = tuple(inspect.signature(found).parameters)
            if names[: len(self.parameters)] != self.parameters:
                return f"{self.path} takes {names}, and not {self.parameters} first"
        return None


@dataclass(frozen=True)
class Patch:
    """name: of the function that makes the change; reason: its docstring; versions: of Megatron-core, MAJOR.MINOR."""

    name: str
    versions: tuple[str, ...]
    reason: str
    targets: tuple[Target, ...]


PATCHES: list[Patch] = []

VERSIONS = ("0.16", "0.19")
"""Of Megatron-core, that rltool is tested with."""

RELIED_ON = (
    Target(
        "megatron.core.dist_checkpointing.strategies.torch:TorchDistSaveShardedStrategy._get_save_and_finalize_callbacks",
        ("self", "writer", "save_state_dict_ret"),
        used="return self._get_save_and_finalize_callbacks(writer, save_state_dict_ret",
    ),
    Target(
        "megatron.core.transformer.moe.experts:SequentialMLP.forward",
        ("self", "permuted_local_hidden_states", "tokens_per_expert", "permuted_probs"),
        used="expert(tokens, probs)",
    ),
    Target(
        "megatron.core.transformer.moe.router_replay:RouterReplay.get_replay_topk",
        ("self", "scores", "topk", "num_groups", "group_topk", "default_compute_topk"),
    ),
    Target(
        "megatron.core.transformer.moe.moe_utils:topk_routing_with_score_function",
        used="router_replay.get_replay_topk(",
    ),
    Target("megatron.core.transformer.moe.router:TopKRouter.routing", used="router_replay=self.router_replay"),
    Target(
        "megatron.core.dist_checkpointing.strategies.filesystem_async:FileSystemWriterAsync.write_preloaded_data",
        ("transform_list", "local_proc_idx", "write_bucket", "results_queue", "count_queue", "use_fsync"),
    ),
)
"""Parts of Megatron-core that `save_plan`, `experts` and `routing_replay` override, call or stand in for, without
changing them."""


def broken_targets(installed: str) -> list[str]:
    """What is not as the patches expect it in the installed packages, one line each.

    installed: the version of Megatron-core.
    """
    short = ".".join(installed.split(".")[:2])
    problems = []
    if short not in VERSIONS:
        problems.append(f"Megatron-core {installed} is none of {', '.join(VERSIONS)}: look at every patch, then add it")
    expected = [("relied on", target) for target in RELIED_ON]
    expected += [(patch.name, target) for patch in PATCHES if short in patch.versions for target in patch.targets]
    return problems + [f"{name}: {problem}" for name, target in expected if (problem := target.problem()) is not None]


def patch(*versions: str, targets: tuple[Target, ...]) -> Callable[[F], F]:
    """Enters the decorated function in `PATCHES`."""

    def enter(function: F) -> F:
        PATCHES.append(Patch(function.__name__, versions, inspect.getdoc(function) or "", targets))
        return function

    return enter


def replace(owner: Any, name: str, value: Any) -> None:
    """setattr, of something that is there."""
    if not hasattr(owner, name):
        raise PatchTargetMissing(
            f"megatron-core {version('megatron-core')} has no {owner.__name__}.{name}, which rltool replaces; "
            f"install one of the versions {', '.join(VERSIONS)}"
        )
    setattr(owner, name, value)
