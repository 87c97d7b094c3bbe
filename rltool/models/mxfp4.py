"""Experts' matrices in MXFP4, as gpt-oss is published: read as bfloat16, exactly. They are not written.

OCP Microscaling Formats specification 1.0, sections 5.2 and 5.3: blocks of 32 numbers of 4 bits (E2M1), each block with
a power of two (E8M0). A file has `X_blocks` [experts, outputs, blocks, 16] of two numbers a byte, the first in the low
half, and `X_scales` [experts, outputs, blocks]; what the model calls X is [experts, inputs, outputs].
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rltool.config.base import is_table
from rltool.models.tensor_files import TensorFile, TensorFileDamaged

BLOCKS, SCALES = "_blocks", "_scales"
AS_BFLOAT16 = "write it as bfloat16: `rltool convert-ckpt MODEL X`, then `rltool convert-ckpt X Y --to hf`, and serve Y"
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127
"""Of the exponent in a scale."""


def is_mxfp4(config: dict[str, Any]) -> bool:
    """Whether this config.json stands beside weights in MXFP4."""
    found: Any = config.get("quantization_config")
    return is_table(found) and found.get("quant_method") == "mxfp4"


def unquantized(config: dict[str, Any]) -> dict[str, Any]:
    """The config.json of the same weights as they are read here; others as they are."""
    return {key: value for key, value in config.items() if key != "quantization_config" or not is_mxfp4(config)}


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
