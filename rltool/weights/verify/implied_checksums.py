"""The digests that an engine would give for its parameters if it held these tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from rltool.engines.dialects.checksums import Checksums, ParameterLayout, parts_of_parameters, tensor_parallel_size
from rltool.engines.dialects.table import inspects
from rltool.engines.transfer.wire import dtype_of
from rltool.engines.types import EngineInfo
from rltool.megatron.export_plan import ExportPlan
from rltool.models.adapters import PEFT_PREFIX
from rltool.models.base import Parameter
from rltool.weights.verify.digests import DIGESTS

VOCABULARY_MULTIPLE = 64
"""Engines pad the rows of an embedding to a multiple of it, with zeros."""


def _rules(plan: ExportPlan) -> dict[str, Parameter]:
    """Name -> the parameter by which tensor parallelism cuts the tensor, in the plan's order. Without experts, of which
    engines stack those of a layer in ways of their own, without quantised tensors and their scales, which they arrange
    for their kernels, and without routers that have a bias in fp32, which some engines keep in fp32 themselves."""
    biases = {export.parameter.layer for export in plan.exports if export.parameter.keeps_fp32}

    def is_compared(parameter: Parameter) -> bool:
        router = parameter.layer in biases and parameter.name.endswith(".router.weight")
        return parameter.expert is None and not router

    plain = (export for export in plan.exports if is_compared(export.parameter))
    return {
        meta.name: export.parameter
        for export in plain
        for meta in export.tensors
        if (meta.name, meta.shape) in export.parameter.hf and dtype_of(meta.dtype).itemsize > 1
    }


def implied_checksums(
    plan: ExportPlan, tensors: Iterable[tuple[str, Tensor]], layout: ParameterLayout
) -> dict[str, tuple[str, ...]]:
    """The engine's name of a parameter -> its digest on each tensor-parallel rank: of the bytes in the layout's dtype,
    with projections that engines keep in one matrix below each other, and embeddings padded.

    tensors: the plan's by name, in any order, on any device. Those whose cut is not known, and those that the ranks do
    not divide evenly, are passed over. At most the parts of parameters that are not complete yet are held,
    so the tensors may be a stream of a model larger than the host's memory. SGLang's digest of tensors on a GPU is made
    where they are: on a CPU it takes much longer.
    """
    rules, ranks, dtype = _rules(plan), layout.tensor_parallel, getattr(torch, layout.dtype)
    digest, device = DIGESTS[layout.digest], None if layout.digest == "sglang_cuda" else "cpu"
    parts = parts_of_parameters([name for name, rule in rules.items() if _divides(rule, ranks)])
    parameter_of = {part: parameter for parameter, of_it in parts.items() for part in of_it}
    waiting: dict[str, dict[str, Tensor]] = {}
    digests: dict[str, tuple[str, ...]] = {}
    for name, tensor in tensors:
        parameter = parameter_of.get(name)
        if parameter is None:
            del tensor
            continue
        held = waiting.setdefault(parameter, {})
        # A part outlives the stream's next step, which may overwrite what the tensor is a view of.
        own = rules[name].dtype(dtype)
        held[name] = tensor.detach().to(device=device, dtype=own, copy=len(parts[parameter]) > 1)
        if len(held) == len(parts[parameter]):
            del waiting[parameter]
            shards = (_shards(rules[part], held[part], ranks) for part in parts[parameter])
            digests[parameter] = tuple(digest(_joined(of_rank)) for of_rank in zip(*shards, strict=True))
        del tensor  # else what it was gathered in stays while there is a next one
    return digests


def adapter_checksums(
    plan: ExportPlan, tensors: Iterable[tuple[str, Tensor]], layout: ParameterLayout
) -> dict[str, tuple[str, ...]]:
    """Of what rltool's plugin holds of an adapter (rltool.engines.plugin.adapters.digests): A and B in the layout's
    dtype, B multiplied with alpha / rank there. One digest each: every worker has all of it."""
    assert plan.peft is not None, "the plan is of an adapter"
    scale, dtype, found = plan.peft["lora_alpha"] / plan.peft["r"], dtype_of(layout.dtype), dict[str, tuple[str, ...]]()
    for name, tensor in tensors:
        module = name.removeprefix(PEFT_PREFIX).removesuffix(".weight")
        held = tensor.detach().cpu().to(dtype, copy=True)
        found[module] = (DIGESTS["sha256"](held * scale if module.endswith("B") else held),)
        del tensor  # see implied_checksums
    return found


def _shards(rule: Parameter, tensor: Tensor, ranks: int) -> Iterator[Tensor]:
    """What each tensor-parallel rank of an engine holds of an HF tensor that the rule is about.

    As Megatron cuts (Parameter.shard), but for three: a vocabulary is padded to a multiple of 64 rows, of 64 for each
    rank where those cannot be divided; where there are fewer heads of keys and values than ranks, several ranks hold
    the same head; and a norm over all heads is whole on each rank.
    """
    if rule.vocabulary:
        tensor = _padded(tensor, ranks)
    for rank in range(ranks):
        if rule.shard_dim is None or _is_norm(rule):
            yield tensor
        else:
            count = _distinct(rule, tensor.shape, ranks)
            yield tensor.chunk(count, dim=rule.shard_dim)[rank * count // ranks]


def _is_norm(rule: Parameter) -> bool:
    return rule.name.endswith("_layernorm.weight")


def _distinct(rule: Parameter, shape: Sequence[int], ranks: int) -> int:
    """How many different parts the ranks hold."""
    return min(ranks, shape[0] // rule.head_dim) if rule.merge_as == "qkv" else ranks


def _divides(rule: Parameter, ranks: int) -> bool:
    """Whether every rank gets as much of each tensor as the others."""
    if rule.shard_dim is None or rule.vocabulary or _is_norm(rule):
        return True
    if rule.parts:  # each part of the tensor is cut, not the tensor
        return ranks == 1
    unit = rule.head_dim if rule.merge_as == "qkv" else 1
    counts = [(shape[rule.shard_dim] // unit, _distinct(rule, shape, ranks)) for _, shape in rule.hf]
    return all(whole % count == 0 and ranks % count == 0 for whole, count in counts)


def _padded(tensor: Tensor, ranks: int) -> Tensor:
    rows = -len(tensor) % VOCABULARY_MULTIPLE
    if (len(tensor) + rows) % ranks:
        rows = -len(tensor) % (VOCABULARY_MULTIPLE * ranks)
    return torch.cat([tensor, tensor.new_zeros(rows, *tensor.shape[1:])]) if rows else tensor


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]


def layout_of(info: EngineInfo, checksums: Checksums, fallback_dtype: str) -> ParameterLayout | str:
    """Of the engine that gave these checksums; or why they prove nothing about a model in Hugging Face's names.

    fallback_dtype: of an engine that does not report its own.
    """
    if not checksums:
        return why_no_checksums(info)
    ranks = tensor_parallel_size(checksums)
    if ranks is None:
        who = f"{info.dialect} {info.engine_version}"
        return f"checksums were not compared: {who} names its ranks in a way that rltool does not know"
    return inspects(info.dialect).layout(info, ranks, fallback_dtype)


def why_no_checksums(info: EngineInfo) -> str:
    return f"checksums were not compared: {info.dialect} {info.engine_version} has none"
