"""Which matrices of a family engines have in FP8 (`rltool.engines.transfer.fp8`), what they are sent then, and the same
rounding of weights that stay in bfloat16 (trainer.fake_quantization)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from rltool.engines.transfer import fp8
from rltool.engines.types import TensorMeta
from rltool.errors import UsageError
from rltool.megatron.export_plan import Export, ExportPlan
from rltool.models.adapters import target_of
from rltool.models.base import EMBEDDING, HEAD, Family, Parameter
from rltool.models.decoder import TOWER
from rltool.models.quantized import dequantized_fp8

SETTING = "trainer.fake_quantization = true"


def linears_of(family: Family) -> Collection[str]:
    """Names of the Megatron parameters that are quantised: of attention, MLPs and experts, without routers, embeddings
    and head. UsageError for a family that cannot be served in this form."""
    if family.attention.delta is not None:
        raise UsageError(f"{family.architecture} in FP8: not implemented for gated delta nets")
    if TOWER in family.carried:  # an engine would take the tower's matrices for FP8, too: they are not of the family
        raise UsageError(f"{family.architecture} in FP8: not implemented beside a vision tower")
    inside = (parameter for parameter in family.parameters if parameter.name not in (EMBEDDING, HEAD))
    linears = [parameter for parameter in inside if target_of(parameter) is not None]
    for parameter in linears:
        _check(family, parameter)
    return {parameter.name for parameter in linears}


def _check(family: Family, parameter: Parameter) -> None:
    if parameter.experts:
        raise UsageError(
            f"{family.architecture} in FP8: {parameter.hf[0][0]} is one tensor of all experts, which is not quantised"
        )
    rows = parameter.parts or ([shape[0] for _, shape in parameter.hf] if parameter.merge_as != "same" else ())
    # Engines have these below each other in one matrix: a block of 128 rows must not be of two.
    odd = [count for count in rows[:-1] if count % fp8.BLOCK]
    if odd:
        raise UsageError(
            f"{family.architecture} in FP8: of {', '.join(name for name, _ in parameter.hf)} {odd[0]} rows are no "
            f"multiple of {fp8.BLOCK}, the size of a block"
        )


def quantization_config(family: Family) -> dict[str, Any]:
    """Of config.json. modules_to_not_convert: what is a matrix and is not quantised."""
    linears = linears_of(family)
    kept = {
        name.removesuffix(".weight")
        for parameter in family.parameters
        if parameter.name not in linears
        for name, shape in parameter.hf
        if len(shape) == 2
    }
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [fp8.BLOCK, fp8.BLOCK],
        "modules_to_not_convert": sorted(kept),
    }


def fp8_plan(family: Family) -> ExportPlan:
    """What engines in FP8 are sent: matrices of linear layers as FP8 and scales, made of the weights rounded to
    bfloat16, as an engine has them that quantises a checkpoint; all else in bfloat16. UsageError for a family that
    cannot be served so."""
    linears = linears_of(family)

    def exported(parameter: Parameter) -> Export:
        if parameter.name not in linears:
            dtype = str(parameter.dtype(torch.bfloat16)).removeprefix("torch.")
            tensors = parameter.hf if parameter.ends_tensors else ()
            return Export(parameter, tuple(TensorMeta(name, dtype, shape) for name, shape in tensors), _in_bfloat16)
        metas = [
            (TensorMeta(name, "float8_e4m3fn", shape), TensorMeta(name + fp8.SCALE, "float32", fp8.scale_shape(shape)))
            for name, shape in parameter.hf
        ]
        return Export(parameter, tuple(meta for pair in metas for meta in pair), _in_fp8)

    exports = tuple(exported(parameter) for parameter in family.parameters)
    return ExportPlan(
        exports, "bfloat16", family.num_layers, family.num_experts, family.carried,
        quantization=quantization_config(family),
    )  # fmt: skip


def _in_bfloat16(parameter: Parameter, tensor: Tensor) -> list[Tensor]:
    return parameter.split(tensor.to(parameter.dtype(torch.bfloat16)))


def _in_fp8(parameter: Parameter, tensor: Tensor) -> list[Tensor]:
    return [made for matrix in _in_bfloat16(parameter, tensor) for made in fp8.quantized(matrix)]


def rounded_parameters(family: Family, tensor_parallel: int) -> dict[str, Parameter]:
    """Those that trainer.fake_quantization rounds, by name. UsageError where a rank cannot round its shard by
    itself."""
    linears = linears_of(family)
    found = {parameter.name: parameter for parameter in family.parameters if parameter.name in linears}
    for parameter in found.values() if tensor_parallel > 1 else ():
        if parameter.shard_dim is None:
            continue
        sizes = [shape[1] for shape in parameter.own_shapes]
        if parameter.shard_dim == 0:
            sizes = list(parameter.parts) or [shape[0] for shape in parameter.own_shapes]
        odd = [size for size in sizes if size // tensor_parallel % fp8.BLOCK]
        if odd:
            kind = "rows" if parameter.shard_dim == 0 else "columns"
            raise UsageError(
                f"{SETTING} and trainer.tensor_parallel = {tensor_parallel} contradict each other: of "
                f"{', '.join(name for name, _ in parameter.hf)} a rank would have {odd[0] // tensor_parallel} of "
                f"{odd[0]} {kind}, no multiple of {fp8.BLOCK}, the size of a block"
            )
    return found


def round_shard(parameter: Parameter, shard: Tensor, tensor_parallel: int) -> None:
    """Rounds a rank's part of a parameter of `rounded_parameters`, [rows, columns], in place, to FP8 values times their
    scale, in its dtype. In bfloat16 a second time changes nothing, and engines are sent the bytes that they would be
    sent of the unrounded part: the largest number of a block stays, and so its scale."""
    if parameter.merge_as == "qkv":
        heads = shard.unflatten(0, (parameter.query_groups // tensor_parallel, -1))
        rows = parameter.parts or [shape[0] for shape in parameter.own_shapes]
        views = heads.split([count // parameter.query_groups for count in rows], dim=1)
    else:
        views = (shard,)  # of gate and up each has whole blocks
    for view, turned in zip(views, parameter.interleaved or [None] * len(views), strict=True):
        matrix = view.reshape(-1, shard.size(-1))
        if turned is not None:
            matrix = turned.neighbours(matrix)
        rounded = rounded_matrix(matrix)
        if turned is not None:
            rounded = turned.halves(rounded)
        view.copy_(rounded.view(view.shape))


def rounded_matrix(matrix: Tensor) -> Tensor:
    """[outputs, inputs] -> the weights that are in FP8 in its place, in its dtype."""
    return torch.cat([dequantized_fp8(*fp8.quantized(part)).to(matrix.dtype) for part in fp8.parts(matrix)])
