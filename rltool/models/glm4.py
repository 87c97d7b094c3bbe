"""GLM-4 of April 2025 (9B, 32B) and GLM-Z1: norms before and after attention and MLP, rotary positions on half of each
head in pairs of neighbours, gate and up in one tensor."""

from __future__ import annotations

from typing import Any

from rltool.models.base import Family, FamilyDefinition
from rltool.models.decoder import (
    AFTER_ATTENTION,
    AFTER_MLP,
    BEFORE_ATTENTION,
    BEFORE_MLP,
    Variant,
    decoder,
    refuse,
)

DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "attention_bias": True,
    "rms_norm_eps": 1.5625e-7,
    "max_position_embeddings": 131072,
}
"""transformers' defaults, which config.json may leave out."""
NORMS = {
    BEFORE_ATTENTION: "input_layernorm.weight",
    AFTER_ATTENTION: "post_self_attn_layernorm.weight",
    BEFORE_MLP: "post_attention_layernorm.weight",
    AFTER_MLP: "post_mlp_layernorm.weight",
}


def build(config: dict[str, Any]) -> Family:
    config = {**DEFAULTS, **config}
    refuse(config, hidden_act="silu")
    variant = Variant(
        qkv_bias=bool(config["attention_bias"]),
        fused_gate_up="mlp.gate_up_proj",
        partial_rotary=0.5,
        interleaved=True,
        norms=NORMS,
    )
    return decoder(config, variant)


FAMILY = FamilyDefinition(
    architectures=("Glm4ForCausalLM",),
    build=build,
    opens="GLM-4-9B and 32B of 2025 (0414), GLM-Z1",
    special="norms before and after attention and MLP, half of each head rotated, in pairs of neighbours",
    engines=("vllm", "sglang"),
)
