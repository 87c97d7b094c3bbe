"""gpt-oss (20b, 120b): learned attention sinks, a sliding window in every other layer, biases on every product, and
experts with a clamped SwiGLU. Checkpoints in MXFP4 are read as bfloat16 (`quantized`)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from rltool.models.base import WITH_EXPERTS, Attention, Family, FamilyDefinition
from rltool.models.decoder import Variant, decoder, refuse, require, windows
from rltool.models.experts import Router, stacked_experts
from rltool.models.quantized import unquantized

DEFAULTS = {
    "head_dim": 64,
    "num_key_value_heads": 8,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "rope_theta": 150000.0,
}
YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
"""transformers' defaults, which config.json may leave out."""
FULL_EVERY = 2
"""Of the layers, where config.json does not name their kinds."""


def swish(x: Tensor, alpha: float) -> Tensor:
    """x * sigmoid(alpha x) (Ramachandran et al. 2017, arXiv 1710.05941)."""
    return x * torch.sigmoid(alpha * x)


def build(config: dict[str, Any]) -> Family:
    config = unquantized({**DEFAULTS, **config})
    refuse(config, hidden_act="silu", attention_bias=True)
    if not config.get("rope_parameters") and not config.get("rope_scaling"):
        config["rope_scaling"] = YARN
    hidden, ffn = require(config, "hidden_size", "intermediate_size")
    router = Router(config["num_experts_per_tok"], normalize=True)
    feed_forward = stacked_experts(
        hidden=hidden, ffn=ffn, experts=config["num_local_experts"], router=router, gate="router", bias=True,
        by_turns=True,
    )  # fmt: skip
    variant = Variant(
        qkv_bias=True,
        bias=True,
        attention=Attention(windows=windows(config, FULL_EVERY), sinks=True),
        activation=partial(swish, alpha=config["swiglu_alpha"]),
        feed_forward=feed_forward,
        transformer={"glu_linear_offset": 1.0, "activation_func_clamp_value": config["swiglu_limit"]},
    )
    return decoder(config, variant)


FAMILY = FamilyDefinition(
    architectures=("GptOssForCausalLM",),
    build=build,
    opens="gpt-oss-20b and 120b, in MXFP4 (read as bfloat16, exported so) or not",
    special="attention sinks, a window in every other layer, biases on every product, clamped SwiGLU in experts",
    refuses="engines on MXFP4 files, writing MXFP4; weights for a vLLM without the plugin (by the value check)",
    layouts=WITH_EXPERTS,
    no_sglang="requires one of triton, trtllm_mha, fa3, fa4, ... attention backend",
)
