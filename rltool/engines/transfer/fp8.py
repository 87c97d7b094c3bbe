"""Matrices of linear layers in FP8 (E4M3) with a scale in float32 for each block of 128 x 128, as DeepSeek-V3 is
published (arXiv:2412.19437, section 3.3.2) and vLLM serves it: `X.weight` and `X.weight_scale_inv`
[outputs / 128, inputs / 128], rounded up. A layer multiplies with weight * scale. Shared by trainer and plugin.

Source of the names: vllm/model_executor/layers/quantization/fp8.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128
DTYPE = torch.float8_e4m3fn
SCALE = "_scale_inv"
"""What the scale's name has behind that of the matrix."""
AT_ONCE = 1 << 24
"""Elements quantised at a time; each needs about 20 bytes meanwhile."""
_LARGEST = torch.finfo(DTYPE).max


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of the scales of a matrix."""
    return tuple(-(-size // BLOCK) for size in shape)


def quantized(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """[outputs, inputs] -> (float8_e4m3fn of the same shape, float32 scales): the largest number of a block becomes
    448, and others are rounded to the nearest. The same bits on every device."""
    found = [_quantized(part) for part in parts(matrix)]
    if len(found) == 1:
        return found[0]
    values, scales = zip(*found, strict=True)
    # As bytes: not every torch has a `cat` of float8 on CUDA.
    return torch.cat([part.view(torch.uint8) for part in values]).view(DTYPE), torch.cat(scales)


def parts(matrix: Tensor) -> Sequence[Tensor]:
    """[outputs, inputs], cut between rows of blocks: parts of at most AT_ONCE elements, or of one row of blocks."""
    return matrix.split(max(1, AT_ONCE // (BLOCK * matrix.size(1))) * BLOCK)


def _quantized(matrix: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = matrix.shape
    padded = F.pad(matrix.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    largest = blocks.abs().amax((1, 3))
    # By a tensor: CUDA multiplies with the reciprocal of a number of Python's, which rounds another way.
    scale = torch.where(largest > 0, largest / torch.full_like(largest, _LARGEST), 1.0)
    values = (blocks / scale[:, None, :, None]).clamp_(-_LARGEST, _LARGEST).to(DTYPE)
    return values.flatten(2, 3).flatten(0, 1)[:rows, :columns].contiguous(), scale
