"""Llama 2 and 3 (also SmolLM2 and others that carry Llama's architecture name)."""

from __future__ import annotations

from typing import Any

from rltool.models.base import Family
from rltool.models.dense import dense_decoder, refuse

ARCHITECTURES = ("LlamaForCausalLM",)


def build(config: dict[str, Any]) -> Family:
    # attention_bias of Llama also puts a bias on the output projection, unlike Qwen2's.
    refuse(config, attention_bias=False, mlp_bias=False, sliding_window=None)
    return dense_decoder(config, qkv_bias=False)
