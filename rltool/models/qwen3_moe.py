"""Qwen3-MoE: Qwen3 with a mixture of experts in every layer."""

from __future__ import annotations

from typing import Any

from rltool.models.base import WITH_EXPERTS, Family, FamilyDefinition
from rltool.models.decoder import Variant, decoder, refuse, refuse_sliding_window, require
from rltool.models.experts import Router, mixture_of_experts

DEFAULTS = {"num_experts_per_tok": 8, "num_experts": 128}
"""transformers' defaults, which config.json may leave out."""


def with_defaults(config: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """transformers 5 reads either name of the number of experts."""
    named = {"num_experts": config["num_local_experts"]} if "num_local_experts" in config else {}
    return {**defaults, **named, **config}


def sizes(config: dict[str, Any]) -> list[Any]:
    """hidden size, that of an expert, experts a layer, experts a token. UsageError for layers of other kinds."""
    refuse(config, hidden_act="silu", attention_bias=False, decoder_sparse_step=1, mlp_only_layers=[])
    refuse_sliding_window(config)
    return require(config, "hidden_size", "moe_intermediate_size", "num_experts", "num_experts_per_tok")


def build(config: dict[str, Any]) -> Family:
    config = with_defaults(config, DEFAULTS)
    hidden, ffn, experts, top_k = sizes(config)
    feed_forward = mixture_of_experts(
        hidden=hidden,
        ffn=ffn,
        experts=experts,
        router=Router(top_k, normalize=bool(config.get("norm_topk_prob", False))),
    )
    return decoder(config, Variant(qk_norm=True, feed_forward=feed_forward))


FAMILY = FamilyDefinition(
    architectures=("Qwen3MoeForCausalLM",),
    build=build,
    opens="Qwen3-30B-A3B, Qwen3-235B-A22B",
    special="experts in every layer, their weights normalised or not",
    refuses="layers without experts, sliding window in use",
    layouts=WITH_EXPERTS,
    engines=("vllm", "sglang"),
)
