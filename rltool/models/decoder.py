"""What the decoder families share: RMSNorm, rotary positions, grouped queries, gated MLP.
A family states its differences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from rltool.errors import UsageError
from rltool.models.base import EMBEDDING, FINAL_NORM, HEAD, Attention, DeltaNet, Family, Interleaved, Parameter
from rltool.models.quantized import is_fp8
from rltool.models.rope import rope_settings, rotary

BEFORE_ATTENTION, BEFORE_MLP = "input_layernorm.weight", "pre_mlp_layernorm.weight"
AFTER_ATTENTION, AFTER_MLP = "self_attention.linear_proj.post_norm.weight", "mlp.linear_fc2.post_norm.weight"
"""Megatron's names of the norms over the hidden size, within a layer."""
PLAIN_NORMS = {BEFORE_ATTENTION: "input_layernorm.weight", BEFORE_MLP: "post_attention_layernorm.weight"}
"""Megatron's name -> HF's name."""


PREFIX = "model."
"""How the names of HF tensors begin, but for the head's."""


def renamed(family: Family, prefix: str) -> Family:
    """The same with another beginning of the names of HF tensors."""

    def moved(parameter: Parameter) -> Parameter:
        names = (
            (prefix + name.removeprefix(PREFIX) if name.startswith(PREFIX) else name, shape)
            for name, shape in parameter.hf
        )
        return replace(parameter, hf=tuple(names))

    return replace(family, prefix=prefix, parameters=tuple(moved(parameter) for parameter in family.parameters))


TOWER = "model.visual."
"""How the names of a vision tower's tensors begin."""
OF_THE_WHOLE = "architectures", "tie_word_embeddings", "quantization_config"
"""Keys of config.json that stand beside `text_config`."""


def text_of(config: dict[str, Any]) -> dict[str, Any]:
    """What config.json says of the language model."""
    if not isinstance(config.get("text_config"), dict):
        return config
    return config["text_config"] | {key: config[key] for key in OF_THE_WHOLE if key in config}


def beside_tower(family: Family) -> Family:
    """The same in a checkpoint that has a vision tower, whose tensors are carried."""
    return replace(renamed(family, "model.language_model."), carried=(*family.carried, TOWER))


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


def delta_net(config: dict[str, Any]) -> DeltaNet:
    """By `layer_types`, or by `full_attention_interval`, and transformers' `linear_*` keys."""
    layers, every = config["num_hidden_layers"], config.get("full_attention_interval") or 4
    kinds = config.get("layer_types") or [
        "full_attention" if (layer + 1) % every == 0 else "linear_attention" for layer in range(layers)
    ]
    if len(kinds) != layers or not set(kinds) <= {"linear_attention", "full_attention"}:
        raise UsageError(f"config.json: layer_types must name linear_attention or full_attention for {layers} layers")
    names = "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim"
    found = DeltaNet(tuple(kind == "linear_attention" for kind in kinds), *(config[f"linear_{x}"] for x in names))
    if found.value_heads % found.key_heads:
        raise UsageError(
            f"config.json: linear_num_value_heads {found.value_heads} is not a multiple of linear_num_key_heads "
            f"{found.key_heads}"
        )
    return found


def windows(config: dict[str, Any], full_every: int) -> tuple[int | None, ...]:
    """`Attention.windows` by `layer_types` and `sliding_window`; without the former each `full_every`-th layer has
    none."""
    layers, window = require(config, "num_hidden_layers", "sliding_window")
    kinds = config.get("layer_types") or [
        "sliding_attention" if (layer + 1) % full_every else "full_attention" for layer in range(layers)
    ]
    if len(kinds) != layers or not set(kinds) <= {"sliding_attention", "full_attention"}:
        raise UsageError(f"config.json: layer_types must name sliding_attention or full_attention for {layers} layers")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


@dataclass(frozen=True)
class Part:
    """Attention, or what stands in the place of a dense MLP. transformer: for Megatron's configuration;
    parameters: those of a layer."""

    transformer: dict[str, Any]
    parameters: Callable[[int], list[Parameter]]


