"""Gemma 3's modules in Megatron's local layer spec: norms after attention and MLP, windowed layers' own rope."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from rltool.megatron.layers import RMSNorm, RotaryPositions


class NormedRowParallelLinear(RowParallelLinear):
    """A projection back to the hidden size whose output is normalised before it is added to the residual.

    Here, because Megatron's layer has no place for a norm between the projection and the addition.
    """

    def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        self.post_norm = RMSNorm(config, output_size, config.layernorm_epsilon)

    def forward(self, input_: Tensor) -> tuple[Tensor, torch.nn.Parameter | None]:
        output, bias = super().forward(input_)
        return self.post_norm(output), bias


class TwoRotaryPositions(torch.nn.Module):
    """Of the layers without and with a sliding window, stacked: [2, T, 1, 1, head_dim]."""

    def __init__(self, full: Tensor, sliding: Tensor, device: torch.device) -> None:
        super().__init__()
        self.full, self.sliding = RotaryPositions(full, device), RotaryPositions(sliding, device)

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.full.get_rotary_seq_len(*args, **kwargs)

    def forward(self, positions: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return torch.stack([self.full(positions, *args, **kwargs), self.sliding(positions, *args, **kwargs)])


class TwoRopeSelfAttention(SelfAttention):
    """Takes from what is stacked the part of its own kind of layer."""

    def __init__(self, *args: Any, sliding_windows: tuple[int | None, ...], layer_number: int, **options: Any) -> None:
        super().__init__(*args, layer_number=layer_number, **options)
        self._kind = int(sliding_windows[layer_number - 1] is not None)

    def forward(self, *args: Any, rotary_pos_emb: Tensor, **options: Any) -> Any:
        return super().forward(*args, rotary_pos_emb=rotary_pos_emb[self._kind], **options)
