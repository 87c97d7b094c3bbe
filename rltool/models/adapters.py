"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685) of a family's products, in the names and shapes of the
peft package. Pure.

A product of the model, y = W x, becomes y = W x + scale B (A x). Each HF tensor has an adapter of its own, also where
Megatron has merged several into one parameter: peft could not hold one that queries, keys and values share.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from rltool.config.sections import LoraConfig
from rltool.errors import UsageError
from rltool.models.base import EMBEDDING, HEAD, Family, Parameter

Targets = Literal["all-linear"] | Collection[str]

PART = "adapters"
"""Attribute of the Megatron model that holds them, and the beginning of their names."""
PEFT_PREFIX = "base_model.model."
"""Before HF's names in a file of peft's."""
_KINDS = {
    "linear_qkv": "qkv",
    "linear_q_proj": "qkv",
    "linear_q_down_proj": "qkv",
    "linear_q_up_proj": "qkv",
    "linear_kv_down_proj": "qkv",
    "linear_kv_up_proj": "qkv",
    "in_proj_qkvz": "qkv",
    "in_proj_ba": "qkv",
    "out_proj": "proj",
    "linear_proj": "proj",
    "linear_fc1": "gate_up",
    "linear_fc2": "down",
}
"""Megatron's module -> the name of its target. Those of experts are "experts"."""
_WITHOUT = ("router", "shared_experts")
"""Modules whose own weights never have an adapter: the choice of experts, and the gate of shared ones."""


