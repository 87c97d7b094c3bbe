"""Qwen3-VL (dense), trained as text: Qwen3 under other names, beside a vision tower.

The rotary positions of an image's tokens have three axes (`mrope_section`); those of text are equal on all three, which
is one plain axis.
"""

from __future__ import annotations

from typing import Any

from rltool.models import qwen3
from rltool.models.base import Family, FamilyDefinition
from rltool.models.decoder import beside_tower, text_of

DEFAULTS = {"rope_theta": 500000.0, "max_position_embeddings": 128000}
"""transformers' defaults, which config.json may leave out."""


def build(config: dict[str, Any]) -> Family:
    return beside_tower(qwen3.build({**DEFAULTS, **text_of(config)}))


FAMILY = FamilyDefinition(
    architectures=("Qwen3VLForConditionalGeneration",),
    build=build,
    opens="Qwen3-VL, dense, as text",
    special="as Qwen3, dense; a vision tower is carried along",
    refuses="FP8 engines, biases, pictures, videos",
)
