"""DeepSeek-V3 and R1, Moonlight, Kimi K2, and GLM-4.7-Flash, which is the same with other defaults: multi-head latent
attention, dense layers first, then experts chosen by sigmoid with a correction bias and groups, and a shared one."""

from __future__ import annotations

from typing import Any

from rltool.models.base import WITH_EXPERTS, Attention, Family, FamilyDefinition, Latent
from rltool.models.decoder import Variant, decoder, refuse, require
from rltool.models.experts import deepseek_experts, predicting_layers
from rltool.models.rope import mscale, rope_settings

DEFAULTS = {
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
LITE_DEFAULTS = DEFAULTS | {
    "moe_intermediate_size": 1536,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.8,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "rms_norm_eps": 1e-5,
}
"""transformers' defaults, which config.json may leave out; q_lora_rank may also be null."""


def build(config: dict[str, Any]) -> Family:
    config = {**(DEFAULTS if "DeepseekV3ForCausalLM" in config["architectures"] else LITE_DEFAULTS), **config}
    refuse(config, hidden_act="silu", attention_bias=False)
    (layers,) = require(config, "num_hidden_layers")
    latent = Latent(
        query_rank=config["q_lora_rank"],
        rank=config["kv_lora_rank"],
        plain=config["qk_nope_head_dim"],
        rotary=config["qk_rope_head_dim"],
        value=config["v_head_dim"],
    )
    types = config.get("mlp_layer_types")
    has_experts = [
        types[layer] == "sparse" if types else layer >= config["first_k_dense_replace"] for layer in range(layers)
    ]
    rope = rope_settings(config)
    factor = mscale(rope["factor"], rope["mscale_all_dim"]) if rope.get("mscale_all_dim") else 1.0
    variant = Variant(
        attention=Attention(latent=latent),
        interleaved=config.get("rope_interleave") is not False,
        feed_forward=deepseek_experts(config, has_experts),
        transformer={"softmax_scale": latent.head**-0.5 * factor**2},
        extra={"carried": predicting_layers(config)},
    )
    return decoder(config, variant)


FAMILY = FamilyDefinition(
    architectures=("DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"),
    build=build,
    opens="DeepSeek V3 and R1, Kimi K2, in FP8 (read as bfloat16, exported so) or not, Moonlight, GLM-4.7-Flash",
    special="multi-head latent attention; sigmoid router with groups and bias, shared expert, dense layers first; for "
    "norms of low-rank vectors vLLM takes rms_norm_eps (1e-5 in Moonlight and GLM-4.7-Flash), the trainer 1e-6 as "
    "transformers: log-probabilities differ by 2e-5 in fp32",
    refuses="groups that do not have two chosen experts each; engines that a run starts on FP8 files",
    layouts=WITH_EXPERTS,
    no_sglang="Expected size for first two dimensions of batch2 tensor to be: [4, 192] but got: [4, 576]",
)
