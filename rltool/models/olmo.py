"""OLMo 2 and 3, which normalise what attention and MLP give in place of what they get, and OLMoE, which normalises
before and has experts; all with one norm over all heads of a query or key."""

from __future__ import annotations

from typing import Any

from rltool.models.base import Attention, Family
from rltool.models.decoder import AFTER_ATTENTION, AFTER_MLP, Variant, decoder, refuse, require, windows
from rltool.models.experts import Router, mixture_of_experts
from rltool.models.rope import two_rotaries

ARCHITECTURES = ("Olmo2ForCausalLM", "Olmo3ForCausalLM", "OlmoeForCausalLM")
DEFAULTS = {"rms_norm_eps": 1e-5}
OLMO3_DEFAULTS = DEFAULTS | {"rope_theta": 5e5, "sliding_window": 4096}
OLMOE_DEFAULTS = DEFAULTS | {"num_experts": 64, "num_experts_per_tok": 8, "max_position_embeddings": 4096}
"""transformers' defaults, which config.json may leave out."""
FULL_EVERY = 4
"""Of OLMo 3's layers, where config.json does not name their kinds."""
NORMS = {AFTER_ATTENTION: "post_attention_layernorm.weight", AFTER_MLP: "post_feedforward_layernorm.weight"}


def build(config: dict[str, Any]) -> Family:
    refuse(config, hidden_act="silu", attention_bias=False, clip_qkv=None)
    if "OlmoeForCausalLM" in config["architectures"]:
        return _olmoe({**OLMOE_DEFAULTS, **config})
    if "Olmo3ForCausalLM" in config["architectures"]:
        return _olmo3({**OLMO3_DEFAULTS, **config})
    whole = Attention(norm_whole=True)
    return decoder({**DEFAULTS, **config}, Variant(qk_norm=True, attention=whole, norms=NORMS))


def _olmo3(config: dict[str, Any]) -> Family:
    hidden, heads = require(config, "hidden_size", "num_attention_heads")
    rotary = two_rotaries(config.get("head_dim") or hidden // heads, config, sliding_theta=config["rope_theta"])
    attention = Attention(norm_whole=True, windows=windows(config, FULL_EVERY))
    return decoder(config, Variant(qk_norm=True, attention=attention, norms=NORMS, extra={"rotary": rotary}))


def _olmoe(config: dict[str, Any]) -> Family:
    # Engines never normalise the weights of its experts, whatever config.json says.
    refuse(config, norm_topk_prob=False)
    hidden, ffn, experts, top_k = require(
        config, "hidden_size", "intermediate_size", "num_experts", "num_experts_per_tok"
    )
    feed_forward = mixture_of_experts(hidden=hidden, ffn=ffn, experts=experts, router=Router(top_k, normalize=False))
    return decoder(config, Variant(qk_norm=True, attention=Attention(norm_whole=True), feed_forward=feed_forward))
