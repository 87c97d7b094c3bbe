"""Gated delta nets over packed sequences (Yang et al. 2024, arXiv 2412.06464), and the gated attention between them.

A head's state S [key, value] starts at zero in each sequence and goes from token to token:
    S <- exp(g) S;  S <- S + k (beta (v - k S));  the output is q S
with |k| = |q| sqrt(key) = 1, g < 0 and 0 < beta < 1.
"""

from __future__ import annotations

import functools
import importlib
import logging
import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from rltool.megatron.attention import TOLERANCE, Backend, has_kernels
from rltool.megatron.kernels import rms_norm, rotate, short_convolution, swiglu
from rltool.megatron.layers import PackedCausalAttention, RMSNorm
from rltool.megatron.packing import Chunks, PackedSequences, cut
from rltool.megatron.runtime import to_device
from rltool.models.base import Attention

logger = logging.getLogger(__name__)

EPSILON = 1e-6
"""Beside the squares of a query or key, under the root: that of transformers and of fla."""


def chunked_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, chunks: Chunks
) -> Tensor:
    """In plain torch, in fp32 (section 3.3 of the paper).

    query, key: [T, heads, key]; value: [T, heads, value]; decay (g above), beta: [T, heads]. Returns [T, heads, value]
    in value's dtype.
    """
    query, key = (_unit(x.float()) for x in (query, key))
    query = query * query.size(-1) ** -0.5
    # [chunks, heads, size, ...]
    q, k, v, g, b = (chunks.spread(x) for x in (query, key, value.float(), decay.float(), beta.float()))
    total = g.cumsum(-1)
    later = torch.ones(chunks.size, chunks.size, dtype=torch.bool, device=q.device).triu(1)
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(later, -math.inf).exp()
    since, until = total.exp().unsqueeze(-1), (total[..., -1:] - total).exp().unsqueeze(-1)
    # What a chunk's tokens write depends on what those before them in it wrote: a triangular system, solved for the
    # part that is of the values, and for the one that the state before the chunk takes away.
    system = b.unsqueeze(-1) * (k @ k.transpose(-1, -2)) * between
    right = b.unsqueeze(-1) * torch.cat([v, k * since], dim=-1)
    written = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    of_values, of_state = written.split([v.size(-1), k.size(-1)], dim=-1)
    scores, reads, writes = (q @ k.transpose(-1, -2)) * between, q * since, (k * until).transpose(-1, -2)
    kept = total[..., -1].exp()[..., None, None]

    state: Tensor | None = None
    out: list[Tensor] = []
    parts = zip(*(x.split(chunks.counts) for x in (of_values, of_state, scores, reads, writes, kept)), strict=True)
    for values, taken, within, read, write, stays in parts:
        if state is None:
            out.append(within @ values)
            state = write @ values
            continue
        state = state[: len(values)]
        values = values - taken @ state
        out.append(read @ state + within @ values)
        state = stays * state + write @ values
    return chunks.gather(torch.cat(out)).to(value.dtype)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON)


