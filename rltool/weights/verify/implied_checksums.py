"""The digests that an engine would give for its parameters if it held these tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from rltool.engines.dialects.checksums import (
    BY_EXPERT,
    DERIVED,
    IN_FP32,
    Checksums,
    ParameterLayout,
    parts_of_parameters,
    tensor_parallel_size,
)
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
    """Name -> the parameter by which tensor parallelism cuts the tensor, in the plan's order. Without quantised tensors
    and their scales, which engines arrange for their kernels."""
    return {
        meta.name: export.parameter
        for export in plan.exports
        for meta in export.tensors
        if (meta.name, meta.shape) in export.parameter.hf and dtype_of(meta.dtype).itemsize > 1
    }


def implied_checksums(
    plan: ExportPlan, tensors: Iterable[tuple[str, Tensor]], layout: ParameterLayout
) -> dict[str, tuple[str, ...]]:
    """The engine's name of a parameter -> its digest on each tensor-parallel rank: of the bytes in the layout's dtype,
    with projections that engines keep in one matrix below each other, and embeddings padded. Experts stand below each
    other too, cut by tensor parallelism, and under the name with BY_EXPERT as expert parallelism deals them out. A
    router stands under the name with IN_FP32, too, and beside latent attention's product of keys and values what is
    DERIVED of it.

    tensors: the plan's by name, in any order, on any device. Those whose cut is not known, and those that the ranks do
    not divide evenly, are passed over. At most the parts of parameters that are not complete yet are held,
    so the tensors may be a stream of a model larger than the host's memory. SGLang's digest of tensors on a GPU is made
    where they are: on a CPU it takes much longer.
    """
    rules, ranks, dtype = _rules(plan), layout.tensor_parallel, getattr(torch, layout.dtype)
    on_gpu = layout.digest == "sglang_cuda"
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
        rule, device = rules[name], tensor.device if on_gpu else torch.device("cpu")
        # A part outlives the stream's next step, which may overwrite what the tensor is a view of. Experts wait on the
        # host: there are many.
        waits_on = device if rule.expert is None else torch.device("cpu")
        held[name] = tensor.detach().to(device=waits_on, dtype=rule.dtype(dtype), copy=len(parts[parameter]) > 1)
        either = rule.name.endswith(".router.weight") and dtype != torch.float32
        in_fp32 = tensor.detach().to(device=device, dtype=torch.float32) if either else None
        del tensor  # else what it was gathered in stays while there is a next one
        if len(held) < len(parts[parameter]):
            continue
        del waiting[parameter]
        in_order = [(rules[part], held[part]) for part in parts[parameter]]

        def of_ranks(*shards: Iterable[Tensor], device: torch.device = device) -> tuple[str, ...]:
            return tuple(DIGESTS[layout.digest](_joined(each).to(device)) for each in zip(*shards, strict=True))

        if not (rule.experts and rule.shard_dim is None and ranks > 1):  # vLLM's first rank has that bias
            digests[parameter] = of_ranks(*(_shards(rule, part, ranks) for rule, part in in_order))
        if rule.latent:
            halves = zip(*(_absorbed(rule, shard) for shard in _shards(rule, held[name], ranks)), strict=True)
            for own, shards in zip(("W_UK_T", "W_UV"), halves, strict=True):
                digests[parameter.removesuffix(".kv_b_proj.weight") + DERIVED + own] = of_ranks(shards)
        if in_fp32 is not None:
            digests[parameter + IN_FP32] = of_ranks([in_fp32] * ranks)
        if rule.expert is not None and ranks > 1 and plan.num_experts % ranks == 0:
            whole = _joined([_stacked(rule, part) for rule, part in in_order])
            digests[parameter + BY_EXPERT] = of_ranks(whole.chunk(ranks))
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
    if rule.experts:
        dim, cuts = 1 + (rule.shard_dim or 0), 1 if rule.shard_dim is None else ranks
        halves = [half.chunk(cuts, dim) for half in _stacked(rule, tensor).chunk(_apart(rule), 1)]
        yield from (parts[0] if len(parts) == 1 else torch.cat(parts, 1) for parts in zip(*halves, strict=True))
        return
    for rank in range(ranks):
        if rule.shard_dim is None or _is_norm(rule):
            yield tensor
        else:
            count = _distinct(rule, tensor.shape, ranks)
            yield tensor.chunk(count, dim=rule.shard_dim)[rank * count // ranks]


def _absorbed(rule: Parameter, shard: Tensor) -> tuple[Tensor, Tensor]:
    """A rank's rows of latent attention's product of keys and values -> vLLM's W_UK_T [heads, key, rank] and W_UV
    [heads, rank, value] (MLAAttention.process_weights_after_loading)."""
    keys, values = shard.reshape(-1, sum(rule.latent), shard.shape[-1]).split(list(rule.latent), dim=1)
    return keys, values.transpose(1, 2)


def _stacked(rule: Parameter, tensor: Tensor) -> Tensor:
    """A tensor of all experts, with matrices as [outputs, inputs], or of one."""
    return tensor.transpose(1, 2) if rule.experts and rule.transposed else tensor


def _apart(rule: Parameter) -> int:
    """Of a tensor of all experts, how many blocks of an expert's rows ranks cut separately: gate and up, unless they
    lie by turns."""
    return 1 if rule.interleaved else len(rule.parts) or 1


def _is_norm(rule: Parameter) -> bool:
    return rule.name.endswith("_layernorm.weight")


def _distinct(rule: Parameter, shape: Sequence[int], ranks: int) -> int:
    """How many different parts the ranks hold."""
    return min(ranks, shape[0] // rule.head_dim) if rule.merge_as == "qkv" else ranks


def _divides(rule: Parameter, ranks: int) -> bool:
    """Whether every rank gets as much of each tensor as the others."""
    if rule.shard_dim is None or rule.vocabulary or _is_norm(rule):
        return True
    if rule.experts:
        return rule.merged_shape[rule.shard_dim] % (_apart(rule) * ranks) == 0
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
