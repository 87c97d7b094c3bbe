"""OLMo 2 and 3: attention and MLP are normalised behind, not before, and all heads of a query or key together."""

from __future__ import annotations

from typing import Any

from rltool.models.base import Attention, Family, FamilyDefinition
from rltool.models.decoder import AFTER_ATTENTION, AFTER_MLP, Variant, decoder, refuse, require, windows
from rltool.models.rope import two_rotaries

DEFAULTS = {"rms_norm_eps": 1e-5}
OLMO3_DEFAULTS = DEFAULTS | {"rope_theta": 5e5, "sliding_window": 4096}
"""transformers' defaults, which config.json may leave out."""
FULL_EVERY = 4
"""Of OLMo 3's layers, where config.json does not name their kinds."""
NORMS = {AFTER_ATTENTION: "post_attention_layernorm.weight", AFTER_MLP: "post_feedforward_layernorm.weight"}


def build(config: dict[str, Any]) -> Family:
    refuse(config, hidden_act="silu", attention_bias=False, clip_qkv=None)
    if "Olmo3ForCausalLM" not in config["architectures"]:
        whole = Attention(norm_whole=True)
        return decoder({**DEFAULTS, **config}, Variant(qk_norm=True, attention=whole, norms=NORMS))
    config = {**OLMO3_DEFAULTS, **config}
    hidden, heads = require(config, "hidden_size", "num_attention_heads")
    rotary = two_rotaries(config.get("head_dim") or hidden // heads, config, sliding_theta=config["rope_theta"])
    attention = Attention(norm_whole=True, windows=windows(config, FULL_EVERY))
    return decoder(config, Variant(qk_norm=True, attention=attention, norms=NORMS, extra={"rotary": rotary}))


FAMILY = FamilyDefinition(
    architectures=("Olmo2ForCausalLM", "Olmo3ForCausalLM"),
    build=build,
    opens="OLMo 2 and 3",
    special="norms after attention and MLP, none before, one norm over all heads; OLMo 3: windows with own rope",
    refuses="biases, clipped queries, keys and values",
    no_sglang="OLMo 3 (log-probabilities 0.06 apart), but OLMo 2 within 3e-6",
)
