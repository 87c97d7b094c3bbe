"""vLLM's layerwise reload, with what it lacks: abandoning an unfinished one, a check that all has arrived, gpt-oss,
and, on the CPU, tied embeddings and mixtures of experts.

During a reload a layer's parameters stand on the meta device until all of its tensors have come; then they are
processed and copied into the old storage (vllm/model_executor/model_loader/reload/layerwise.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Any, cast
from weakref import WeakKeyDictionary, WeakSet

import torch
from vllm.config import LoadConfig, ModelConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader import DefaultModelLoader, get_model_loader
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel
from vllm.model_executor.models import supports_multimodal
from vllm.model_executor.models.gpt_oss import GptOssForCausalLM, OAIAttention
from vllm.platforms import current_platform

from rltool.engines.plugin.replay import NotACopy
from rltool.engines.transfer import fp8

_KERNELS: WeakKeyDictionary[torch.nn.Module, Any] = WeakKeyDictionary()
"""Experts on the CPU during a reload -> the kernel that they had before it."""

_SINKS: WeakSet[torch.nn.Module] = WeakSet()
"""Layers whose attention sinks have not come yet."""
_OF_ALL_EXPERTS = re.compile(r"(.+\.mlp\.experts)\.((?:gate_up|down)_proj(?:_bias)?)")
"""gpt-oss's names of tensors that hold all experts of a layer."""

COPIED_AS_THEY_ARE = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
"""Kinds of layers whose parameters, on a GPU, are the checkpoint's tensors, merged and cut but not changed."""
PLAIN_EXPERTS = (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON)
"""Kernels of experts that read such parameters, too. Others swap, pad or shuffle them
(convert_to_unquantized_kernel_format), and only once."""


def begin_reload(model: torch.nn.Module, *, with_tower: bool = False) -> None:
    """Start anew, whatever an earlier update left behind. with_tower: tensors of a vision tower will come, too; a
    trainer sends none, for it keeps the tower as it is."""
    abandon_reload(model)
    initialize_layerwise_reload(model)
    if not with_tower:
        _leave_tower_in_place(model)
    _leave_sinks_in_place(model)
    _set_expert_kernels_aside(model)


