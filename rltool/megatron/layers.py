"""The modules that rltool puts into Megatron's local layer spec for those that need Transformer Engine or Apex."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from rltool.errors import UsageError
from rltool.megatron.attention import Backend, Kernel, attention_with_sinks, has_kernels, kernel_for
from rltool.megatron.collectives import gather_from_context_ranks
from rltool.megatron.kernels import Gate, rms_norm, rms_norm_zero_centered, swiglu
from rltool.megatron.packing import PackedSequences
from rltool.megatron.runtime import context_parallel_group
from rltool.models.base import Attention, Rotary
from rltool.models.gpt_oss import swish


class RMSNorm(torch.nn.Module):
    """Root mean square norm (Zhang and Sennrich 2019), statistics in fp32, with Megatron's constructor.

    With `layernorm_zero_centered_gamma` the factor is 1 + weight, applied in fp32 (Gemma); the weight stays as stored.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Tells Megatron to sum this gradient over tensor-parallel ranks when the sequence is cut over them.
        cast(Any, self.weight).sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return (rms_norm_zero_centered if self.zero_centered else rms_norm)(x, self.weight, self.eps)


class GatedMLP(MLP):
    """Megatron's MLP with SwiGLU as one kernel. Its output is a third of what the MLP keeps for the backward pass, and
    costs one small kernel to compute again: with `recompute_gated` it is not kept."""

    recompute_gated = False
    gate: Callable[[Tensor], Tensor] = staticmethod(swiglu)
    """[..., 2 * f] -> [..., f]."""

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        gated, bias = self.linear_fc1(hidden_states)
        if per_token_scale is not None or bias is not None:
            raise NotImplementedError("a gated MLP with a bias or a scale per token")
        if not self.recompute_gated or not torch.is_grad_enabled():
            return self.linear_fc2(self.gate(gated))
        checkpoint = CheckpointWithoutOutput()
        output, output_bias = self.linear_fc2(checkpoint.checkpoint(self.gate, gated))
        checkpoint.discard_output_and_register_recompute(output)
        return output, output_bias


class GatedSharedExpert(SharedExpertMLP, GatedMLP):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Megatron's expert that every token meets, with `GatedMLP` as its MLP."""


class BiasedExpert(MLP):
    """An expert with biases. Megatron's own adds the last one in place, which autograd refuses where tensor parallelism
    is 1, and whole on each tensor-parallel rank, whose outputs are summed later."""

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """[T, hidden], [T]. Returns [T, hidden] and no bias."""
        assert per_token_scale is not None
        gated, bias = self.linear_fc1(hidden_states)
        scaled = swiglu(gated + bias, per_token_scale, gate_of(self.config))
        output, bias = self.linear_fc2(scaled)
        return with_scaled_bias(self.config, output, bias, per_token_scale), None


def gate_of(config: Any) -> Gate:
    """Of experts with biases. config: Megatron's. UsageError for an activation other than silu and gpt-oss's."""
    limit, activation = config.activation_func_clamp_value, config.activation_func
    if activation is not F.silu and getattr(activation, "func", None) is not swish:
        raise UsageError(f"experts with biases take silu or models.gpt_oss.swish, not {activation}")
    alpha = 1.0 if activation is F.silu else activation.keywords["alpha"]
    return Gate(alpha, config.glu_linear_offset, math.inf if limit is None else limit)


def with_scaled_bias(config: Any, output: Tensor, bias: Tensor, scale: Tensor) -> Tensor:
    """output [T, hidden] of a tensor-parallel rank, and its share of bias ([hidden] or [T, hidden]) times scale [T].
    Gradients of a bias are summed over the ranks as those of other copied parameters."""
    return output + (bias * (scale / config.tensor_model_parallel_size).unsqueeze(-1)).to(output.dtype)


