"""GLM-4.5, 4.6, 4.7 and models trained from them: rotary positions on half of each head, and DeepSeek-V3's layers of
experts."""

from __future__ import annotations

from typing import Any

from rltool.models.base import WITH_EXPERTS, Family, FamilyDefinition
from rltool.models.decoder import Variant, decoder, refuse
from rltool.models.experts import deepseek_experts, predicting_layers

DEFAULTS = {
    "num_hidden_layers": 46,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "rms_norm_eps": 1e-5,
}
"""transformers' defaults, which config.json may leave out."""


def build(config: dict[str, Any]) -> Family:
    config = {**DEFAULTS, **config}
    refuse(config, hidden_act="silu")
    layers = config["num_hidden_layers"]
    variant = Variant(
        qkv_bias=bool(config.get("attention_bias", False)),
        qk_norm=bool(config.get("use_qk_norm", False)),
        partial_rotary=0.5,
        feed_forward=deepseek_experts(config, [layer >= config["first_k_dense_replace"] for layer in range(layers)]),
        extra={"carried": predicting_layers(config)},
    )
    return decoder(config, variant)


FAMILY = FamilyDefinition(
    architectures=("Glm4MoeForCausalLM",),
    build=build,
    opens="GLM-4.5, 4.5-Air, 4.6, 4.7, INTELLECT-3",
    special="half of each head rotated, sigmoid router with correction bias, shared expert, dense layers first",
    refuses="FP8 files, which are in compressed-tensors",
    layouts=WITH_EXPERTS,
    engines=("vllm", "sglang"),
)
