"""Mixtral: Mistral with a mixture of experts in every layer; the weights of the chosen experts sum to 1."""

from __future__ import annotations

from typing import Any

from rltool.models.base import WITH_EXPERTS, Family, FamilyDefinition
from rltool.models.decoder import Variant, decoder, refuse, require
from rltool.models.experts import Names, Router, mixture_of_experts
from rltool.models.mistral import check_window

DEFAULTS = {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "num_experts_per_tok": 2, "num_local_experts": 8}
"""transformers' defaults, which config.json may leave out."""


def build(config: dict[str, Any]) -> Family:
    config = {**DEFAULTS, **config}
    refuse(config, hidden_act="silu", router_jitter_noise=0.0)
    check_window(config)
    hidden, ffn, experts, top_k = require(
        config, "hidden_size", "intermediate_size", "num_local_experts", "num_experts_per_tok"
    )
    feed_forward = mixture_of_experts(
        hidden=hidden,
        ffn=ffn,
        experts=experts,
        router=Router(top_k, normalize=True),
        names=Names("block_sparse_moe", ("w1", "w3", "w2")),
    )
    return decoder(config, Variant(feed_forward=feed_forward))


FAMILY = FamilyDefinition(
    architectures=("MixtralForCausalLM",),
    build=build,
    opens="Mixtral 8x7B and 8x22B",
    special="experts in every layer",
    refuses="router jitter, a sliding window shorter than the context",
    layouts=WITH_EXPERTS,
    engines=("vllm", "sglang"),
)
