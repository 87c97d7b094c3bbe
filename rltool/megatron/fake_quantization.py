"""A trainer that computes with what engines in FP8 compute with (trainer.fake_quantization).

Weights are rounded in place, where the model has them in bfloat16: the optimizer's own, in float32, are not. Inputs of
the same linear layers are rounded as they come. Gradients take both for what was rounded (the straight-through
estimator, Bengio et al. 2013, arXiv 1308.3432).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

from rltool.errors import UsageError
from rltool.megatron.experts import GroupedExperts, computes
from rltool.megatron.fp8 import SETTING, check_fake_quantization, linears_of, round_shard
from rltool.megatron.kernels import rounded_swiglu, rounded_to_fp8, swiglu
from rltool.megatron.layers import GatedMLP, RoundedExpert
from rltool.megatron.model import global_name
from rltool.models.base import Family


class FakeQuantization:
    """Of one rank's model, whose linear layers round their inputs from now on."""

    def __init__(self, model: GPTModel, family: Family, tensor_parallel: int) -> None:
        """UsageError for a model in which other things would be rounded than in engines."""
        check_fake_quantization(family, tensor_parallel)
        self._tensor_parallel, linears = tensor_parallel, linears_of(family)
        named = {global_name(model, name): (name, weight) for name, weight in model.named_parameters()}
        self._weights = [(family.parameter(name), held[1]) for name, held in named.items() if name in linears]
        by_hook = {
            model.get_submodule(held[0].rpartition(".")[0])
            for name, held in named.items()
            if name in linears and family.parameter(name).expert is None
        }
        for layer in model.decoder.layers:
            mlp = cast(Any, layer).mlp
            for dense in (mlp, getattr(mlp, "shared_experts", None)):
                # As a part of its gate, which may be computed again in place of being kept.
                if isinstance(dense, GatedMLP) and dense.gate is swiglu:
                    dense.gate = rounded_swiglu
                    by_hook.discard(cast(torch.nn.Module, dense.linear_fc2))
            experts = getattr(mlp, "experts", None)
            if experts is not None:
                _round_in_experts(experts, family)
        for linear in by_hook:
            linear.register_forward_pre_hook(_rounded_input)

    @torch.no_grad()
    def round_weights(self) -> None:
        """After the model's weights were overwritten."""
        for parameter, weight in self._weights:
            round_shard(parameter, weight.detach(), self._tensor_parallel)


def _round_in_experts(experts: torch.nn.Module, family: Family) -> None:
    if not isinstance(experts, SequentialMLP) or not computes(experts.config) or experts.config.add_bias_linear:
        raise UsageError(f"{SETTING} is not implemented for experts other than SwiGLU, as {family.architecture} has")
    if isinstance(experts, GroupedExperts):
        experts.rounds = True
    for expert in experts.local_experts:
        expert.__class__ = RoundedExpert


def _rounded_input(_module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    x, *rest = inputs
    return rounded_to_fp8(x), *rest