@dataclass(frozen=True)
class Variant:
    """Where a family differs from Llama.

    qkv_bias: biases on q, k and v; bias: on attention's output, on the router and in experts
    qk_norm: RMSNorm over each head's query and key (`Attention.norm_whole`: over all)
    fused_qkv, fused_gate_up: HF's name, within a layer, of one tensor for these; None: each has its own
    fused_delta: the products of a gated delta net are two tensors whose rows are sorted by key heads
    attention: see `Attention`; partial_rotary: part of a head that rotary positions turn where config.json names none;
    None: all of it, another one is refused; interleaved: they turn pairs of neighbours
    activation: of the gate; norms: see PLAIN_NORMS, of which some may be missing; feed_forward: None is the gated MLP
    transformer: further arguments of Megatron's TransformerConfig; extra: further fields of the Family
    """

    qkv_bias: bool = False
    bias: bool = False
    qk_norm: bool = False
    fused_qkv: str | None = None
    fused_gate_up: str | None = None
    fused_delta: bool = False
    attention: Attention = field(default_factory=Attention)
    partial_rotary: float | None = None
    interleaved: bool = False
    activation: Callable[[Tensor], Tensor] = F.silu
    norms: dict[str, str] = field(default_factory=lambda: PLAIN_NORMS)
    feed_forward: Part | None = None
    transformer: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


def decoder(config: dict[str, Any], variant: Variant = Variant()) -> Family:
    """A decoder of `model.layers.N.{self_attn,mlp}` in HF's layout.

    UsageError for what config.json lacks or asks for and is not implemented.
    """
    refuse(config, attention_dropout=0.0)
    if not is_fp8(config):
        refuse(config, quantization_config=None)
    layers, hidden, heads, vocab = require(
        config, "num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"
    )
    tied = bool(config.get("tie_word_embeddings", False))
    if variant.bias and variant.feed_forward is None:
        raise ValueError("Variant.bias names no biases of a dense MLP: give a feed_forward whose parameters have them")
    attention = _latent(config, variant) if variant.attention.latent else _grouped(config, variant)
    if variant.attention.delta is not None:
        attention = _with_delta_nets(attention, config, variant)
    feed_forward = variant.feed_forward or gated_mlp(config, fused=variant.fused_gate_up)

    parameters = [Parameter(EMBEDDING, (("model.embed_tokens.weight", (vocab, hidden)),), shard_dim=0, vocabulary=True)]
    for layer in range(layers):
        parameters += attention.parameters(layer)
        parameters += [_norm(layer, name, hf, hidden) for name, hf in variant.norms.items()]
        parameters += feed_forward.parameters(layer)
    parameters.append(Parameter(FINAL_NORM, (("model.norm.weight", (hidden,)),)))
    if not tied:
        parameters.append(Parameter(HEAD, (("lm_head.weight", (vocab, hidden)),), shard_dim=0, vocabulary=True))
    # The larger dtype first: weights are sent in buckets of one dtype, and safetensors files want it so.
    parameters.sort(key=lambda parameter: not parameter.keeps_fp32)
    before, after = BEFORE_ATTENTION in variant.norms, AFTER_ATTENTION in variant.norms

    family = Family(
        architecture=config["architectures"][0],
        transformer=dict(
            num_layers=layers,
            hidden_size=hidden,
            num_attention_heads=heads,
            layernorm_epsilon=config.get("rms_norm_eps", 1e-6),
            normalization="RMSNorm",
            gated_linear_unit=True,
            activation_func=variant.activation,
            add_bias_linear=variant.bias,
            add_qkv_bias=variant.qkv_bias,
            qk_layernorm=variant.qk_norm,
            **attention.transformer,
            **feed_forward.transformer,
            **variant.transformer,
        ),
        vocab_size=vocab,
        max_position_embeddings=config.get("max_position_embeddings") or 2048,
        tied_embeddings=tied,
        rotary=rotary(_rotary_size(config, variant, attention.transformer["kv_channels"]), config),
        parameters=tuple(parameters),
        attention=variant.attention,
        norms=("sandwich" if after else "pre") if before else "post",
    )
    return replace(family, **variant.extra)


