"""Gemma 3, text only: norms with (1 + weight) before and after attention and MLP, GeGLU, scaled embedding, and layers
with a sliding window and a rope base of their own between those that see everything."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch.nn.functional as F

from rltool.errors import UsageError
from rltool.models.base import Attention, Family, FamilyDefinition
from rltool.models.decoder import (
    AFTER_ATTENTION,
    AFTER_MLP,
    BEFORE_ATTENTION,
    BEFORE_MLP,
    Variant,
    decoder,
    refuse,
    require,
)
from rltool.models.rope import rope_settings, rotary

DEFAULTS = {
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
}
"""transformers' defaults, which config.json may leave out."""
NORMS = {
    BEFORE_ATTENTION: "input_layernorm.weight",
    AFTER_ATTENTION: "post_attention_layernorm.weight",
    BEFORE_MLP: "pre_feedforward_layernorm.weight",
    AFTER_MLP: "post_feedforward_layernorm.weight",
}


def build(config: dict[str, Any]) -> Family:
    config = {**DEFAULTS, **config}
    refuse(
        config,
        hidden_activation="gelu_pytorch_tanh",
        attention_bias=False,
        use_bidirectional_attention=False,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
    )
    layers, hidden, window = require(config, "num_hidden_layers", "hidden_size", "sliding_window")
    head_dim, (full, sliding) = config["head_dim"], _ropes(config)
    variant = Variant(
        qk_norm=True,
        activation=partial(F.gelu, approximate="tanh"),
        norms=NORMS,
        transformer=dict(
            layernorm_zero_centered_gamma=True, softmax_scale=float(config["query_pre_attn_scalar"]) ** -0.5
        ),
        attention=Attention(
            windows=tuple(window if kind == "sliding_attention" else None for kind in _layer_types(config, layers))
        ),
        extra=dict(
            embedding_scale=hidden**0.5,
            rotary=replace(rotary(head_dim, config, full), sliding=rotary(head_dim, config, sliding)),
        ),
    )
    return decoder({**config, "rope_parameters": full, "rope_scaling": None}, variant)


def _layer_types(config: dict[str, Any], layers: int) -> list[str]:
    """Per layer "sliding_attention" or "full_attention"; older files name only the distance of the full ones."""
    pattern = config["sliding_window_pattern"]
    kinds = config.get("layer_types") or [
        "sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(layers)
    ]
    if len(kinds) != layers or not set(kinds) <= {"sliding_attention", "full_attention"}:
        raise UsageError(f"config.json: layer_types must name sliding_attention or full_attention for {layers} layers")
    return kinds


def _ropes(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rope settings of the full and of the sliding layers: one entry per layer type since transformers 5, before, the
    scaling was that of the full layers alone."""
    both: dict[str, Any] = config.get("rope_parameters") or {}
    full: dict[str, Any] = both.get("full_attention") or config.get("rope_scaling") or {}
    local: dict[str, Any] = both.get("sliding_attention") or {}
    return (
        rope_settings({"rope_theta": config["rope_theta"], "rope_parameters": full}),
        rope_settings({"rope_theta": config["rope_local_base_freq"], "rope_parameters": local}),
    )


FAMILY = FamilyDefinition(
    architectures=("Gemma3ForCausalLM",),
    build=build,
    opens="Gemma 3, text only",
    special="norms with 1 + weight before and after attention and MLP, GeGLU, scaled embedding, windows with own rope",
    refuses="softcapping, bidirectional attention, biases, pictures",
)