def as_taken(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor under the names under which the model's loader takes it in a reload.

    vLLM 0.32's gpt-oss writes a tensor of all experts straight into its parameter, which stands on the meta device: no
    error, and nothing is loaded. Expert by expert it goes through the loaders that the reload has wrapped.
    """
    if not isinstance(model, GptOssForCausalLM):
        yield name, tensor
    elif found := _OF_ALL_EXPERTS.fullmatch(name):
        block, kind = found.groups()
        yield from ((f"{block}.{expert}.{kind}", part) for expert, part in enumerate(tensor))
    else:
        if name.endswith(".self_attn.sinks"):
            _SINKS.discard(model.get_submodule(name.replace(".self_attn.sinks", ".attn")))
        yield name, tensor


def _leave_tower_in_place(model: torch.nn.Module) -> None:
    if not supports_multimodal(cast(Any, model)):
        return
    names = cast(Any, model).get_mm_mapping()
    towers = (*names.tower_model, *names.connector)
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if f"{name}.".startswith(towers) and info.can_load():
            _place_kernel_tensors(layer, info)
            info.reset()


def _leave_sinks_in_place(model: torch.nn.Module) -> None:
    """Attention sinks are written straight into their parameter, too: that of the running engine, then."""
    for layer in model.modules():
        if isinstance(layer, OAIAttention):
            _place_kernel_tensors(layer, info := get_layerwise_info(layer))
            info.reset()
            _SINKS.add(layer)


def _renew_copies_of_sinks(model: torch.nn.Module) -> None:
    """Of attention kernels that have one in another dtype."""
    for layer in model.modules():
        if isinstance(layer, OAIAttention) and (held := cast(Any, layer).attn.impl.sinks) is not layer.sinks:
            held.copy_(layer.sinks)


@torch.no_grad()
def abandon_reload(model: torch.nn.Module) -> None:
    """Give every layer that waits for tensors its old weights back; layers that are complete keep the new ones.
    Idempotent.

    Without it the engine would run on meta tensors, and the next update would count the tensors of the failed one.
    """
    for layer in model.modules():
        info = get_layerwise_info(layer)
        _SINKS.discard(layer)
        kernel = _KERNELS.pop(layer, None)
        if info.can_load() and info.kernel_tensors is not None:
            _place_kernel_tensors(layer, info)
            info.reset()
            if kernel is not None:
                cast(Any, layer).quant_method.moe_kernel = kernel
    if hasattr(model, "_original_do_torchao_reload"):
        model._do_torchao_reload = model._original_do_torchao_reload


def missing_layers(model: torch.nn.Module) -> list[str]:
    """Layers that have not got all elements of their parameters, as "name (received of expected)". Call before
    finishing."""
    tied = _tied_head(model)
    missing = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if not info.can_load() or is_deferred_attention_layer(layer) or layer is tied:
            continue
        expected = sum(
            _checkpoint_elements(layer, parameter)
            for parameter_name, parameter in layer.named_parameters(recurse=False)
            if parameter_name not in SKIP_LOAD_TENSORS
        )
        if info.load_numel < expected:
            missing.append(f"{name} ({info.load_numel} of {expected} elements)")
    return missing + [f"{name}.sinks" for name, layer in model.named_modules() if layer in _SINKS]


def finish_reload(model: torch.nn.Module, model_config: Any) -> None:
    finalize_layerwise_reload(model, model_config)
    _renew_copies_of_sinks(model)
    _KERNELS.clear()
    _mend_tied_head(model)


def reload_checkpoint(model: torch.nn.Module, vllm_config: Any) -> list[str]:
    """Load the checkpoint that the engine started from again. Returns missing_layers: with any, and after an error,
    the layers that are not complete have their weights of before.

    In place of vLLM's reload_weights (model_loader/reload/inplace.py), which knows nothing of what this module adds: a
    tied head on the CPU keeps the matrix of before, and gpt-oss takes none of its experts' tensors, without an error.
    """
    loader = get_model_loader(vllm_config.load_config)
    if not hasattr(loader, "get_all_weights"):
        raise NotImplementedError(f"weights of load_format {vllm_config.load_config.load_format} cannot be reloaded")
    with set_current_vllm_config(vllm_config):
        begin_reload(model, with_tower=True)
        try:
            tensors = cast(Any, loader).get_all_weights(vllm_config.model_config, model)
            cast(Any, model).load_weights(taken for name, tensor in tensors for taken in as_taken(model, name, tensor))
            if not (missing := missing_layers(model)):
                finish_reload(model, vllm_config.model_config)
        finally:
            abandon_reload(model)  # of layers that are complete there is nothing to abandon
    return missing


class Fp8Loader(DefaultModelLoader):
    """Reads the model's files, and quantises the matrices of which quantization_config does not say otherwise."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(replace(load_config, load_format="auto"))
        if current_platform.is_cpu() and torch.cpu._is_amx_tile_supported():
            # Else oneDNN asks the system for AMX at its first product, and vLLM's attention does not ask: if only short
            # sequences came before, for which FP8 has other kernels, it ends with an illegal instruction.
            torch.cpu._init_amx()

    def get_all_weights(
        self, model_config: ModelConfig, model: torch.nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        kept = set(model_config.hf_config.quantization_config["modules_to_not_convert"])
        # Not torch's default device, which is the CPU here (load_model in base_loader.py): there every engine of a host
        # quantises with as many threads as the host has cores.
        device = torch.device(current_platform.device_type)
        for name, tensor in super().get_all_weights(model_config, model):
            if tensor.dim() != 2 or name.removesuffix(".weight") in kept:
                yield name, tensor
                continue
            values, scale = fp8.quantized(tensor.to(device).bfloat16())
            yield name, values
            yield name + fp8.SCALE, scale


def hold_back(model: torch.nn.Module) -> None:
    """In a reload that will be abandoned: no layer is ever complete, and so none is loaded or processed."""
    for layer in model.modules():
        if (info := get_layerwise_info(layer)).can_load():
            cast(Any, info).load_numel = -math.inf


def waiting(model: torch.nn.Module) -> list[torch.Tensor]:
    """Tensors that were handed to loaders of layers which have not got all of theirs."""
    infos = [info for layer in model.modules() if (info := get_layerwise_info(layer)).can_load()]
    given = (value for info in infos for _, args in info.loaded_weights for value in args.arguments.values())
    return [value for value in given if isinstance(value, torch.Tensor)]


def waits(layer: torch.nn.Module) -> bool:
    """Whether the layer has not got all of its tensors, and stands on the meta device."""
    return get_layerwise_info(layer).can_load()


def kernel_parameters(layer: torch.nn.Module) -> list[torch.Tensor]:
    """The parameters that the engine computes with, also while the layer waits."""
    info = get_layerwise_info(layer)
    if info.can_load() and info.kernel_tensors is not None:
        return list(info.kernel_tensors[0].values())
    return list(layer.parameters(recurse=False))


def check_copied(model: torch.nn.Module) -> None:
    """NotACopy for a model with a layer that does not keep the checkpoint's tensors as they are."""
    for name, layer in model.named_modules():
        if any(parameter.device.type == "cpu" for parameter in layer.parameters(recurse=False)):
            raise NotACopy(f"{name} lies on the CPU")
        method = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod) and method.unquantized_backend in PLAIN_EXPERTS:
            continue
        if method is not None and type(method) not in COPIED_AS_THEY_ARE:
            raise NotACopy(f"{name} is processed after loading ({type(method).__name__})")


def derive(model: torch.nn.Module, model_config: Any) -> None:
    """What vLLM makes of weights once they are loaded (finalize_layerwise_processing): for attention layers alone."""
    for layer in model.modules():
        if is_deferred_attention_layer(layer):
            cast(Any, layer).process_weights_after_loading(model_config.dtype)
    _renew_copies_of_sinks(model)


def _checkpoint_elements(layer: torch.nn.Module, parameter: torch.Tensor) -> int:
    """Elements of `parameter` that a checkpoint fills: a vocabulary is padded to a multiple of 64 rows, which it does
    not."""
    shard = getattr(layer, "shard_indices", None)
    if shard is None:
        return get_tensor_load_numel(parameter)
    return parameter.numel() // parameter.shape[0] * shard.num_org_elements


def _set_expert_kernels_aside(model: torch.nn.Module) -> None:
    """Let vLLM process the experts that are reloaded as it does at the first load.

    On the CPU their kernel reads matrices of a packed layout, with the intermediate size padded to a multiple of 32.
    vLLM 0.32 packs them only where it builds the kernel (UnquantizedFusedMoEMethod._setup_kernel): with a kernel
    present, a reload copies the checkpoint's plain matrices over the packed ones, which is no error where nothing is
    padded, and log-probabilities are off by 0.4. Without one it builds and packs anew, whatever the version.
    """
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod) and method.unquantized_backend is UnquantizedMoeBackend.CPU:
            _KERNELS[layer], method.moe_kernel = method.moe_kernel, None


