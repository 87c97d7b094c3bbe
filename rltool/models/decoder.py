"""What the decoder families share: RMSNorm, rotary positions, grouped queries, gated MLP.
A family states its differences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from rltool.errors import UsageError
from rltool.models.base import EMBEDDING, FINAL_NORM, HEAD, Family, Parameter
from rltool.models.rope import inverse_frequencies, rope_settings

PLAIN_NORMS = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
}
"""Megatron's name of a norm over the hidden size -> its HF name, within a layer."""


def require(config: dict[str, Any], *keys: str) -> list[Any]:
    """The values of these keys; UsageError names the first that is missing."""
    for key in keys:
        if config.get(key) is None:
            raise UsageError(f"config.json has no {key!r}; a model of this family needs it")
    return [config[key] for key in keys]


def refuse(config: dict[str, Any], **allowed: Any) -> None:
    """UsageError when a key is present with another value than the one that is implemented."""
    for key, value in allowed.items():
        if key in config and config[key] not in (value, None):
            raise UsageError(f"config.json: {key} = {config[key]!r} is not implemented; only {value!r} is")


def refuse_sliding_window(config: dict[str, Any]) -> None:
    """UsageError when a Qwen config has layers with a sliding window.
    `sliding_window` alone is only a number there."""
    if config.get("use_sliding_window") or any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        raise UsageError(
            "config.json: sliding-window attention is in use (use_sliding_window, layer_types); not implemented"
        )


@dataclass(frozen=True)
class FeedForward:
    """What stands in the place of a dense MLP. transformer: for Megatron's configuration;
    parameters: those of a layer."""

    transformer: dict[str, Any]
    parameters: Callable[[int], list[Parameter]]


@dataclass(frozen=True)
class Variant:
    """Where a family differs from Llama.

    qkv_bias: biases on q, k and v; qk_norm: RMSNorm over each head's query and key
    activation: of the gate; norms: see PLAIN_NORMS; transformer: further arguments of Megatron's TransformerConfig
    feed_forward: None is the gated MLP; extra: further fields of the Family
    """

    qkv_bias: bool = False
    qk_norm: bool = False
    activation: Callable[[Tensor], Tensor] = F.silu
    norms: dict[str, str] = field(default_factory=lambda: PLAIN_NORMS)
    transformer: dict[str, Any] = field(default_factory=dict)
    feed_forward: FeedForward | None = None
    extra: dict[str, Any] = field(default_factory=dict)


def decoder(config: dict[str, Any], variant: Variant = Variant()) -> Family:
    """A decoder of `model.layers.N.{self_attn,mlp}` with separate q, k, v, gate and up projections in HF's layout.

    UsageError for what config.json lacks or asks for and is not implemented.
    """
    refuse(config, attention_dropout=0.0, quantization_config=None, partial_rotary_factor=1.0)
    layers, hidden, heads, vocab = require(
        config, "num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"
    )
    groups = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    if heads % groups:
        raise UsageError(f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {groups}")
    tied = bool(config.get("tie_word_embeddings", False))
    rope = rope_settings(config)
    feed_forward = variant.feed_forward or gated_mlp(config)

    parameters = [Parameter(EMBEDDING, (("model.embed_tokens.weight", (vocab, hidden)),), shard_dim=0, vocabulary=True)]
    for layer in range(layers):
        parameters += _attention(layer, hidden, heads, groups, head_dim, variant)
        parameters += [_norm(layer, name, hf, hidden) for name, hf in variant.norms.items()]
        parameters += feed_forward.parameters(layer)
    parameters.append(Parameter(FINAL_NORM, (("model.norm.weight", (hidden,)),)))
    if not tied:
        parameters.append(Parameter(HEAD, (("lm_head.weight", (vocab, hidden)),), shard_dim=0, vocabulary=True))

    return Family(
        architecture=config["architectures"][0],
        transformer=dict(
            num_layers=layers,
            hidden_size=hidden,
            num_attention_heads=heads,
            num_query_groups=groups,
            kv_channels=head_dim,
            layernorm_epsilon=config.get("rms_norm_eps", 1e-6),
            normalization="RMSNorm",
            gated_linear_unit=True,
            activation_func=variant.activation,
            add_bias_linear=False,
            add_qkv_bias=variant.qkv_bias,
            qk_layernorm=variant.qk_norm,
            **feed_forward.transformer,
            **variant.transformer,
        ),
        vocab_size=vocab,
        max_position_embeddings=config.get("max_position_embeddings") or 2048,
        tied_embeddings=tied,
        rope_theta=float(rope["rope_theta"]),
        inverse_frequencies=inverse_frequencies(head_dim, rope),
        parameters=tuple(parameters),
        **variant.extra,
    )


def gated_mlp(config: dict[str, Any]) -> FeedForward:
    hidden, ffn = require(config, "hidden_size", "intermediate_size")

    def parameters(layer: int) -> list[Parameter]:
        hf, megatron = f"model.layers.{layer}.mlp.", f"decoder.layers.{layer}.mlp."
        gate_and_up = tuple((f"{hf}{x}_proj.weight", (ffn, hidden)) for x in ("gate", "up"))
        down = ((f"{hf}down_proj.weight", (hidden, ffn)),)
        return [
            Parameter(f"{megatron}linear_fc1.weight", gate_and_up, layer, 0, "stack"),
            Parameter(f"{megatron}linear_fc2.weight", down, layer, 1),
        ]

    return FeedForward(dict(ffn_hidden_size=ffn), parameters)


def _norm(layer: int, name: str, hf_name: str, size: int) -> Parameter:
    return Parameter(f"decoder.layers.{layer}.{name}", ((f"model.layers.{layer}.{hf_name}", (size,)),), layer)


def _attention(layer: int, hidden: int, heads: int, groups: int, head_dim: int, variant: Variant) -> list[Parameter]:
    hf, megatron = f"model.layers.{layer}.self_attn.", f"decoder.layers.{layer}.self_attention."
    rows = {"q": heads * head_dim, "k": groups * head_dim, "v": groups * head_dim}

    def qkv(kind: str, *columns: int) -> Parameter:
        tensors = tuple((f"{hf}{x}_proj.{kind}", (rows[x], *columns)) for x in rows)
        return Parameter(
            f"{megatron}linear_qkv.{kind}", tensors, layer, 0, "qkv", query_groups=groups, head_dim=head_dim
        )

    parameters = [qkv("weight", hidden)]
    if variant.qkv_bias:
        parameters.append(qkv("bias"))
    if variant.qk_norm:
        parameters += [
            _norm(layer, f"self_attention.{x}_layernorm.weight", f"self_attn.{x}_norm.weight", head_dim) for x in "qk"
        ]
    out = ((f"{hf}o_proj.weight", (hidden, rows["q"])),)
    return [*parameters, Parameter(f"{megatron}linear_proj.weight", out, layer, 1)]
