"""Gemma 3, text only: norms with (1 + weight) before and after attention and MLP, GeGLU, scaled embedding, and layers
with a sliding window and a rope base of their own between those that see everything."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.nn.functional as F

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
    windows,
)
from rltool.models.rope import two_rotaries

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
_NORMS = {
    BEFORE_ATTENTION: "input_layernorm.weight",
    AFTER_ATTENTION: "post_attention_layernorm.weight",
    BEFORE_MLP: "pre_feedforward_layernorm.weight",
    AFTER_MLP: "post_feedforward_layernorm.weight",
}


def gemma(config: dict[str, Any], *, attention: Attention, qk_norm: bool = False, **extra: Any) -> Family:
    """What Gemma 2 has, too. extra: further fields of the Family."""
    refuse(
        config,
        hidden_activation="gelu_pytorch_tanh",
        attention_bias=False,
        use_bidirectional_attention=False,
    )
    (hidden,) = require(config, "hidden_size")
    variant = Variant(
        qk_norm=qk_norm,
        activation=partial(F.gelu, approximate="tanh"),
        norms=_NORMS,
        transformer=dict(
            layernorm_zero_centered_gamma=True, softmax_scale=float(config["query_pre_attn_scalar"]) ** -0.5
        ),
        attention=attention,
        extra=dict(embedding_scale=hidden**0.5, **extra),
    )
    return decoder(config, variant)


def build(config: dict[str, Any]) -> Family:
    config = {**DEFAULTS, **config}
    refuse(config, attn_logit_softcapping=None, final_logit_softcapping=None)
    attention = Attention(windows=windows(config, config["sliding_window_pattern"]))
    rotary = two_rotaries(config["head_dim"], config, sliding_theta=config["rope_local_base_freq"])
    return gemma(config, attention=attention, qk_norm=True, rotary=rotary)


FAMILY = FamilyDefinition(
    architectures=("Gemma3ForCausalLM",),
    build=build,
    opens="Gemma 3, text only",
    special="norms with 1 + weight before and after attention and MLP, GeGLU, scaled embedding, windows with own rope",
    refuses="softcapping, bidirectional attention, biases, pictures",
)
