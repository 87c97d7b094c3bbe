"""Seed-OSS (36B), a family that rltool does not build: Llama with biases on queries, keys and values."""

from __future__ import annotations

from typing import Any

from rltool.api import Family, FamilyDefinition, Variant, decoder, refuse


def build(config: dict[str, Any]) -> Family:
    """Refuses by name what a config.json may ask for and is not here."""
    refuse(config, hidden_act="silu", attention_bias=True, attention_out_bias=False, mlp_bias=False)
    # The file has the dropout of pretraining; reinforcement learning trains without.
    return decoder({**config, "attention_dropout": 0.0}, Variant(qkv_bias=True))


FAMILY = FamilyDefinition(
    architectures=("SeedOssForCausalLM",),
    build=build,
    opens="Seed-OSS-36B",
    special="biases on q, k and v",
    refuses="other biases",
)
"""model.family = "examples.seed_oss:FAMILY"; `rltool models check examples.seed_oss:FAMILY` compares it."""
