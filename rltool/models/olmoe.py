"""OLMoE: experts in every layer, and one norm over all heads of a query or key."""

from __future__ import annotations

from typing import Any

from rltool.models.base import WITH_EXPERTS, Attention, Family, FamilyDefinition
from rltool.models.decoder import Variant, decoder, refuse, require
from rltool.models.experts import Router, mixture_of_experts

DEFAULTS = {"num_experts": 64, "num_experts_per_tok": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096}
"""transformers' defaults, which config.json may leave out."""


def build(config: dict[str, Any]) -> Family:
    config = {**DEFAULTS, **config}
    # vLLM and SGLang never normalise the weights of this family's experts, whatever config.json says.
    refuse(config, hidden_act="silu", attention_bias=False, clip_qkv=None, norm_topk_prob=False)
    hidden, ffn = require(config, "hidden_size", "intermediate_size")
    router = Router(config["num_experts_per_tok"], normalize=False)
    feed_forward = mixture_of_experts(hidden=hidden, ffn=ffn, experts=config["num_experts"], router=router)
    return decoder(config, Variant(qk_norm=True, attention=Attention(norm_whole=True), feed_forward=feed_forward))


FAMILY = FamilyDefinition(
    architectures=("OlmoeForCausalLM",),
    build=build,
    opens="OLMoE-1B-7B",
    special="experts in every layer, one norm over all heads of a query or key",
    refuses="normalised weights of experts, biases, clipped queries, keys and values",
    layouts=WITH_EXPERTS,
    engines=("vllm", "sglang"),
)
