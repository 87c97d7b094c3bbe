"""SmolLM3: Llama whose every fourth layer has no positions (NoPE, arXiv 2501.18795)."""

from __future__ import annotations

from typing import Any

from rltool.errors import UsageError
from rltool.models.base import Family, FamilyDefinition
from rltool.models.decoder import Variant, decoder, refuse, refuse_sliding_window, require

DEFAULTS = {
    "num_key_value_heads": 4,
    "no_rope_layer_interval": 4,
    "rope_theta": 2e6,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
"""transformers' defaults, which config.json may leave out."""


def build(config: dict[str, Any]) -> Family:
    config = {**DEFAULTS, **config}
    refuse(config, hidden_act="silu", attention_bias=False, mlp_bias=False)
    refuse_sliding_window(config)
    (layers,) = require(config, "num_hidden_layers")
    # 1: with positions, whatever the key's name says. Megatron's key means what it says.
    rotated = config.get("no_rope_layers")
    if rotated is None:
        rotated = [(layer + 1) % config["no_rope_layer_interval"] != 0 for layer in range(layers)]
    if len(rotated) < layers:
        raise UsageError(f"config.json: no_rope_layers names {len(rotated)} layers, but num_hidden_layers is {layers}")
    return decoder(config, Variant(transformer={"no_rope_freq": [int(not x) for x in rotated[:layers]]}))


FAMILY = FamilyDefinition(
    architectures=("SmolLM3ForCausalLM",),
    build=build,
    opens="SmolLM3",
    special="layers without positions",
    refuses="biases, sliding window in use",
    engines=("vllm", "sglang"),
)
