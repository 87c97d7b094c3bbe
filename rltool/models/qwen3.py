"""Qwen3 (dense): no biases, RMSNorm over each head's query and key, a head size of its own."""

from __future__ import annotations

from typing import Any

from rltool.models.base import Family, FamilyDefinition
from rltool.models.decoder import Variant, decoder, refuse, refuse_sliding_window

HEAD_DIM = 128
"""transformers' default where config.json names none; not hidden_size / heads."""


def build(config: dict[str, Any]) -> Family:
    refuse(config, hidden_act="silu", attention_bias=False)
    refuse_sliding_window(config)
    return decoder({"head_dim": HEAD_DIM, **config}, Variant(qk_norm=True))


FAMILY = FamilyDefinition(
    architectures=("Qwen3ForCausalLM",),
    build=build,
    opens="Qwen3, dense",
    special="norms of each head's query and key, own head size",
    refuses="biases, sliding window in use",
)
