"""Qwen3-Next: gated delta nets in three of four layers, gated attention in the fourth, and experts as Qwen2-MoE's."""

from __future__ import annotations

from typing import Any

from rltool.models.base import Attention, Cut, Family, FamilyDefinition
from rltool.models.decoder import Part, Variant, decoder, delta_net, gated_mlp, refuse, require
from rltool.models.experts import Router, Shared, dense_and_sparse, mixture_of_experts

DEFAULTS = {
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 10,
    "num_experts": 512,
    "norm_topk_prob": True,
    "max_position_embeddings": 32768,
}
"""transformers' defaults, which config.json may leave out."""
LAYOUTS: tuple[Cut, ...] = ("tp", "pp", "ep")
"""Not cp: see `models.layout`."""


def with_delta_nets(config: dict[str, Any], *, feed_forward: Part | None, fused: bool) -> Family:
    """What Qwen3.5 has, too. fused: `Variant.fused_delta`."""
    refuse(config, hidden_act="silu", attention_bias=False)
    variant = Variant(
        qk_norm=True,
        fused_delta=fused,
        attention=Attention(gated=True, delta=delta_net(config)),
        partial_rotary=0.25,
        feed_forward=feed_forward,
        transformer={"layernorm_zero_centered_gamma": True},
        extra={"carried": ("mtp.",)},
    )
    return decoder(config, variant)


def experts_of(config: dict[str, Any]) -> Part:
    (hidden,) = require(config, "hidden_size")
    return mixture_of_experts(
        hidden=hidden,
        ffn=config["moe_intermediate_size"],
        experts=config["num_experts"],
        router=Router(config["num_experts_per_tok"], normalize=bool(config["norm_topk_prob"])),
        shared=Shared(config["shared_expert_intermediate_size"], "shared_expert", gate="shared_expert_gate"),
    )


def build(config: dict[str, Any]) -> Family:
    config = {**DEFAULTS, **config}
    (layers,) = require(config, "num_hidden_layers")
    dense: list[int] = config.get("mlp_only_layers") or []
    step = config["decoder_sparse_step"]
    has_experts = [layer not in dense and (layer + 1) % step == 0 for layer in range(layers)]
    feed_forward = experts_of(config)
    if not all(has_experts):
        feed_forward = dense_and_sparse(gated_mlp(config), feed_forward, has_experts)
    return with_delta_nets(config, feed_forward=feed_forward, fused=True)


FAMILY = FamilyDefinition(
    architectures=("Qwen3NextForCausalLM",),
    build=build,
    opens="Qwen3-Next-80B-A3B",
    special="gated delta nets, every fourth layer attention with a gate, a quarter of each head rotated, norms with "
    "1 + weight, shared expert behind a gate",
    refuses="context parallelism, FP8 engines, biases",
    layouts=LAYOUTS,
)
