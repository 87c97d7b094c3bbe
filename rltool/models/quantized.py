"""Tensors of quantised files, read as bfloat16.

**MXFP4**: experts' matrices of gpt-oss, exactly. It is not written. OCP Microscaling Formats specification 1.0,
sections 5.2 and 5.3: blocks of 32 numbers of 4 bits (E2M1), each block with a power of two (E8M0). A file has
`X_blocks` [experts, outputs, blocks, 16] of two numbers a byte, the first in the low half, and `X_scales` [experts,
outputs, blocks]; what the model calls X is [experts, inputs, outputs].

**FP8**: matrices of linear layers in E4M3, as DeepSeek-V3 is published (arXiv:2412.19437, section 3.3.2): `X.weight`,
and `X.weight_scale_inv` with a number for each block of 128 x 128; a weight is number * scale, rounded to bfloat16.
`rltool.engines.transfer.fp8` makes the same of weights that are sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rltool.config.base import is_table
from rltool.models.tensor_files import TensorFile, TensorFileDamaged

BLOCKS, SCALES = "_blocks", "_scales"
FP8_SCALE = "_scale_inv"
FP8_BLOCK = 128
AS_BFLOAT16 = "write it as bfloat16: `rltool convert-ckpt MODEL X`, then `rltool convert-ckpt X Y --to hf`, and serve Y"
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127
"""Of the exponent in a scale."""


def is_mxfp4(config: dict[str, Any]) -> bool:
    """Whether this config.json stands beside weights in MXFP4."""
    found: Any = config.get("quantization_config")
    return is_table(found) and found.get("quant_method") == "mxfp4"


def is_fp8(config: dict[str, Any]) -> bool:
    """Whether this config.json, or an engine's, is of weights in FP8 with blocks of 128 x 128."""
    found: Any = config.get("quantization_config")
    if not is_table(found) or found.get("quant_method") != "fp8" or found.get("fmt", "e4m3") != "e4m3":
        return False
    return found.get("weight_block_size") == [FP8_BLOCK, FP8_BLOCK]


def format_of(config: dict[str, Any]) -> str | None:
    """What the weights beside this config.json are in that are read as bfloat16; None: as the model has them."""
    return "MXFP4" if is_mxfp4(config) else "FP8" if is_fp8(config) else None


def unquantized(config: dict[str, Any]) -> dict[str, Any]:
    """The config.json of the same weights as they are read here; others as they are."""
    return {key: value for key, value in config.items() if key != "quantization_config" or format_of(config) is None}


def described(config: dict[str, Any], quantization: Mapping[str, Any] | None) -> dict[str, Any]:
    """The config.json of the same weights in what `quantization` (a quantization_config) says; None: as they are read
    here."""
    found = unquantized(config)
    return found if quantization is None else found | {"quantization_config": dict(quantization)}


def dequantized_fp8(values: Tensor, scale: Tensor) -> Tensor:
    """float8_e4m3fn [outputs, inputs] and its scales [outputs / 128, inputs / 128], rounded up -> float32, what a layer
    multiplies with."""
    rows, columns = values.shape
    wide = scale.float().repeat_interleave(FP8_BLOCK, 0)[:rows].repeat_interleave(FP8_BLOCK, 1)[:, :columns]
    return values.float() * wide


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """[..., outputs, blocks, 16] and [..., outputs, blocks], uint8 -> [..., inputs, outputs] bfloat16: exact, but where
    a scale of 2^-127 and below leaves bfloat16's range."""
    values = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
    numbers = values[torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2).int()]
    scale = torch.ldexp(torch.ones(scales.shape), scales.int() - _BIAS)
    return (numbers * scale.unsqueeze(-1)).flatten(-2).bfloat16().transpose(-1, -2).contiguous()


class Mxfp4Tensor:
    """One tensor of a Hugging Face directory, of the two that it is stored as. The interface of a `TensorFile`."""

    def __init__(self, name: str, blocks: TensorFile, scales: TensorFile) -> None:
        """Raises TensorFileDamaged for tensors that do not belong together."""
        self._name, self._blocks, self._scales = name, blocks, scales
        shape = blocks.shape(name + BLOCKS)
        if shape[:-1] != scales.shape(name + SCALES) or len(shape) != 4 or shape[-1] != 16:
            raise TensorFileDamaged(
                f"{blocks.path}: {name} is no tensor in MXFP4: {BLOCKS} of shape {shape}, "
                f"{SCALES} of {scales.shape(name + SCALES)}"
            )

    @property
    def path(self) -> Path:
        return self._blocks.path

    def shape(self, name: str) -> tuple[int, ...]:
        experts, outputs, blocks, half = self._blocks.shape(name + BLOCKS)
        return experts, blocks * half * 2, outputs

    def dtype(self, name: str) -> torch.dtype:
        return torch.bfloat16

    def read(self, name: str, part: int | None = None) -> Tensor:
        return dequantized(self._blocks.read(name + BLOCKS, part), self._scales.read(name + SCALES, part))


class Fp8Tensor:
    """One matrix of a Hugging Face directory beside its scales. The interface of a `TensorFile`."""

    def __init__(self, name: str, values: TensorFile, scales: TensorFile) -> None:
        """Raises TensorFileDamaged for tensors that do not belong together."""
        self._name, self._values, self._scales = name, values, scales
        shape, found = values.shape(name), scales.shape(name + FP8_SCALE)
        if len(shape) != 2 or found != tuple(-(-size // FP8_BLOCK) for size in shape):
            raise TensorFileDamaged(
                f"{values.path}: {name} is no matrix in FP8 with blocks of {FP8_BLOCK} x {FP8_BLOCK}: "
                f"of shape {shape}, {FP8_SCALE} of {found}"
            )

    @property
    def path(self) -> Path:
        return self._values.path

    def shape(self, name: str) -> tuple[int, ...]:
        return self._values.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return torch.bfloat16

    def read(self, name: str, part: int | None = None) -> Tensor:
        """part: of no use, there is one matrix."""
        return dequantized_fp8(self._values.read(name), self._scales.read(name + FP8_SCALE)).bfloat16()
