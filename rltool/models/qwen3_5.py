"""Qwen3.5 and later, dense: Qwen3-Next's layers without experts, each product of a gated delta net a tensor of its own.
A checkpoint with a vision tower is trained as text."""

from __future__ import annotations

from typing import Any

from rltool.models import qwen3_next
from rltool.models.base import Family, FamilyDefinition
from rltool.models.decoder import Part, beside_tower, text_of

DEFAULTS = {
    **{key: value for key, value in qwen3_next.DEFAULTS.items() if "head" in key or key.startswith("linear_")},
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
}
"""transformers' defaults, which config.json may leave out."""


def with_tower(text: dict[str, Any], feed_forward: Part | None = None) -> Family:
    """text: see `text_of`, with defaults. The tower's tensors are carried, where the architecture has one."""
    family = qwen3_next.with_delta_nets(text, feed_forward=feed_forward, fused=False)
    return beside_tower(family) if family.architecture.endswith("ForConditionalGeneration") else family


def build(config: dict[str, Any]) -> Family:
    return with_tower({**DEFAULTS, **text_of(config)})


FAMILY = FamilyDefinition(
    architectures=("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    build=build,
    opens="Qwen3.5 and later, dense, as text",
    special="gated delta nets, every fourth layer attention with a gate, a quarter of each head rotated, norms with "
    "1 + weight; a vision tower is carried along",
    refuses="context parallelism, FP8 engines, biases, pictures",
    layouts=("tp", "pp"),
)
