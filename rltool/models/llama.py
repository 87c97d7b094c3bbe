"""Llama 2 and 3 (also SmolLM2 and others that carry Llama's architecture name).
Llama 3's rope scaling is in rope.py."""

from __future__ import annotations

from typing import Any

from rltool.models.base import Family, FamilyDefinition
from rltool.models.decoder import decoder, refuse


def build(config: dict[str, Any]) -> Family:
    # attention_bias of Llama also puts a bias on the output projection, unlike Qwen2's.
    refuse(config, hidden_act="silu", attention_bias=False, mlp_bias=False, sliding_window=None)
    return decoder(config)


FAMILY = FamilyDefinition(
    architectures=("LlamaForCausalLM",),
    build=build,
    opens="Llama 2 and 3, SmolLM2, and others under Llama's name",
    special="rope scaling `llama3`",
    refuses="biases, sliding window",
)
