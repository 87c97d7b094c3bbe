"""Qwen2 and Qwen2.5: biases on q, k and v, everything else as in Llama."""

from __future__ import annotations

from typing import Any

from rltool.models.base import Family, FamilyDefinition
from rltool.models.decoder import Variant, decoder, refuse, refuse_sliding_window


def build(config: dict[str, Any]) -> Family:
    refuse(config, hidden_act="silu", attention_bias=True, mlp_bias=False)
    refuse_sliding_window(config)
    return decoder(config, Variant(qkv_bias=True))


FAMILY = FamilyDefinition(
    architectures=("Qwen2ForCausalLM",),
    build=build,
    opens="Qwen2, Qwen2.5",
    special="biases on q, k and v",
    refuses="sliding window in use",
    engines=("vllm", "sglang"),
)
