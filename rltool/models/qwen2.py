"""Qwen2 and Qwen2.5: biases on q, k and v, everything else as in Llama."""

from __future__ import annotations

from typing import Any

from rltool.errors import UsageError
from rltool.models.base import Family
from rltool.models.dense import dense_decoder, refuse

ARCHITECTURES = ("Qwen2ForCausalLM",)


def build(config: dict[str, Any]) -> Family:
    refuse(config, attention_bias=True, mlp_bias=False)
    # `sliding_window` alone is only a number: it acts where use_sliding_window or a layer type says so.
    if config.get("use_sliding_window") or any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        raise UsageError("config.json: sliding-window attention is in use (use_sliding_window, layer_types); not implemented")
    return dense_decoder(config, qkv_bias=True)
