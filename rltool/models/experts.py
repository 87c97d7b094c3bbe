"""Mixture of experts in the place of the MLP: a router and experts that are gated MLPs, chosen token by token."""

from __future__ import annotations

from typing import Any

from rltool.errors import UsageError
from rltool.models.base import Family, Parameter
from rltool.models.decoder import FeedForward


def mixture_of_experts(
    *, hidden: int, ffn: int, experts: int, top_k: int, normalize: bool, block: str, projections: tuple[str, str, str]
) -> FeedForward:
    """Top-k routing by softmax, without capacity limit: no token is dropped, no auxiliary loss is added.

    normalize: the weights of the chosen experts sum to 1 (softmax over the chosen), or are those of the softmax over
    all
    block: HF's name of the layer's module; projections: HF's names of gate, up and down within an expert
    """
    if not 0 < top_k <= experts:
        raise UsageError(
            f"config.json: num_experts_per_tok {top_k} is not between 1 and the number of experts {experts}"
        )
    if top_k == 1 and normalize:
        raise UsageError("config.json: one expert per token with normalised weights (always 1) is not implemented")
    gate, up, down = projections

    def parameters(layer: int) -> list[Parameter]:
        hf, megatron = f"model.layers.{layer}.{block}.", f"decoder.layers.{layer}.mlp."
        result = [Parameter(f"{megatron}router.weight", ((f"{hf}gate.weight", (experts, hidden)),), layer)]
        for e in range(experts):
            of, to = f"{hf}experts.{e}.", f"{megatron}experts.local_experts.{e}."
            gate_and_up = tuple((f"{of}{name}.weight", (ffn, hidden)) for name in (gate, up))
            result += [
                Parameter(f"{to}linear_fc1.weight", gate_and_up, layer, 0, "stack", expert=e),
                Parameter(f"{to}linear_fc2.weight", ((f"{of}{down}.weight", (hidden, ffn)),), layer, 1, expert=e),
            ]
        return result

    transformer: dict[str, Any] = dict(
        ffn_hidden_size=ffn,
        moe_ffn_hidden_size=ffn,
        num_moe_experts=experts,
        moe_router_topk=top_k,
        moe_router_pre_softmax=not normalize,
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
    )
    return FeedForward(transformer, parameters)


def check_grouped_products(family: Family, *, tensor_parallel: int, dtype: str) -> None:
    """UsageError where torch's grouped products cannot take this model's experts: they want rows of whole 16 bytes."""
    if not family.num_experts:
        raise UsageError(
            'trainer.expert_products = "grouped", but the model has no experts; leave trainer.expert_products at "auto"'
        )
    multiple = 16 // {"float32": 4, "bfloat16": 2}[dtype]
    hidden, ffn = family.transformer["hidden_size"], family.transformer["moe_ffn_hidden_size"]
    for what, size in (("hidden_size", hidden), ("experts' size on each tensor-parallel rank", ffn // tensor_parallel)):
        if size % multiple:
            raise UsageError(
                f'trainer.expert_products = "grouped" in {dtype} needs multiples of {multiple}, but the {what} is '
                f'{size}; leave trainer.expert_products at "auto"'
            )