@dataclass(frozen=True)
class Adapted:
    """A parameter of the model and its adapters, one of each HF tensor in its order: a [rank, inputs] and b [outputs,
    rank] each, in float32. Inputs are cut over tensor-parallel ranks where the parameter's are, and outputs alike."""

    base: Parameter
    a: tuple[Parameter, ...]
    b: tuple[Parameter, ...]

    @property
    def name(self) -> str:
        """Of the module that the parameter belongs to, unique in the model and without dots."""
        return module_key(self.base)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (*self.a, *self.b)

    def rows(self, merged: Tensor, groups: int) -> list[Tensor]:
        """Views of the rows of each HF tensor in a merged one, or of its features in an output of the product.

        merged: [rows of this rank, ...]; groups: of queries on this rank. Returns [rows, ...] or, within query groups,
        [groups, rows / groups, ...].
        """
        if len(self.a) == 1:
            return [merged]
        if self.base.merge_as == "stack":
            return list(merged.chunk(len(self.a)))
        sizes = [shape[0] // self.base.query_groups for _, shape in self.base.hf]
        return list(torch.split(merged.view(groups, sum(sizes), *merged.shape[1:]), sizes, dim=1))

    def put_together(self, parts: Sequence[Tensor], groups: int) -> Tensor:
        """Outputs [..., rows of each HF tensor] -> [..., rows of the merged one]. The inverse of `rows`, of the last
        dimension."""
        if len(parts) == 1:
            return parts[0]
        if self.base.merge_as == "stack":
            return torch.cat(list(parts), dim=-1)
        return torch.cat([part.unflatten(-1, (groups, -1)) for part in parts], dim=-1).flatten(-2)


def merged(
    adapted: Adapted, weight: Tensor, a: Sequence[Tensor], b: Sequence[Tensor], *, scale: float, groups: int
) -> Tensor:
    """W + scale B A, computed in float32 and rounded once to W's dtype: a copy. Of a whole parameter, or of one rank's
    shards. groups: as for `Adapted.rows`."""
    total = weight.to(torch.float32, copy=True)
    for rows, down, up in zip(adapted.rows(total, groups), a, b, strict=True):
        rows.add_((up @ down).view_as(rows), alpha=scale)
    return total.to(weight.dtype)


def module_key(parameter: Parameter) -> str:
    return parameter.name.rpartition(".")[0].replace(".", "-")


def target_of(parameter: Parameter) -> str | None:
    """The name of the target that the parameter belongs to; None: it has no adapter. UsageError for a product that is
    not known here."""
    module, _, kind = parameter.name.rpartition(".")
    if len(parameter.merged_shape) != 2 or parameter.layer is None or kind == "gate_weight":
        return None
    name = module.rpartition(".")[2]
    if name in _WITHOUT or "norm" in name:
        return None
    if kind != "weight" or name not in _KINDS:
        raise UsageError(f"lora: {parameter.name} is a product that adapters are not implemented for")
    return "experts" if parameter.expert is not None else _KINDS[name]


def adapters_of(family: Family, rank: int, targets: Targets) -> tuple[Adapted, ...]:
    """Those of the model, in the order of its parameters. UsageError where a target names nothing in it."""
    found: list[Adapted] = []
    missing: set[str] = set() if targets == "all-linear" else set(targets)
    for parameter in family.parameters:
        if parameter.name in (EMBEDDING, HEAD):
            continue
        target = target_of(parameter)
        if target is None or (targets != "all-linear" and target not in targets):
            continue
        missing.discard(target)
        if parameter.experts:
            raise UsageError(
                f"lora: the experts of {family.architecture} are one tensor in a Hugging Face checkpoint, for which "
                'adapters are not implemented; leave them out, such as with lora.targets = ["qkv", "proj"]'
            )
        found.append(_adapted(parameter, rank))
    if missing:
        raise UsageError(f"lora.targets names {', '.join(sorted(missing))}, which {family.architecture} does not have")
    return tuple(found)


def _adapted(base: Parameter, rank: int) -> Adapted:
    def part(letter: str, index: int, shape: tuple[int, int], **more: Any) -> Parameter:
        name = f"{PART}.{module_key(base)}.{letter}.{index}"
        hf = base.hf[index][0].removesuffix(".weight")
        tensor = (f"{PEFT_PREFIX}{hf}.lora_{letter.upper()}.weight", shape)
        return Parameter(name, (tensor,), base.layer, expert=base.expert, keeps_fp32=True, **more)

    a: list[Parameter] = []
    b: list[Parameter] = []
    left = list(base.parts)
    for index, (_, shape) in enumerate(base.hf):
        within: list[int] = []  # parts of this tensor
        while left and sum(within) < shape[0]:
            within.append(left.pop(0))
        a.append(part("a", index, (rank, shape[1]), shard_dim=1 if base.shard_dim == 1 else None))
        more: dict[str, Any] = {"shard_dim": 0 if base.shard_dim == 0 else None}
        if len(base.hf) == 1:  # perhaps merged by HF already
            more |= dict(
                merge_as=base.merge_as, query_groups=base.query_groups, head_dim=base.head_dim, parts=base.parts,
                interleaved=base.interleaved,
            )  # fmt: skip
        elif len(within) > 1:
            more |= dict(merge_as=base.merge_as, query_groups=base.query_groups, parts=tuple(within))
        elif base.interleaved and base.interleaved[index] is not None:
            more["interleaved"] = (base.interleaved[index],)
        b.append(part("b", index, (shape[0], rank), **more))
    return Adapted(base, tuple(a), tuple(b))


def peft_config(family: Family, adapted: Sequence[Adapted], lora: LoraConfig, base: str) -> dict[str, Any]:
    """adapter_config.json.

    In a mixture, peft (0.21, with transformers 5) takes every module that is called as an expert's projection for the
    experts': dense layers and shared experts, where they have the same names, stand among the parameters.
    """
    modules: set[str] = set()
    parameters: list[str] = []
    experts = {
        hf.removesuffix(".weight").rpartition(".")[2]
        for parameter in family.parameters
        if parameter.expert is not None
        for hf, _ in parameter.hf
    }
    for each in adapted:
        for part in each.a:
            module = part.hf[0][0].removeprefix(PEFT_PREFIX).removesuffix(".lora_A.weight")
            leaf = module.rpartition(".")[2]
            if leaf in experts and each.base.expert is None:
                parameters.append(f"{module}.weight")
            else:
                modules.add(leaf)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha if lora.alpha % 1 else int(lora.alpha),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": sorted(modules),
        **({"target_parameters": parameters} if parameters else {}),
    }
