"""Qwen3.5 and later with experts: Qwen3-Next's in every layer of Qwen3.5."""

from __future__ import annotations

from typing import Any

from rltool.models import qwen3_next
from rltool.models.base import Family, FamilyDefinition
from rltool.models.decoder import text_of
from rltool.models.qwen3_5 import FAMILY as DENSE
from rltool.models.qwen3_5 import with_tower

DEFAULTS = qwen3_next.DEFAULTS | {"num_experts_per_tok": 8, "num_experts": 256}
"""transformers' defaults, which config.json may leave out."""


def build(config: dict[str, Any]) -> Family:
    text = {**DEFAULTS, **text_of(config), "norm_topk_prob": True}
    return with_tower(text, feed_forward=qwen3_next.experts_of(text))


FAMILY = FamilyDefinition(
    architectures=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    build=build,
    opens="Qwen3.5 and later, with experts, as text",
    special="as the dense ones, with experts in every layer and a shared expert behind a gate",
    refuses=DENSE.refuses,
    layouts=qwen3_next.LAYOUTS,
)
