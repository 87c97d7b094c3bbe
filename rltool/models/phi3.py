"""Phi-4 and Phi-3: Llama with queries, keys and values in one tensor, and gate and up in another."""

from __future__ import annotations

from typing import Any

from rltool.errors import UsageError
from rltool.models.base import Family, FamilyDefinition
from rltool.models.decoder import Variant, decoder, refuse
from rltool.models.mistral import check_window
from rltool.models.rope import rope_settings

DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096}
"""transformers' defaults, which config.json may leave out."""


def build(config: dict[str, Any]) -> Family:
    config = {**DEFAULTS, **config}
    refuse(config, hidden_act="silu", attention_bias=False, resid_pdrop=0.0, embd_pdrop=0.0)
    check_window(config)  # vLLM has none for this family
    kind = rope_settings(config)["rope_type"]
    if kind not in ("default", "longrope"):  # transformers takes a "yarn" here for its longrope
        raise UsageError(
            f"config.json: rope type {kind!r} is not implemented for this family; 'default' and 'longrope' are"
        )
    variant = Variant(fused_qkv="self_attn.qkv_proj", fused_gate_up="mlp.gate_up_proj", partial_rotary=1.0)
    return decoder(config, variant)


FAMILY = FamilyDefinition(
    architectures=("Phi3ForCausalLM",),
    build=build,
    opens="Phi-4, Phi-4-reasoning (14B), Phi-4-mini, Phi-3",
    special="queries, keys and values fused, gate and up fused",
    refuses="with longrope (Phi-4-mini, Phi-3 with 128k) sequences above 4,096 tokens, a short sliding window, dropout",
    engines=("vllm", "sglang"),
)
