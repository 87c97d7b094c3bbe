"""Mistral: Llama with a sliding window, which is implemented only where it covers the whole context."""

from __future__ import annotations

from typing import Any

from rltool.errors import UsageError
from rltool.models.base import Family, FamilyDefinition
from rltool.models.decoder import decoder, refuse

WINDOW = 4096
"""transformers' default where config.json does not name `sliding_window` at all; null means none."""


def check_window(config: dict[str, Any]) -> None:
    """UsageError when `sliding_window` is shorter than the context:
    then early tokens would be unseen, but are not here."""
    window, context = config.get("sliding_window"), config.get("max_position_embeddings")
    if window is not None and (context is None or window < context):
        raise UsageError(
            f"config.json: sliding_window = {window} is shorter than max_position_embeddings = {context}; "
            "sliding-window attention is not implemented for this family. If no sequence will be longer than the "
            f"window, set max_position_embeddings to {window} in config.json: then the window never acts"
        )


def build(config: dict[str, Any]) -> Family:
    config = {"sliding_window": WINDOW, **config}
    refuse(config, hidden_act="silu", layer_types=None)
    check_window(config)
    return decoder(config)


FAMILY = FamilyDefinition(
    architectures=("MistralForCausalLM",),
    build=build,
    opens="Mistral 7B",
    refuses="a sliding window shorter than the context, windows by layer",
)
