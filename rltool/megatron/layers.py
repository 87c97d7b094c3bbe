"""The modules that rltool puts into Megatron's local layer spec in place of those that need Transformer Engine or Apex."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from rltool.megatron.packing import PackedSequences
from rltool.megatron.runtime import has_varlen_attention, varlen_attention


class RMSNorm(torch.nn.Module):
    """Root mean square norm (Zhang and Sennrich 2019), statistics in fp32, with Megatron's constructor."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Tells Megatron to sum this gradient over tensor-parallel ranks when the sequence is cut over them.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.size(-1),), None, self.eps).to(x.dtype) * self.weight


class RotaryPositions(torch.nn.Module):
    """Angles of the rotary embedding at each token's own position, for packed rows. Interface of Megatron's RotaryEmbedding.

    Megatron asks for a length and passes it to `forward`; here that "length" is the [T] positions themselves.
    """

    def __init__(self, inverse_frequencies: Tensor, device: torch.device) -> None:
        super().__init__()
        self.inv_freq = inverse_frequencies.to(device)

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> Tensor:
        packed = kwargs.get("packed_seq_params", args[4] if len(args) > 4 else None)
        if not isinstance(packed, PackedSequences):
            raise TypeError("this model takes packed rows only: pass packed_seq_params=pack(lengths)")
        return packed.positions

    def forward(self, positions: Tensor, *_: Any, **__: Any) -> Tensor:
        angles = torch.outer(positions.to(self.inv_freq.dtype), self.inv_freq)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]


class PackedCausalAttention(MegatronModule):
    """Causal core attention over packed sequences with grouped queries; no token sees another sequence.

    On CUDA in 16 bit by torch's variable-length kernel. Elsewhere the row is spread to [sequences, longest] and one
    scaled_dot_product_attention call serves all: with right padding and a causal mask no real token sees the padding.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        if config.context_parallel_size != 1:
            raise NotImplementedError("context parallelism is not implemented in this attention")
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
        **_: Any,
    ) -> Tensor:
        """query: [T, 1, heads, d]; key, value: [T, 1, groups, d]. Returns [T, 1, heads * d]."""
        query, key, value = query.squeeze(1), key.squeeze(1), value.squeeze(1)
        if has_varlen_attention(query):
            packed = packed_seq_params
            out = varlen_attention(query, key, value, packed.cu_seqlens_q, packed.max_seqlen_q, self.scale)
        else:
            out = self._padded(query, key, value, packed_seq_params)
        return out.flatten(1).unsqueeze(1)

    def _padded(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        def spread(x: Tensor) -> Tensor:
            x = x if packed.gather is None else x.index_select(0, packed.gather)
            return x.view(packed.num_sequences, packed.max_seqlen_q, *x.shape[1:]).transpose(1, 2)

        out = F.scaled_dot_product_attention(
            spread(query),
            spread(key),
            spread(value),
            is_causal=True,
            scale=self.scale,
            enable_gqa=query.size(1) != key.size(1),
        )
        out = out.transpose(1, 2).flatten(0, 1)
        return out if packed.slots is None else out.index_select(0, packed.slots)
