"""algorithm.exact: the policy's log-probabilities bit for bit as vLLM computes them, by vLLM's own kernels.

vLLM's batch-invariant mode (VLLM_BATCH_INVARIANT=1, vllm/model_executor/determinism) gives a token the same bits in any
batch, as a prompt and as it is sampled. Each step of the forward pass here is the kernel that the engine runs for it:
products, norms, rotary positions, attention, the gate, the head and its log-softmax. Gradients are those of the
trainer's usual kernels, at the values that these gave. One GPU holds the whole model: no tensor and no context
parallelism, and families whose layers in vLLM are made of these parts alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import attention as megatron_attention
from torch import Tensor

from rltool.engines.dialects.vllm_launch import HEADS_ARE_NOT_EXACT, exact_heads
from rltool.engines.plugin.patches import BATCH_INVARIANT_VARIABLE
from rltool.errors import UsageError
from rltool.megatron import kernels
from rltool.megatron.attention import flash_backward
from rltool.megatron.family_layers import one_pass
from rltool.megatron.layers import GatedMLP, PackedCausalAttention, RMSNorm, RotaryPositions
from rltool.megatron.output_head import chunks, head_logprobs, weight_buffer, weight_result
from rltool.megatron.patches.registry import replace
from rltool.megatron.products import add_product

FAMILIES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Architectures that were compared: Llama in heads of 64 without scaled positions, Qwen2 and Qwen3 in heads of 128."""

HEAD_ROWS = 64
"""vLLM pads a vocabulary to a multiple of this, and picks the tiles of the head's product by the padded size."""


def use_engine_kernels(model: GPTModel, hf_path: Path, architecture: str) -> None:
    """Make the model, on its GPU, compute as vLLM does. UsageError for a model or a machine that cannot."""
    weight = next(model.parameters())
    if architecture not in FAMILIES:
        raise UsageError(f"algorithm.exact: {architecture} was not compared; it is for {', '.join(FAMILIES)}")
    if not exact_heads(hf_path):
        raise UsageError(f"algorithm.exact: {HEADS_ARE_NOT_EXACT}")
    hopper = weight.is_cuda and torch.cuda.get_device_capability(weight.device)[0] == 9
    if not hopper or weight.dtype is not torch.bfloat16:
        raise UsageError('algorithm.exact was compared on Hopper GPUs with model.dtype = "bfloat16" alone')
    os.environ[BATCH_INVARIANT_VARIABLE] = "1"  # vLLM's C++ code reads it at its first call
    try:
        import vllm._custom_ops
        from vllm.model_executor.determinism import batch_invariant_configs
    except ImportError as error:
        raise UsageError(f"algorithm.exact needs vLLM beside the trainer: {error}") from error
    assert vllm._custom_ops
    batch_invariant_configs.resolve_tuned_matmul_configs()
    replace_layers(model, hf_path)


def replace_layers(model: GPTModel, hf_path: Path) -> None:
    """`use_engine_kernels` behind its checks."""
    for module in model.modules():
        own = {
            ColumnParallelLinear: _Linear, RowParallelLinear: _Linear, RMSNorm: _Norm, GatedMLP: _GatedMLP
        }.get(type(module))  # fmt: skip
        if own is not None:
            module.__class__ = own
        if isinstance(module, PackedCausalAttention):
            module.kernel = attention
    for layer in model.decoder.layers:
        one_pass(cast(Any, layer).self_attention, wanted=False)
        cast(Any, layer.input_layernorm).after_sum = cast(Any, layer).layer_number > 1
        for name in ("q_layernorm", "k_layernorm"):
            norm = getattr(layer.self_attention, name, None)
            if isinstance(norm, _Norm):
                norm.after_sum = False
    dtype = next(model.parameters()).dtype
    model.rotary_pos_emb = cast(Any, _Rotary(cast(RotaryPositions, model.rotary_pos_emb), hf_path, dtype))
    replace(megatron_attention, "apply_rotary_pos_emb", lambda x, turn, *_, **__: rotate(x, turn))


