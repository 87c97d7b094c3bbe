"""Logits of a model that never is in memory whole: each layer's weights are read before it runs and dropped after."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from rltool.megatron.model import build_model, forward, global_names, rotary_positions
from rltool.megatron.output_head import capped
from rltool.megatron.packing import pack
from rltool.megatron.runtime import Runtime
from rltool.models.base import EMBEDDING, Family, Parameter
from rltool.models.hf_directory import HFTensors
from rltool.models.quantized import unquantized
from rltool.models.registry import read_hf_config

Read = Callable[[Parameter], Tensor]
"""The merged tensor of a parameter."""
UNDER_ANOTHER_NAME = {"kimi_k2": "deepseek_v3"}
"""model_type of config.json that transformers does not know -> the one of the same model that it does."""


@torch.no_grad()
def megatron_logits(family: Family, runtime: Runtime, read: Read, tokens: Tensor, lengths: Tensor) -> Tensor:
    """[T, vocabulary] fp32 by Megatron, for packed sequences."""
    with runtime.mode(), _parameters_without_memory():
        model = build_model(family, runtime.coordinates, torch.float32, torch.device("meta"))
        # Called like Megatron's class, without being one.
        model.rotary_pos_emb = rotary_positions(family, runtime.device)  # pyright: ignore[reportAttributeAccessIssue]
    names = {id(parameter): name for name, parameter in global_names(model).items()}
    wanted = {
        (module, leaf): family.parameter(names[id(parameter)])
        for module in model.modules()
        for leaf, parameter in module._parameters.items()
        if parameter is not None
    }

    def fill(module: nn.Module) -> None:
        for part in module.modules():
            for leaf in part._parameters:
                if (part, leaf) in wanted:
                    _replace(part, leaf, read(wanted[part, leaf]).float())

    layers = [model.embedding, *model.decoder.layers, model.decoder.final_layernorm]
    _in_turn(cast("list[nn.Module]", layers), fill, _drop)
    if family.tied_embeddings:
        # Megatron passes the embedding's parameter, which has no memory by then.
        embedding = family.parameter(EMBEDDING)
        model.output_layer.register_forward_pre_hook(
            lambda module, inputs, options: (inputs, {**options, "weight": read(embedding).float()}), with_kwargs=True
        )
    else:
        _in_turn([model.output_layer], fill, _drop)
    with runtime.mode():
        logits = forward(model, tokens, pack(lengths, runtime.device))[:, : family.vocab_size]
    return capped(logits, family.logit_softcap)


@torch.no_grad()
def transformers_logits(family: Family, directory: Path, dtype: torch.dtype, tokens: Tensor, lengths: Tensor) -> Tensor:
    """[T, vocabulary] fp32 by transformers, sequence by sequence,
    for the weights of `directory` rounded to `dtype` first."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    # Not left out: without the word transformers asks on the terminal whether code of the directory may run.
    config = read_hf_config(directory)
    if (known := UNDER_ANOTHER_NAME.get(config.get("model_type", ""))) is not None:
        settings = {key: value for key, value in config.items() if key not in ("model_type", "auto_map")}
        config = AutoConfig.for_model(known, **unquantized(settings))
    else:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    # transformers' "sdpa" refuses sinks, and leaves scores uncapped without a word.
    attend = "eager" if family.attention.sinks or family.attention.softcap is not None else "sdpa"
    # Of Qwen3-VL transformers has no language model with its head but in the whole, whose tower does not run on text.
    alone = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    with _parameters_without_memory():
        model = (AutoModelForCausalLM if alone else AutoModelForImageTextToText).from_config(
            config, dtype=torch.float32, attn_implementation=attend, trust_remote_code=False
        ).eval()
    owners = {module: name for name, module in model.named_modules()}

    with HFTensors(directory) as tensors:

        def fill(module: nn.Module) -> None:
            for name, parameter in list(module.named_parameters()):
                holder = module.get_submodule(name.rpartition(".")[0])
                outputs_first = getattr(holder, "is_transposed", None) is False
                value = _hf_parameter(f"{owners[module]}.{name}", family, tensors, dtype, outputs_first=outputs_first)
                if value.shape != parameter.shape:
                    raise RuntimeError(f"{name}: {tuple(value.shape)} for transformers' {tuple(parameter.shape)}")
                _replace(module, name, value.to(dtype).float())
            for name, buffer in module.named_buffers():
                full = family.prefix + f"{owners[module]}.{name}".removeprefix("model." if alone else family.prefix)
                if full in tensors.names:  # a router's correction bias
                    buffer.copy_(tensors.read(full))

        inner = model.model if alone else model.model.language_model
        _in_turn([inner.embed_tokens, *inner.layers, inner.norm, model.lm_head], fill, _drop)
        rows = [
            model(input_ids=sequence[None], use_cache=False).logits[0] for sequence in tokens.split(lengths.tolist())
        ]
    return torch.cat(rows)


def _hf_parameter(
    name: str, family: Family, tensors: HFTensors, dtype: torch.dtype, *, outputs_first: bool
) -> Tensor:
    """What transformers calls `name`: a tensor of the file, or the experts of a layer, which it keeps in one tensor;
    outputs_first: as [experts, outputs, inputs], also where the file has one that lies otherwise (Qwen3-VL)."""
    if name == "lm_head.weight" and family.tied_embeddings:
        name = "model.embed_tokens.weight"
    # Of transformers' text model, also where the file has a tower beside it.
    if name.startswith("model.") and not name.startswith(family.prefix):
        name = family.prefix + name.removeprefix("model.")
    if name in tensors.names and not outputs_first:
        return tensors.read(name)
    _, layer, *rest = name.removeprefix(family.prefix).split(".")
    mlp = f"decoder.layers.{layer}.mlp."
    if rest == ["mlp", "gate", "weight"]:
        return tensors.merged(family.parameter(f"{mlp}router.weight"))
    part = {"gate_up_proj": "linear_fc1", "down_proj": "linear_fc2"}[rest[-1]]
    experts = [family.parameter(f"{mlp}experts.local_experts.{e}.{part}.weight") for e in range(family.num_experts)]
    return torch.stack([tensors.merged(parameter).to(dtype) for parameter in experts])


def _in_turn(modules: list[nn.Module], fill: Callable[[nn.Module], None], drop: Callable[[nn.Module], None]) -> None:
    """Calls `fill` before and `drop` after each module runs."""
    for module in modules:
        module.register_forward_pre_hook(lambda module, *_: fill(module))
        module.register_forward_hook(lambda module, *_: drop(module))


def _drop(module: nn.Module) -> None:
    for name, parameter in list(module.named_parameters()):
        _replace(module, name, parameter.to("meta"))


def _replace(module: nn.Module, name: str, value: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    module.get_submodule(path)._parameters[leaf] = nn.Parameter(value, requires_grad=False)


@contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Modules built inside have their parameters on the meta device, while their buffers (rope) are real."""
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: Any) -> None:
        if parameter is not None:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
        original(module, name, parameter)

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]