def _tied_head(model: torch.nn.Module) -> ParallelLMHead | None:
    """The head that multiplies with the embedding's own matrix. By identity: of a checkpoint that holds an equal
    lm_head.weight as well, vLLM's configuration has it untied; vLLM ties what it has loaded."""
    layers = [layer for layer in model.modules() if isinstance(layer, VocabParallelEmbedding)]
    embedded = {id(_matrix(layer)) for layer in layers if not isinstance(layer, ParallelLMHead)}
    heads = (layer for layer in layers if isinstance(layer, ParallelLMHead) and _matrix(layer) is not None)
    return next((head for head in heads if id(_matrix(head)) in embedded), None)


def _matrix(layer: torch.nn.Module) -> torch.Tensor | None:
    """That of a layer that waits for tensors stands aside. None: it is quantised, under other names."""
    aside = get_layerwise_info(layer).kernel_tensors
    return dict(layer.named_parameters(recurse=False)).get("weight") if aside is None else aside[0].get("weight")


def _mend_tied_head(model: torch.nn.Module) -> None:
    """On the CPU the head multiplies with a prepacked copy of its matrix, and a reload of tied embeddings does not
    renew it: vLLM logs "ParallelLMHead: Failed to load weights", and log-probabilities are off by 1."""
    head = _tied_head(model)
    if head is not None and head.weight.device.type == "cpu":
        head.quant_method.process_weights_after_loading(head)