class _AsEngine(torch.autograd.Function):
    """engine(x, *rest) with the gradient of usual(x, *rest)."""

    @staticmethod
    def forward(ctx: Any, engine: Callable[..., Tensor], usual: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.usual = usual
        ctx.save_for_backward(*inputs)
        return engine(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[2:]
        leaves = [x.detach().requires_grad_(need) for x, need in zip(ctx.saved_tensors, wanted, strict=True)]
        with torch.enable_grad():
            out = ctx.usual(*leaves)
        found = iter(torch.autograd.grad(out, [x for x in leaves if x.requires_grad], grads[0]))
        return None, None, *(next(found) if need else None for need in wanted)


class _Product(torch.autograd.Function):
    """x [T, K] @ weight.T + bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        from vllm.model_executor.determinism.batch_invariant import linear_batch_invariant

        ctx.save_for_backward(x)
        ctx.weight = weight  # saved, it would come back without Megatron's attributes
        return linear_batch_invariant(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad, (x,), weight = grads[0], ctx.saved_tensors, ctx.weight
        for_x, for_weight, for_bias = ctx.needs_input_grad
        by_weight = None
        if for_weight:
            total, in_place = weight_buffer(weight)
            add_product(total, grad.t(), x)
            by_weight = weight_result(weight, total, in_place)
        return grad @ weight if for_x else None, by_weight, grad.sum(0) if for_bias else None


class _Linear(torch.nn.Module):
    """Megatron's linear layers, whole on one rank."""

    weight: Tensor
    bias: Tensor | None
    skip_bias_add: bool

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        fused = None if self.skip_bias_add else self.bias
        out = cast(Tensor, _Product.apply(input_.flatten(0, -2), self.weight, fused))
        return out.view(*input_.shape[:-1], -1), self.bias if self.skip_bias_add else None


class _Norm(RMSNorm):
    """after_sum: the engine adds the residual in the same kernel, and rounds before it multiplies with the weight;
    else after."""

    after_sum = True

    def forward(self, x: Tensor) -> Tensor:
        def engine(x: Tensor, weight: Tensor) -> Tensor:
            from vllm import _custom_ops
            from vllm.model_executor.determinism.batch_invariant import rms_norm_batch_invariant

            if not self.after_sum:
                return cast(Tensor, rms_norm_batch_invariant(x, weight, self.eps))
            out = x.clone(memory_format=torch.contiguous_format)
            _custom_ops.fused_add_rms_norm(out, torch.zeros_like(out), weight, self.eps)
            return out

        def usual(x: Tensor, weight: Tensor) -> Tensor:
            return kernels.rms_norm(x, weight, self.eps)

        return cast(Tensor, _AsEngine.apply(engine, usual, x, self.weight))


class _GatedMLP(GatedMLP):
    @staticmethod
    def gate(x: Tensor) -> Tensor:
        return cast(Tensor, _AsEngine.apply(_silu_and_mul, kernels.swiglu, x))


def _silu_and_mul(x: Tensor) -> Tensor:
    out = x.new_empty(*x.shape[:-1], x.size(-1) // 2)
    torch.ops._C.silu_and_mul(out, x.contiguous())
    return out


class _Rotary(RotaryPositions):
    """The engine's table of cosines and sines, in the model's dtype as it has them."""

    def __init__(self, usual: RotaryPositions, hf_path: Path, dtype: torch.dtype) -> None:
        torch.nn.Module.__init__(self)
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.model_executor.layers.rotary_embedding import get_rope
        from vllm.transformers_utils.config import get_config

        self.inv_freq, self.longest = usual.inv_freq, usual.longest
        config = get_config(hf_path, trust_remote_code=False)
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        with set_current_vllm_config(VllmConfig()), usual.inv_freq.device:
            rope = get_rope(
                size, max_position=config.max_position_embeddings, rope_parameters=config.rope_parameters,
                dtype=dtype,
            )  # fmt: skip
        self.table = cast(Tensor, rope.cos_sin_cache).to(usual.inv_freq.device, dtype)

    def forward(self, positions: Tensor, *_: Any, **__: Any) -> Tensor:
        return self.table[positions][:, None, None, :].float()


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """`kernels.rotate` by the engine's kernel. turn: of `_Rotary`, numbers of x's dtype in fp32."""

    def engine(x: Tensor, turn: Tensor) -> Tensor:
        from vllm import _custom_ops

        out = x.clone(memory_format=torch.contiguous_format)
        rows = torch.arange(len(out), device=x.device)
        # Rows of heads one behind the other: on a CPU the kernel turns a third dimension wrongly.
        _custom_ops.rotary_embedding(rows, out.view(len(out), -1), None, x.size(-1), turn.flatten(1).to(x.dtype), True)
        return out

    return cast(Tensor, _AsEngine.apply(engine, kernels.rotate, x, turn))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, packed: PackedSeqParams, scale: float | None
    ) -> Tensor:
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        out, total = cast(Any, flash_attn_varlen_func)(
            query, key, value, packed.max_seqlen_q, packed.cu_seqlens_q, packed.max_seqlen_kv,
            cu_seqlens_k=packed.cu_seqlens_kv, softmax_scale=scale, causal=True, num_splits=1, fa_version=3,
            return_softmax_lse=True,
        )[:2]  # fmt: skip
        ctx.save_for_backward(query, key, value, out, total)
        ctx.options = packed, scale, None
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, total = ctx.saved_tensors
        # Of random numbers, which it does not draw.
        state = torch.zeros(2, dtype=torch.uint64, device=out.device)
        unused = torch.zeros((), dtype=torch.uint64, device=out.device)
        found = flash_backward(grads[0].contiguous(), query, key, value, out, total, state, unused, *ctx.options)
        return *found, None, None


def attention(
    query: Tensor, key: Tensor, value: Tensor, packed: PackedSeqParams, scale: float | None, window: int | None
) -> Tensor:
    """A `Kernel` (rltool.megatron.attention): FlashAttention 3 as vLLM is built with it, in one split; no window."""
    assert window is None
    query, key, value = (x.contiguous() for x in (query, key, value))
    return cast(Tensor, _Attention.apply(query, key, value, packed, scale))


class _Valued(torch.autograd.Function):
    """value, with the gradient of another tensor that it is a rounding of."""

    @staticmethod
    def forward(ctx: Any, usual: Tensor, value: Tensor) -> Tensor:
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def exact_head_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float, vocab_size: int, chunk: int, **options: Any
) -> tuple[Tensor, Tensor]:
    """`output_head.head_logprobs`, the log-probabilities as the engine gives them."""
    options |= {"temperature": temperature, "vocab_size": vocab_size, "chunk": chunk}
    usual, entropy = head_logprobs(hidden, weight, targets, **options)
    with torch.no_grad():
        parts = [
            _engine_logprobs(hidden[rows], weight, targets[rows], temperature, vocab_size)
            for rows in chunks(len(targets), chunk)
        ]
    value = torch.cat(parts) if parts else usual.detach()
    return cast(Tensor, _Valued.apply(usual, value)), entropy


def _engine_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, vocab_size: int
) -> Tensor:
    from vllm.model_executor.determinism.batch_invariant import linear_batch_invariant
    from vllm.v1.worker.gpu.sample.gumbel import apply_temperature
    from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

    rows = -(-vocab_size // HEAD_ROWS) * HEAD_ROWS
    logits = linear_batch_invariant(hidden, weight[:rows])[:, :vocab_size]
    if temperature != 1.0:
        logits = logits.float().contiguous()
        index = torch.zeros(len(logits), dtype=torch.int32, device=logits.device)
        apply_temperature(logits, index, torch.tensor([temperature], dtype=torch.float32, device=logits.device))
    return compute_token_logprobs(logits, targets[:, None]).squeeze(-1)