class RotaryPositions(torch.nn.Module):
    """Cosines and sines of the rotary embedding at each token's own position, or three of them, for packed rows:
    [T, 1, 1, d].

    See `kernels.rotate`. Once for all layers and heads. The interface is that of Megatron's RotaryEmbedding: it is
    asked for a length, which is passed to `forward`; here that "length" is the [T] positions themselves.
    """

    def __init__(self, rotary: Rotary, device: torch.device) -> None:
        super().__init__()
        self.inv_freq, self.scale = rotary.inverse_frequencies.to(device), rotary.scale
        self.longest, self.axes = rotary.longest, rotary.axes.to(device)

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> Tensor:
        packed = kwargs.get("packed_seq_params", args[4] if len(args) > 4 else None)
        if not isinstance(packed, PackedSequences):
            raise TypeError("this model takes packed rows only: pass packed_seq_params=pack(lengths)")
        if self.longest is not None and packed.max_seqlen_kv > self.longest:
            raise UsageError(
                f"a sequence of {packed.max_seqlen_kv} tokens: with the short factors of longrope there are at most "
                f"{self.longest} (original_max_position_embeddings)"
            )
        return packed.positions

    def forward(self, positions: Tensor, *_: Any, **__: Any) -> Tensor:
        """positions: [T], or [T, 3] of a row with pictures."""
        at = positions[:, None] if positions.dim() == 1 else positions[:, self.axes]
        angles = at.to(self.inv_freq.dtype) * self.inv_freq
        turn = torch.cat((angles.cos(), angles.sin()), dim=-1)[:, None, None, :]
        return turn if self.scale == 1.0 else turn * self.scale


