"""Qwen3-VL (dense, arXiv 2511.21631): Qwen3 under other names, beside a vision tower.

The rotary positions of an image's tokens have three axes (`mrope_section`); those of text are equal on all three, which
is one plain axis.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rltool.models import qwen3
from rltool.models.base import Family, FamilyDefinition, Pictures
from rltool.models.decoder import beside_tower, text_of
from rltool.models.rope import rope_settings

DEFAULTS = {"rope_theta": 500000.0, "max_position_embeddings": 128000}
"""transformers' defaults, which config.json may leave out."""


def build(config: dict[str, Any]) -> Family:
    text = DEFAULTS | text_of(config)
    family, vision, rope = beside_tower(qwen3.build(text)), config.get("vision_config"), rope_settings(text)
    # vLLM takes axes that are not named to be interleaved for plain sections, transformers does not: text alone.
    if not vision or not rope.get("mrope_interleaved") or "image_token_id" not in config:
        return family
    sections = tuple(rope["mrope_section"])
    if len(sections) != 3 or sum(sections) != len(family.rotary.inverse_frequencies):
        raise ValueError(f"mrope_section = {sections} is not a part for each of three axes of all frequencies")
    pictures = Pictures(
        config["image_token_id"], vision.get("patch_size", 16), vision.get("spatial_merge_size", 2),
        len(vision.get("deepstack_visual_indexes", (8, 16, 24))),
    )  # fmt: skip
    return replace(family, pictures=pictures, rotary=replace(family.rotary, sections=sections))


FAMILY = FamilyDefinition(
    architectures=("Qwen3VLForConditionalGeneration",),
    build=build,
    opens="Qwen3-VL, dense",
    special="as Qwen3, dense; pictures by a frozen vision tower: three rotary axes, features added to first layers",
    refuses="FP8 engines, biases, videos, audio; context parallelism with pictures",
)
