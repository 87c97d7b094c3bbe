"""Qwen2-MoE and Qwen1.5-MoE: Qwen2 with experts, and one more that every token meets, behind a gate."""

from __future__ import annotations

from typing import Any

from rltool.models.base import WITH_EXPERTS, Family, FamilyDefinition
from rltool.models.decoder import Variant, decoder, gated_mlp, refuse, refuse_sliding_window, require
from rltool.models.experts import Router, Shared, dense_and_sparse, mixture_of_experts

DEFAULTS = {
    "num_key_value_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "decoder_sparse_step": 1,
    "max_position_embeddings": 32768,
}
"""transformers' defaults, which config.json may leave out."""


def build(config: dict[str, Any]) -> Family:
    config = {**DEFAULTS, **config}
    refuse(config, hidden_act="silu", qkv_bias=True)
    refuse_sliding_window(config)
    layers, hidden = require(config, "num_hidden_layers", "hidden_size")
    dense: list[int] = config.get("mlp_only_layers") or []
    step = config["decoder_sparse_step"]
    has_experts = [layer not in dense and (layer + 1) % step == 0 for layer in range(layers)]
    feed_forward = mixture_of_experts(
        hidden=hidden,
        ffn=config["moe_intermediate_size"],
        experts=config["num_experts"],
        router=Router(config["num_experts_per_tok"], normalize=bool(config.get("norm_topk_prob", False))),
        shared=Shared(config["shared_expert_intermediate_size"], "shared_expert", gate="shared_expert_gate"),
    )
    if not all(has_experts):
        feed_forward = dense_and_sparse(gated_mlp(config), feed_forward, has_experts)
    return decoder(config, Variant(qkv_bias=True, feed_forward=feed_forward))


FAMILY = FamilyDefinition(
    architectures=("Qwen2MoeForCausalLM",),
    build=build,
    opens="Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B",
    special="biases on q, k and v, shared expert behind a gate, layers without experts",
    refuses="sliding window in use",
    layouts=WITH_EXPERTS,
    no_sglang="its shared expert's gate is a Triton kernel: 0 active drivers",
)