class PackedCausalAttention(MegatronModule):
    """Causal core attention over packed sequences with grouped queries; no token sees another sequence.

    With context parallelism each rank holds two chunks of every sequence (see `pack`) and gathers all keys and values.
    On CUDA in 16 bit by a variable-length kernel, see `attention`. Elsewhere the row is spread to [sequences, longest]
    and one scaled_dot_product_attention call serves all: with right padding and a causal mask no real token sees the
    padding.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        attention: Attention = Attention(),
        backend: Backend = "auto",
        **_: Any,
    ) -> None:
        """layer_number: from 1, over all pipeline stages."""
        super().__init__(config=config)
        self.backend: Backend = backend
        self.kernel: Kernel | None = None  # in the place of the one that `backend` chooses
        self.scale, self.softcap = softmax_scale, attention.softcap
        self.window = attention.windows[layer_number - 1] if attention.windows else None
        heads = config.num_attention_heads // config.tensor_model_parallel_size
        self.sinks = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype)) if attention.sinks else None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """For Megatron, which takes the parameters of a module without this method for copies."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"sinks": 0}, sharded_offsets)

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
        """query: [T, 1, heads, d]; key: [T, 1, groups, d]; value: [T, 1, groups, v]. Returns [T, 1, heads * v]."""
        # Values come as a view into the one product of queries, keys and values, all of which would be kept for the
        # backward pass.
        query, key, value = query.squeeze(1), key.squeeze(1), value.squeeze(1).contiguous()
        packed = packed_seq_params
        assert packed is not None  # `RotaryPositions` refuses rows without it
        if packed.keys is not None:
            # Keys and values are small beside queries where these are grouped: one gather of both, each rank then reads
            # the parts that its blocks of queries see.
            both = torch.cat([key, value], dim=-1)
            if packed.blocks is None:
                both = gather_from_context_ranks(both, context_parallel_group())
            key, value = both.index_select(0, packed.keys).split([key.size(-1), value.size(-1)], dim=-1)
        if self.softcap is None and has_kernels(query):
            out = self._by_kernel(query, key, value, packed)
        elif packed.blocks is not None:
            out = self._by_block(query, key, value, packed)
        else:
            out = self._padded(query, key, value, packed)
        return out.flatten(1).unsqueeze(1)

    def _by_kernel(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        # The kernels take heads of one size, a multiple of 8.
        size, given = value.size(-1), key.size(-1)
        scale, dim = self.scale, given + -given % 8
        if dim != given:
            scale = given**-0.5 if scale is None else scale
            query, key = F.pad(query, (0, dim - given)), F.pad(key, (0, dim - given))
        value = F.pad(value, (0, dim - size)) if dim != size else value
        window = self._window(packed)
        if self.sinks is None:
            kernel = self.kernel or kernel_for(query, key, packed, scale=scale, window=window, backend=self.backend)
            return kernel(query, key, value, packed, scale, window)[..., :size]
        # Of sinks torch's kernel alone has gradients here.
        return attention_with_sinks(query, key, value, self.sinks, packed, scale, window)[..., :size]

    def _window(self, packed: PackedSequences) -> int | None:
        """The sliding window, None where it would not cut anything off."""
        return self.window if self.window is not None and self.window < packed.max_seqlen_kv else None

    def _padded(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        def spread(x: Tensor, gather: Tensor | None, longest: int) -> Tensor:
            x = x if gather is None else x.index_select(0, gather)
            return x.view(packed.num_sequences, longest, *x.shape[1:]).transpose(1, 2)

        key, value = self._ungrouped(query, key, value)
        seen, key_gather = self._mask(packed), packed.gather if packed.keys is None else packed.key_gather
        out = self._plain()(
            spread(query, packed.gather, packed.max_seqlen_q),
            spread(key, key_gather, packed.max_seqlen_kv),
            spread(value, key_gather, packed.max_seqlen_kv),
            attn_mask=seen,
            is_causal=seen is None,
            scale=self.scale,
            enable_gqa=query.size(1) != key.size(1),
        )
        out = out.transpose(1, 2).flatten(0, 1)
        return out if packed.slots is None else out.index_select(0, packed.slots)

    def _by_block(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        """Without padding, which would be most of the layout: the first sequence of a trie is one long block."""
        assert packed.blocks is not None
        key, value = self._ungrouped(query, key, value)
        window, attend = self._window(packed), self._plain()
        queries, keys = zip(*packed.blocks, strict=True)
        parts: list[Tensor] = []
        for q, k, v in zip(query.split(queries), key.split(keys), value.split(keys), strict=True):
            before = len(k) - len(q)
            seen = None
            if before or window is not None:
                seen = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril(before)
                seen = seen if window is None else seen.triu(before - window + 1)
            out = attend(
                *(x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)),
                attn_mask=seen,
                is_causal=seen is None,
                scale=self.scale,
                enable_gqa=q.size(1) != k.size(1),
            )
            parts.append(out.squeeze(0).transpose(0, 1))
        return torch.cat(parts)

    @staticmethod
    def _ungrouped(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """For fp32 on a GPU torch has a kernel without grouped queries, and else keeps the probabilities of every
        layer."""
        if not query.is_cuda or query.size(1) == key.size(1):
            return key, value
        times = query.size(1) // key.size(1)
        return key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)

    def _plain(self) -> Callable[..., Tensor]:
        if self.softcap is not None or self.sinks is not None:
            return partial(plain_attention, self.softcap, self.sinks)
        return F.scaled_dot_product_attention

    def _mask(self, packed: PackedSequences) -> Tensor | None:
        """What each query sees in the padded layout, True; None where it is plain causality."""
        window = self._window(packed)
        if window is None and packed.keys is None:
            return None
        device = packed.positions.device
        # The last query of a block belongs to its last key, so blocks differ in how many keys come before the first
        # query.
        before = (packed.cu_seqlens_kv.diff() - packed.cu_seqlens_q.diff())[:, None, None, None]
        at = before + torch.arange(packed.max_seqlen_q, device=device)[:, None]
        key = torch.arange(packed.max_seqlen_kv, device=device)
        seen = key <= at
        return seen if window is None else seen & (key > at - window)


def plain_attention(
    softcap: float | None,
    sinks: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """F.scaled_dot_product_attention with scores of softcap * tanh(score / softcap) (Gemma 2, arXiv 2408.00118,
    section 2), and with sinks [heads], see `models.base.Attention`. It keeps the scores: memory by the square of the
    length."""
    if enable_gqa:
        key, value = (x.repeat_interleave(query.size(1) // x.size(1), 1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * (query.size(-1) ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    if sinks is not None:
        beside = sinks[:, None, None].to(scores.dtype).expand(len(scores), -1, scores.size(-2), 1)
        scores = torch.cat([scores, beside], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return weights[..., : key.size(-2)] @ value
