"""Modules of single families in Megatron's local layer spec: norms after attention and MLP or over all heads together,
windowed layers' own rope, latent attention."""

from __future__ import annotations

from typing import Any, cast

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from rltool.megatron.attention import Backend
from rltool.megatron.kernels import rotate, split_and_rotate
from rltool.megatron.layers import PackedCausalAttention, RMSNorm, RotaryPositions
from rltool.megatron.packing import PackedSequences
from rltool.models.base import Attention, Rotary


class NormedRowParallelLinear(RowParallelLinear):
    """A projection back to the hidden size whose output is normalised before it is added to the residual.

    Here, because Megatron's layer has no place for a norm between the projection and the addition.
    """

    def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        self.post_norm = RMSNorm(config, output_size, config.layernorm_epsilon)
        # A hook, so that what an adapter adds to the product, by a hook before it, is normalised with it.
        self.register_forward_hook(_normed)


def _normed(module: torch.nn.Module, _inputs: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    product, bias = output
    return cast(NormedRowParallelLinear, module).post_norm(product), bias


class NormOfAllHeads(torch.nn.Module):
    """RMSNorm over all heads of a query or key together (OLMo 2), each tensor-parallel rank holding some of them."""

    def __init__(self, config: Any, hidden_size: int, eps: float, *, heads: int) -> None:
        """hidden_size: of a head; heads: of all ranks."""
        super().__init__()
        self.eps, self.size, self.ranks = eps, heads * hidden_size, config.tensor_model_parallel_size
        self.weight = torch.nn.Parameter(torch.ones(self.size // self.ranks, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, 1, heads of this rank, d]."""
        flat = x.flatten(-2).float()
        squares = flat.square().sum(-1, keepdim=True)
        if self.ranks > 1:
            # A sum forwards, and backwards too: each rank's heads depend on all ranks' squares.
            squares = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(squares))
        normed = flat * torch.rsqrt(squares / self.size + self.eps)
        return (normed.to(x.dtype) * self.weight).view_as(x)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """For Megatron, which takes the parameters of a module without this method for copies."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0}, sharded_offsets)


class TwoRotaryPositions(torch.nn.Module):
    """Of the layers without and with a sliding window, stacked: [2, T, 1, 1, head_dim]."""

    def __init__(self, full: Rotary, sliding: Rotary, device: torch.device) -> None:
        super().__init__()
        self.full, self.sliding = RotaryPositions(full, device), RotaryPositions(sliding, device)

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.full.get_rotary_seq_len(*args, **kwargs)

    def forward(self, positions: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return torch.stack([self.full(positions, *args, **kwargs), self.sliding(positions, *args, **kwargs)])


class OnePassSelfAttention(SelfAttention):
    """Megatron's, where one kernel adds the bias to the product of queries, keys and values, splits it and turns the
    first two; Megatron's own way takes five and moves three times the bytes. Made of a built one by `one_pass`."""

    _turn: Tensor | None = None

    def forward(self, *args: Any, rotary_pos_emb: Tensor, **options: Any) -> Any:
        self._turn = rotary_pos_emb
        try:
            return super().forward(*args, **options)
        finally:
            self._turn = None

    def get_query_key_value_tensors(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
        mixed, bias = cast(Any, self.linear_qkv)(hidden_states)
        assert self._turn is not None
        groups, size = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        return split_and_rotate(mixed, bias, self._turn, groups, size)


def one_pass(attention: torch.nn.Module, wanted: bool = True) -> None:
    """Makes Megatron's attention an `OnePassSelfAttention`; not one with norms of heads, in a model with layers without
    positions, or with fewer groups of keys than tensor-parallel ranks, which Megatron gathers first. wanted=False: the
    inverse."""
    if wanted and type(attention) is SelfAttention:
        config, norms = attention.config, (attention.q_layernorm, attention.k_layernorm)
        gathers = cast(int, config.num_query_groups) < attention.world_size
        if gathers or config.no_rope_freq or not all(norm is None or isinstance(norm, IdentityOp) for norm in norms):
            return
        attention.__class__ = OnePassSelfAttention
    elif not wanted and type(attention) is OnePassSelfAttention:
        cast(Any, attention).__class__ = SelfAttention
    else:
        return
    cast(Any, attention).linear_qkv.skip_bias_add = wanted


class TwoRopeSelfAttention(SelfAttention):
    """Takes from what is stacked the part of its own kind of layer."""

    def __init__(self, *args: Any, attention: Attention, layer_number: int, **options: Any) -> None:
        super().__init__(*args, layer_number=layer_number, **options)
        self._kind = int(attention.windows[layer_number - 1] is not None)

    def forward(self, *args: Any, rotary_pos_emb: Tensor, **options: Any) -> Any:
        return super().forward(*args, rotary_pos_emb=rotary_pos_emb[self._kind], **options)


class CopiedLinear(torch.nn.Module):
    """A product whose weight every tensor-parallel rank holds."""

    def __init__(self, config: Any, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        # As of `RMSNorm`: ranks see different tokens where the sequence is cut over them.
        cast(Any, self.weight).sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight)


class LatentAttention(MegatronModule):
    """Multi-head latent attention, see `models.base.Latent`, with the names of Megatron's MLASelfAttention.

    Not by that class: it takes positions from the order of tokens, cuts the vectors of low rank over tensor-parallel
    ranks, and gathers them again. Here every rank holds those small products whole. Low-rank vectors are expanded to
    heads before the core attention, as in transformers; nothing is absorbed.
    """

    def __init__(self, config: Any, layer_number: int, attention: Attention, backend: Backend, **_: Any) -> None:
        super().__init__(config=config)
        latent = attention.latent
        assert latent is not None
        self.latent, self.layer_number = latent, layer_number
        hidden, heads = config.hidden_size, config.num_attention_heads
        self.heads = heads // config.tensor_model_parallel_size

        def column(inputs: int, outputs: int) -> ColumnParallelLinear:
            return ColumnParallelLinear(
                inputs, outputs, config=config, init_method=config.init_method, bias=False, gather_output=False
            )

        if latent.query_rank is None:
            self.linear_q_proj = column(hidden, heads * latent.head)
        else:
            self.linear_q_down_proj = CopiedLinear(config, hidden, latent.query_rank)
            self.q_layernorm = RMSNorm(config, latent.query_rank, NORM_EPSILON)
            self.linear_q_up_proj = column(latent.query_rank, heads * latent.head)
        self.linear_kv_down_proj = CopiedLinear(config, hidden, latent.rank + latent.rotary)
        self.kv_layernorm = RMSNorm(config, latent.rank, NORM_EPSILON)
        self.linear_kv_up_proj = column(latent.rank, heads * (latent.plain + latent.value))
        self.core_attention = PackedCausalAttention(
            config, layer_number, None, "self", softmax_scale=config.softmax_scale, attention=attention, backend=backend
        )
        self.linear_proj = RowParallelLinear(
            heads * latent.value, hidden, config=config, init_method=config.output_layer_init_method, bias=False,
            input_is_parallel=True, skip_bias_add=True,
        )  # fmt: skip

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        rotary_pos_emb: Tensor,
        packed_seq_params: PackedSequences,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states: [T, 1, hidden], or [T / tp, 1, hidden] under sequence parallelism; rotary_pos_emb:
        [T, 1, 1, rotary]. Returns as many tokens as it gets."""
        latent = self.latent
        if latent.query_rank is None:
            query, _bias = self.linear_q_proj(hidden_states)
        else:
            query, _bias = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden_states)))
        query = query.unflatten(-1, (self.heads, latent.head))
        low, turned = self.linear_kv_down_proj(hidden_states).split([latent.rank, latent.rotary], dim=-1)
        both, _bias = self.linear_kv_up_proj(self.kv_layernorm(low))
        plain, value = both.unflatten(-1, (self.heads, -1)).split([latent.plain, latent.value], dim=-1)
        # Each rank's heads take it, so that its gradient is a sum over ranks.
        if self.config.sequence_parallel:
            turned = gather_from_sequence_parallel_region(turned)
        else:
            turned = copy_to_tensor_model_parallel_region(turned)
        turned = rotate(turned.unsqueeze(2), rotary_pos_emb)
        still, moved = query.split([latent.plain, latent.rotary], dim=-1)
        query = torch.cat([still, rotate(moved, rotary_pos_emb)], dim=-1)
        key = torch.cat([plain, turned.expand(-1, -1, self.heads, -1)], dim=-1)
        return self.linear_proj(self.core_attention(query, key, value, packed_seq_params=packed_seq_params))


NORM_EPSILON = 1e-6
"""Of the norms of low-rank vectors, whatever config.json says of the others: that of DeepSeek's own model code and of
transformers. vLLM takes that of config.json here, too."""
