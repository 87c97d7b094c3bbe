"""What the dense decoder families (Llama and its kin) share: RMSNorm, rotary positions, grouped queries, SwiGLU."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from rltool.errors import UsageError
from rltool.models.base import EMBEDDING, FINAL_NORM, HEAD, Family, Parameter
from rltool.models.rope import inverse_frequencies, rope_settings


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


def dense_decoder(config: dict[str, Any], *, qkv_bias: bool) -> Family:
    """A decoder of `model.layers.N.{self_attn,mlp}` with separate q, k, v, gate and up projections in HF's layout."""
    refuse(config, hidden_act="silu", attention_dropout=0.0, quantization_config=None, partial_rotary_factor=1.0)
    layers, hidden, ffn, heads, vocab = require(
        config, "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"
    )
    groups = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    if heads % groups:
        raise UsageError(
            f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {groups}"
        )
    tied = bool(config.get("tie_word_embeddings", False))
    rope = rope_settings(config)

    parameters = [Parameter(EMBEDDING, (("model.embed_tokens.weight", (vocab, hidden)),), shard_dim=0, vocabulary=True)]
    for layer in range(layers):
        parameters += _layer(layer, hidden, ffn, heads, groups, head_dim, qkv_bias)
    parameters.append(Parameter(FINAL_NORM, (("model.norm.weight", (hidden,)),)))
    if not tied:
        parameters.append(Parameter(HEAD, (("lm_head.weight", (vocab, hidden)),), shard_dim=0, vocabulary=True))

    return Family(
        architecture=config["architectures"][0],
        transformer=dict(
            num_layers=layers,
            hidden_size=hidden,
            ffn_hidden_size=ffn,
            num_attention_heads=heads,
            num_query_groups=groups,
            kv_channels=head_dim,
            layernorm_epsilon=config.get("rms_norm_eps", 1e-6),
            normalization="RMSNorm",
            gated_linear_unit=True,
            activation_func=F.silu,
            add_bias_linear=False,
            add_qkv_bias=qkv_bias,
        ),
        vocab_size=vocab,
        max_position_embeddings=config.get("max_position_embeddings") or 2048,
        tied_embeddings=tied,
        rope_theta=float(rope["rope_theta"]),
        inverse_frequencies=inverse_frequencies(head_dim, rope),
        parameters=tuple(parameters),
    )


def _layer(
    layer: int, hidden: int, ffn: int, heads: int, groups: int, head_dim: int, qkv_bias: bool
) -> list[Parameter]:
    hf, megatron = f"model.layers.{layer}.", f"decoder.layers.{layer}."
    rows = {"q": heads * head_dim, "k": groups * head_dim, "v": groups * head_dim}

    def plain(name: str, hf_name: str, shape: tuple[int, ...], shard_dim: int | None = None) -> Parameter:
        return Parameter(megatron + name, ((hf + hf_name, shape),), layer, shard_dim)

    def qkv(kind: str, *columns: int) -> Parameter:
        tensors = tuple((f"{hf}self_attn.{x}_proj.{kind}", (rows[x], *columns)) for x in rows)
        name = f"{megatron}self_attention.linear_qkv.{kind}"
        return Parameter(name, tensors, layer, 0, "qkv", query_groups=groups, head_dim=head_dim)

    gate_and_up = tuple((f"{hf}mlp.{x}_proj.weight", (ffn, hidden)) for x in ("gate", "up"))
    return [
        plain("input_layernorm.weight", "input_layernorm.weight", (hidden,)),
        qkv("weight", hidden),
        *([qkv("bias")] if qkv_bias else []),
        plain("self_attention.linear_proj.weight", "self_attn.o_proj.weight", (hidden, rows["q"]), shard_dim=1),
        plain("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", (hidden,)),
        Parameter(megatron + "mlp.linear_fc1.weight", gate_and_up, layer, 0, "stack"),
        plain("mlp.linear_fc2.weight", "mlp.down_proj.weight", (hidden, ffn), shard_dim=1),
    ]
