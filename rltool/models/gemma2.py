"""Gemma 2: norms with (1 + weight) before and after attention and MLP, GeGLU, scaled embedding, every second layer with
a sliding window, and bounded scores and logits."""

from __future__ import annotations

from typing import Any

from rltool.models.base import Attention, Family, FamilyDefinition
from rltool.models.decoder import windows
from rltool.models.gemma3 import gemma

DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
"""transformers' defaults, which config.json may leave out; of the caps null means none."""
FULL_EVERY = 2
"""Of the layers, where config.json does not name their kinds."""


def build(config: dict[str, Any]) -> Family:
    config = {**DEFAULTS, **config}
    attention = Attention(windows=windows(config, FULL_EVERY), softcap=config["attn_logit_softcapping"])
    return gemma(config, attention=attention, logit_softcap=config["final_logit_softcapping"])


FAMILY = FamilyDefinition(
    architectures=("Gemma2ForCausalLM",),
    build=build,
    opens="Gemma 2",
    special="as Gemma 3, with softcapped logits and scores (attention in plain torch), one rope, no q and k norms",
    refuses="bidirectional attention, biases",
    no_sglang="log-probabilities are 1.9 apart, and without hidden_act in config.json it ends",
)
