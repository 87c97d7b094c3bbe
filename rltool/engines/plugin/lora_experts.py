"""Experts with adapters in a vLLM on the CPU.

With --enable-lora vLLM 0.32 takes its Triton kernels for every mixture of experts (select_unquantized_moe_backend in
model_executor/layers/fused_moe/oracle/unquantized.py), and a CPU has none: it has no class of experts there that knows
adapters. This one is in plain torch, in the dtype of the model: to test with, not to be fast.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import modular_kernel, unquantized_fused_moe_method
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend


class LoraExperts(LoRAExpertsMixin, CPUUnquantizedExperts):
    """See vLLM's TritonExperts, whose place it takes."""

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return activation in (MoEActivation.SILU, MoEActivation.GELU, MoEActivation.GELU_TANH)

    @classmethod
    def _supports_grouped_gemm(cls, moe_config: Any) -> tuple[bool, str | None]:
        return (False, "its experts have biases") if moe_config.has_bias else (True, None)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """They stay as they are loaded."""

    def apply(
        self, output: torch.Tensor, hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor,
        topk_weights: torch.Tensor, topk_ids: torch.Tensor, activation: Any, *_: Any, **__: Any,
    ) -> None:  # fmt: skip
        """hidden_states, output: [tokens, hidden]; w1: [experts, 2 x inner, hidden], gate first; w2: [experts, hidden,
        inner]; topk_weights, topk_ids: [tokens, k]."""
        context = self._lora_context
        places = torch.full((len(hidden_states),), -1)
        if context is not None:
            known = context.punica_wrapper.token_lora_indices
            places[: len(known)] = known[: len(places)]
        total = torch.zeros_like(output, dtype=torch.float32)
        for expert in topk_ids.unique().tolist():
            rows, choices = (topk_ids == expert).nonzero(as_tuple=True)
            x, held = hidden_states[rows], places[rows]
            both = x @ w1[expert].T
            if context is not None:
                parts = zip(context.w13_lora_a_stacked, context.w13_lora_b_stacked, strict=True)
                added = [_adapted(x, held, expert, a, b) for a, b in parts]
                both = both + torch.cat(added, dim=-1)
            inner = both.new_empty(len(both), both.shape[-1] // 2)
            self.activation(activation, inner, both)
            y = inner @ w2[expert].T
            if context is not None:
                y = y + _adapted(inner, held, expert, context.w2_lora_a_stacked[0], context.w2_lora_b_stacked[0])
            total.index_add_(0, rows, y.float() * topk_weights[rows, choices, None].float())
        output.copy_(total)


def _adapted(x: torch.Tensor, places: torch.Tensor, expert: int, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """B A x of each row's place, zero where that is -1. x: [rows, inputs]; a: [places, experts, rank, inputs]; b:
    [places, experts, outputs, rank], scaled."""
    found = x.new_zeros(len(x), b.shape[2])
    for place in places.unique().tolist():
        if place >= 0:
            rows = places == place
            found[rows] = x[rows] @ a[place, expert].T @ b[place, expert].T
    return found


def use() -> None:
    """vLLM's models have these experts, in a process whose models take adapters. Idempotent."""
    method: Any = unquantized_fused_moe_method
    select = method.select_unquantized_moe_backend
    if getattr(select, "rltool", False):
        return

    def select_backend(moe_config: Any) -> Any:
        if not moe_config.is_lora_enabled:
            return select(moe_config)
        plain = modular_kernel.FusedMoEActivationFormat.Standard
        able, why = LoraExperts.is_supported_config(LoraExperts, moe_config, None, None, plain)
        if not able:
            raise ValueError(f"--enable-lora on the CPU, rltool's experts: {why}; start the server without adapters")
        return UnquantizedMoeBackend.CPU, LoraExperts

    method.select_unquantized_moe_backend = select_backend
    method.select_unquantized_moe_backend.rltool = True
