"""Qwen2 and Qwen2.5: biases on q, k and v, everything else as in Llama."""

from __future__ import annotations

from typing import Any

from rltool.models.base import Family
from rltool.models.decoder import Variant, decoder, refuse, refuse_sliding_window

ARCHITECTURES = ("Qwen2ForCausalLM",)


def build(config: dict[str, Any]) -> Family:
    refuse(config, hidden_act="silu", attention_bias=True, mlp_bias=False)
    refuse_sliding_window(config)
    return decoder(config, Variant(qkv_bias=True))