def _rotary_size(config: dict[str, Any], variant: Variant, head_dim: int) -> int:
    latent = variant.attention.latent
    if latent is not None:
        return latent.rotary
    part = rope_settings(config).get("partial_rotary_factor") or config.get("partial_rotary_factor")
    if variant.partial_rotary is None and part not in (None, 1):
        raise UsageError(f"config.json: partial_rotary_factor = {part!r} is not implemented for this family; only 1 is")
    return int(head_dim * (part or variant.partial_rotary or 1))


def gated_mlp(config: dict[str, Any], *, fused: str | None = None) -> Part:
    """fused: `Variant.fused_gate_up`."""
    hidden, ffn = require(config, "hidden_size", "intermediate_size")

    def parameters(layer: int) -> list[Parameter]:
        hf, megatron = f"model.layers.{layer}.", f"decoder.layers.{layer}.mlp."
        gate_and_up, parts = tuple((f"{hf}mlp.{x}_proj.weight", (ffn, hidden)) for x in ("gate", "up")), ()
        if fused is not None:
            gate_and_up, parts = ((f"{hf}{fused}.weight", (2 * ffn, hidden)),), (ffn, ffn)
        down = ((f"{hf}mlp.down_proj.weight", (hidden, ffn)),)
        return [
            Parameter(f"{megatron}linear_fc1.weight", gate_and_up, layer, 0, "stack", parts=parts),
            Parameter(f"{megatron}linear_fc2.weight", down, layer, 1),
        ]

    return Part(dict(ffn_hidden_size=ffn), parameters)


def _norm(layer: int, name: str, hf_name: str, size: int, **more: Any) -> Parameter:
    return Parameter(f"decoder.layers.{layer}.{name}", ((f"model.layers.{layer}.{hf_name}", (size,)),), layer, **more)