def fla_delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, starts: Tensor) -> Tensor:
    """By the Triton kernels of flash-linear-attention (fla.ops.gated_delta_rule.chunk_gated_delta_rule), for GPUs in 16
    bit. As `chunked_delta_rule`; starts: [N + 1], of the sequences, and the end."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    out, _state = chunk_gated_delta_rule(
        *(x.unsqueeze(0) for x in (query, key, value)), g=decay.float().unsqueeze(0), beta=beta.unsqueeze(0),
        use_qk_l2norm_in_kernel=True, cu_seqlens=starts,
    )  # fmt: skip
    return out.squeeze(0)


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, packed: PackedSequences
) -> Tensor:
    """As `chunked_delta_rule`, of packed sequences, by what is fastest here and right."""
    if has_kernels(query) and fla_is_right(query.device, query.dtype, *query.shape[1:], value.size(-1)):
        if packed.starts is None:  # one tensor for all layers: fla looks up by it what it derives from it
            packed.starts = packed.cu_seqlens_q.long()
        return fla_delta_rule(query, key, value, decay, beta, packed.starts)
    if packed.chunks is None:
        packed.chunks = cut(packed.cu_seqlens_q.diff().long().cpu(), query.device)
    return chunked_delta_rule(query, key, value, decay, beta, packed.chunks)


@functools.cache
def fla_is_right(device: torch.device, dtype: torch.dtype, heads: int, key: int, value: int) -> bool:
    """Whether fla is here and agrees with plain torch, gradients included, on a small batch of this shape: as for
    kernels of attention."""
    try:
        importlib.import_module("fla.ops.gated_delta_rule")
    except Exception:  # an installation that does not fit this torch or driver fails with anything
        logger.warning("gated delta nets: plain torch; pip install flash-linear-attention for its faster kernels")
        return False
    try:
        error = fla_error(device, dtype, heads, key, value)
    except Exception as failure:
        logger.warning("gated delta nets: fla fails, plain torch serves: %s: %s", type(failure).__name__, failure)
        return False
    if not error <= TOLERANCE:
        logger.warning("gated delta nets: fla differs by a relative %.2g from plain torch, which serves", error)
    return error <= TOLERANCE


def fla_error(device: torch.device, dtype: torch.dtype, heads: int, key: int, value: int) -> float:
    """Largest relative difference of output and gradients."""
    lengths, generator = torch.tensor([33, 1, 300]), torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(int(lengths.sum()), heads, *shape, generator=generator)

    inputs = (draw(key), draw(key), draw(value), -F.softplus(draw()), draw().sigmoid())
    inputs = tuple(x.to(device, torch.float32 if i == 3 else dtype) for i, x in enumerate(inputs))
    by_output = draw(value).to(device, dtype)
    starts = to_device(F.pad(lengths.cumsum(0), (1, 0)), device)
    chunks = cut(lengths, device)

    def run(rule: Any, where: Any) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        with torch.enable_grad():
            output = rule(*leaves, where)
            return [output.detach(), *torch.autograd.grad(output, leaves, by_output)]

    both = zip(run(fla_delta_rule, starts), run(chunked_delta_rule, chunks), strict=True)
    errors = [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in both]
    return max(errors) if all(map(math.isfinite, errors)) else math.inf


class ShortConvolution(torch.nn.Module):
    """Causal convolution of each channel over the last tokens of its sequence, then SiLU."""

    def __init__(self, config: Any, channels: int, kernel: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(channels, 1, kernel, dtype=config.params_dtype))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x: [T, channels]; positions: [T], of each token in its sequence."""
        return short_convolution(x, self.weight.squeeze(1), positions)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """For Megatron, which takes the parameters of a module without this method for copies."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0}, sharded_offsets)


class GatedNorm(torch.nn.Module):
    """RMSNorm of each head's output, times SiLU of a gate. Each tensor-parallel rank has other heads: the gradients of
    the weight, of which each has a copy, are summed here."""

    def __init__(self, config: Any, size: int) -> None:
        super().__init__()
        self.eps, self.ranks = config.layernorm_epsilon, config.tensor_model_parallel_size
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=config.params_dtype))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Both [T, heads, value]."""
        weight = copy_to_tensor_model_parallel_region(self.weight) if self.ranks > 1 else self.weight
        return swiglu(torch.cat((gate, rms_norm(x, weight, self.eps)), dim=-1))


def _column(config: Any, outputs: int) -> ColumnParallelLinear:
    return ColumnParallelLinear(
        config.hidden_size, outputs, config=config, init_method=config.init_method, bias=False, gather_output=False
    )


def _row(config: Any, inputs: int) -> RowParallelLinear:
    return RowParallelLinear(
        inputs, config.hidden_size, config=config, init_method=config.output_layer_init_method, bias=False,
        input_is_parallel=True, skip_bias_add=True,
    )  # fmt: skip


