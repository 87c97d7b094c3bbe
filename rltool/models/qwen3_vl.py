"""Qwen3-VL (arXiv 2511.21631): Qwen3 under other names, beside a vision tower; or Qwen3-MoE, the experts of a layer in
one tensor of each kind.

The rotary positions of an image's tokens have three axes (`mrope_section`); those of text are equal on all three, which
is one plain axis.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rltool.models import qwen3, qwen3_moe
from rltool.models.base import WITH_EXPERTS, Family, FamilyDefinition
from rltool.models.decoder import Variant, beside_tower, decoder, refuse, text_of
from rltool.models.experts import Router, stacked_experts
from rltool.models.pictures import Pictures
from rltool.models.rope import rope_settings

DEFAULTS = {"rope_theta": 500000.0, "max_position_embeddings": 128000}
"""transformers' defaults, which config.json may leave out."""
EXPERTS_DEFAULTS = DEFAULTS | {"num_experts_per_tok": 4, "num_experts": 60, "moe_intermediate_size": 1408}
"""Likewise, of the one with experts."""


def build(config: dict[str, Any]) -> Family:
    text = DEFAULTS | text_of(config)
    return with_pictures(qwen3.build(text), text, config)


def build_with_experts(config: dict[str, Any]) -> Family:
    text = qwen3_moe.with_defaults(text_of(config), EXPERTS_DEFAULTS)
    refuse(text, norm_topk_prob=True)
    hidden, ffn, experts, top_k = qwen3_moe.sizes(text)
    feed_forward = stacked_experts(
        hidden=hidden, ffn=ffn, experts=experts, router=Router(top_k, normalize=True), gate="gate", bias=False,
        by_turns=False,
    )  # fmt: skip
    family = decoder(text, Variant(qk_norm=True, feed_forward=feed_forward))
    return with_pictures(family, text, config)


def with_pictures(family: Family, text: dict[str, Any], config: dict[str, Any]) -> Family:
    """family: of the language model alone; text: its configuration."""
    family, vision, rope = beside_tower(family), config.get("vision_config"), rope_settings(text)
    # vLLM takes axes that are not named to be interleaved for plain sections, transformers does not: text alone.
    if not vision or not rope.get("mrope_interleaved") or "image_token_id" not in config:
        return family
    sections = tuple(rope["mrope_section"])
    if len(sections) != 3 or sum(sections) != len(family.rotary.inverse_frequencies):
        raise ValueError(f"mrope_section = {sections} is not a part for each of three axes of all frequencies")
    pictures = Pictures(
        config["image_token_id"], vision.get("patch_size", 16), vision.get("spatial_merge_size", 2),
        len(vision.get("deepstack_visual_indexes", (8, 16, 24))), config.get("video_token_id", -1),
    )  # fmt: skip
    return replace(family, pictures=pictures, rotary=replace(family.rotary, sections=sections))


FAMILY = FamilyDefinition(
    architectures=("Qwen3VLForConditionalGeneration",),
    build=build,
    opens="Qwen3-VL, dense",
    special="as Qwen3, dense; pictures by a frozen vision tower: three rotary axes, features added to first layers",
    refuses="FP8 engines, biases, videos, audio; context parallelism with pictures",
)

EXPERTS_FAMILY = FamilyDefinition(
    architectures=("Qwen3VLMoeForConditionalGeneration",),
    build=build_with_experts,
    opens="Qwen3-VL-30B-A3B, Qwen3-VL-235B-A22B",
    special="as Qwen3-VL, dense, with experts in every layer, in one tensor of each kind",
    refuses=f"{FAMILY.refuses}; experts' tensors as transformers 5 saves them, outputs first",
    layouts=WITH_EXPERTS,
)