def _grouped(config: dict[str, Any], variant: Variant) -> Part:
    """Attention with grouped queries."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    if heads % groups:
        raise UsageError(f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {groups}")
    rows = {"q": heads * head_dim, "k": groups * head_dim, "v": groups * head_dim}
    width = rows["q"]
    if variant.attention.gated:
        rows["q"] *= 2  # of each head its query, then its gate
    turned = Interleaved(head_dim, 0, _rotary_size(config, variant, head_dim)) if variant.interleaved else None

    def qkv(layer: int, kind: str, *columns: int) -> Parameter:
        hf, parts = f"model.layers.{layer}.", ()
        tensors = tuple((f"{hf}self_attn.{x}_proj.{kind}", (rows[x], *columns)) for x in rows)
        if variant.fused_qkv is not None:
            parts = tuple(rows.values())
            tensors = ((f"{hf}{variant.fused_qkv}.{kind}", (sum(parts), *columns)),)
        return Parameter(
            f"decoder.layers.{layer}.self_attention.linear_qkv.{kind}", tensors, layer, 0, "qkv", query_groups=groups,
            head_dim=head_dim, parts=parts, interleaved=(turned, turned, None) if turned else (),
        )  # fmt: skip

    def parameters(layer: int) -> list[Parameter]:
        result = [qkv(layer, "weight", hidden)]
        if variant.qkv_bias:
            result.append(qkv(layer, "bias"))
        if variant.qk_norm:
            whole = variant.attention.norm_whole
            result += [
                _norm(
                    layer, f"self_attention.{x}_layernorm.weight", f"self_attn.{x}_norm.weight",
                    rows[x] if whole else head_dim, shard_dim=0 if whole else None,
                )
                for x in "qk"
            ]  # fmt: skip
        hf, megatron = f"model.layers.{layer}.self_attn.", f"decoder.layers.{layer}.self_attention."
        if variant.attention.sinks:
            sinks = ((f"{hf}sinks", (heads,)),)
            result.append(Parameter(f"{megatron}core_attention.sinks", sinks, layer, 0))
        out = ((f"{hf}o_proj.weight", (hidden, width)),)
        result.append(Parameter(f"{megatron}linear_proj.weight", out, layer, 1))
        if variant.bias:
            result.append(Parameter(f"{megatron}linear_proj.bias", ((f"{hf}o_proj.bias", (hidden,)),), layer))
        return result

    return Part(dict(num_query_groups=groups, kv_channels=head_dim), parameters)


def _with_delta_nets(attention: Part, config: dict[str, Any], variant: Variant) -> Part:
    """Gated delta nets in some layers, `attention` in the others. Rows of the two products are sorted by key heads:
    of each its query, its key, its values and their gates; how much its values write, and how fast its states decay."""
    hidden, delta = config["hidden_size"], variant.attention.delta
    assert delta is not None
    heads, keys, values = delta.value_heads, delta.key_heads * delta.key, delta.value_heads * delta.value

    def parameters(layer: int) -> list[Parameter]:
        if not delta.layers[layer]:
            return attention.parameters(layer)
        hf, megatron = f"model.layers.{layer}.linear_attn.", f"decoder.layers.{layer}.self_attention."

        def plain(name: str, hf_name: str, shape: tuple[int, ...], cut: int | None) -> Parameter:
            return Parameter(f"{megatron}{name}", ((f"{hf}{hf_name}", shape),), layer, cut)

        def by_heads(name: str, tensors: dict[str, int], *columns: int, parts: tuple[int, ...] = ()) -> Parameter:
            found = tuple((f"{hf}{x}.weight", (rows, *columns)) for x, rows in tensors.items())
            return Parameter(
                f"{megatron}{name}.weight", found, layer, 0, "qkv", query_groups=delta.key_heads, parts=parts
            )

        if variant.fused_delta:
            products = [
                plain(f"{name}.weight", f"{name}.weight", (rows, hidden), 0)
                for name, rows in (("in_proj_qkvz", delta.channels + values), ("in_proj_ba", 2 * heads))
            ]
        else:
            both = {"in_proj_qkv": delta.channels, "in_proj_z": values}
            products = [
                by_heads("in_proj_qkvz", both, hidden, parts=(keys, keys, values, values)),
                by_heads("in_proj_ba", {"in_proj_b": heads, "in_proj_a": heads}, hidden),
            ]
        return [
            *products,
            by_heads("conv1d", {"conv1d": delta.channels}, 1, delta.kernel, parts=(keys, keys, values)),
            plain("dt_bias", "dt_bias", (heads,), 0),
            plain("A_log", "A_log", (heads,), 0),
            plain("out_norm.weight", "norm.weight", (delta.value,), None),
            plain("out_proj.weight", "out_proj.weight", (hidden, values), 1),
        ]

    return Part(attention.transformer, parameters)


def _latent(config: dict[str, Any], variant: Variant) -> Part:
    """Multi-head latent attention."""
    hidden, heads, latent = config["hidden_size"], config["num_attention_heads"], variant.attention.latent
    assert latent is not None

    def turned(period: int) -> tuple[Interleaved | None, ...]:
        return (Interleaved(period, period - latent.rotary, latent.rotary),) if variant.interleaved else ()

    def parameters(layer: int) -> list[Parameter]:
        def product(name: str, hf: str, shape: tuple[int, int], cut: int | None = None, **more: Any) -> Parameter:
            tensor = (f"model.layers.{layer}.self_attn.{hf}.weight", shape)
            return Parameter(f"decoder.layers.{layer}.self_attention.{name}.weight", (tensor,), layer, cut, **more)

        def norm(name: str, hf: str, size: int) -> Parameter:
            return _norm(layer, f"self_attention.{name}.weight", f"self_attn.{hf}.weight", size)

        query = (heads * latent.head, latent.query_rank or hidden)
        queries = [product("linear_q_proj", "q_proj", query, 0, interleaved=turned(latent.head))]
        if latent.query_rank is not None:
            queries = [
                product("linear_q_down_proj", "q_a_proj", (latent.query_rank, hidden)),
                norm("q_layernorm", "q_a_layernorm", latent.query_rank),
                product("linear_q_up_proj", "q_b_proj", query, 0, interleaved=turned(latent.head)),
            ]
        down, parts = latent.rank + latent.rotary, (latent.plain, latent.value)
        return [
            *queries,
            product("linear_kv_down_proj", "kv_a_proj_with_mqa", (down, hidden), interleaved=turned(down)),
            norm("kv_layernorm", "kv_a_layernorm", latent.rank),
            product("linear_kv_up_proj", "kv_b_proj", (heads * sum(parts), latent.rank), 0, latent=parts),
            product("linear_proj", "o_proj", (hidden, heads * latent.value), 1),
        ]

    return Part(dict(num_query_groups=heads, kv_channels=latent.head), parameters)