class GatedDeltaNet(MegatronModule):
    """See `models.base.DeltaNet`. A tensor-parallel rank has some key heads, and the value heads that share them.

    Not by Megatron's class of this name: that of 0.16 refuses packed sequences, and that of 0.19 needs fla.
    """

    def __init__(self, config: Any, layer_number: int, attention: Attention, **_: Any) -> None:
        super().__init__(config=config)
        delta, ranks = attention.delta, config.tensor_model_parallel_size
        assert delta is not None
        self.delta, self.groups, self.share = delta, delta.key_heads // ranks, delta.value_heads // delta.key_heads
        self.in_proj_qkvz = _column(config, delta.channels + delta.value_heads * delta.value)
        self.in_proj_ba = _column(config, 2 * delta.value_heads)
        self.conv1d = ShortConvolution(config, delta.channels // ranks, delta.kernel)
        heads = delta.value_heads // ranks
        self.dt_bias, self.A_log = (
            torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype)) for _ in range(2)
        )  # fmt: skip
        self.out_norm = GatedNorm(config, delta.value)
        self.out_proj = _row(config, delta.value_heads * delta.value)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSequences,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states: [T, 1, hidden], or [T / tp, 1, hidden] under sequence parallelism. Returns as many tokens as
        it gets."""
        delta, width = self.delta, self.share * self.delta.value
        mixed, gate = (
            self.in_proj_qkvz(hidden_states)[0]
            .view(-1, self.groups, 2 * (delta.key + width))
            .split([2 * delta.key + width, width], dim=-1)
        )
        mixed = self.conv1d(mixed.flatten(1), packed_seq_params.positions)
        parts = mixed.view(-1, self.groups, 2 * delta.key + width).split([delta.key, delta.key, width], dim=-1)
        query, key = (x.repeat_interleave(self.share, dim=1) for x in parts[:2])
        value, gate = (x.reshape(len(x), -1, delta.value) for x in (parts[2], gate))
        write, step = (
            x.flatten(1) for x in self.in_proj_ba(hidden_states)[0].view(-1, self.groups, 2 * self.share).chunk(2, -1)
        )
        decay = -self.A_log.float().exp() * F.softplus(step.float() + self.dt_bias.float())
        out = delta_rule(query, key, value, decay, write.sigmoid(), packed_seq_params)
        return self.out_proj(self.out_norm(out, gate).flatten(1).unsqueeze(1))

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """For Megatron, which takes parameters that stand in this module itself for copies."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        own = {"dt_bias": self.dt_bias, "A_log": self.A_log}
        return state | make_sharded_tensors_for_checkpoint(own, prefix, dict.fromkeys(own, 0), sharded_offsets)


class GatedAttention(MegatronModule):
    """Attention with grouped queries whose output is multiplied with the sigmoid of a gate. With the names of
    Megatron's SelfAttention. A rank's product has by groups: each head's query and gate, then the key, then the
    value."""

    def __init__(self, config: Any, layer_number: int, attention: Attention, backend: Backend, **_: Any) -> None:
        super().__init__(config=config)
        self.size, self.groups = config.kv_channels, config.num_query_groups // config.tensor_model_parallel_size
        heads, groups = config.num_attention_heads, config.num_query_groups
        self.share = heads // groups
        self.linear_qkv = _column(config, 2 * (heads + groups) * self.size)
        self.q_layernorm, self.k_layernorm = (
            RMSNorm(config, self.size, config.layernorm_epsilon) for _ in range(2)
        )  # fmt: skip
        self.core_attention = PackedCausalAttention(
            config, layer_number, None, "self", attention=attention, backend=backend
        )
        self.linear_proj = _row(config, heads * self.size)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        rotary_pos_emb: Tensor,
        packed_seq_params: PackedSequences,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As `GatedDeltaNet`; rotary_pos_emb: [T, 1, 1, rotary]."""
        product = self.linear_qkv(hidden_states)[0].view(-1, 1, self.groups, 2 * (self.share + 1), self.size)
        both, key, value = product.split([2 * self.share, 1, 1], dim=3)
        query, gate = both.unflatten(3, (self.share, 2)).flatten(2, 3).unbind(3)
        query = rotate(self.q_layernorm(query), rotary_pos_emb)
        key = rotate(self.k_layernorm(key.squeeze(3)), rotary_pos_emb)
        out = self.core_attention(query, key, value.squeeze(3), packed_seq_params=packed_seq_params)
        return self.linear_proj(out * torch.sigmoid(gate.flatten(2)))
