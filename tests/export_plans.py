"""Plans beside the full one, as a user of adapters or of quantised weights would have them."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from rltool.engines.types import TensorMeta
from rltool.megatron.export_plan import Export, ExportPlan, Stream
from rltool.megatron.fp8 import fp8_plan
from rltool.models.base import Family, Parameter
from rltool.models.hf_directory import HFTensors
from rltool.models.registry import family_for, read_hf_config
from tests.e2e.megatron_models import hf_config
from tests.ranks import RanksOnGpus

LAYERS, RANK, SCALE = 3, 2, 4.0
WIDTH, ROWS = 6, 8


def adapter() -> ExportPlan:
    """Two low-rank tensors of each layer in half precision, the second one scaled; the matrix that they adapt stays
    where it is."""
    exports = []
    for layer in range(LAYERS):
        for letter, shape, factor in (("A", (RANK, WIDTH), 1.0), ("B", (ROWS, RANK), SCALE)):
            name = f"base_model.model.layers.{layer}.down.lora_{letter}.weight"
            parameter = Parameter(f"decoder.layers.{layer}.down.lora_{letter.lower()}", ((name, shape),), layer)
            meta = TensorMeta(name, "float16", shape)
            exports.append(Export(parameter, (meta,), partial(scaled_half, factor=factor)))
    return ExportPlan(tuple(exports), "float32", num_layers=LAYERS, num_experts=0)


def scaled_half(parameter: Parameter, tensor: Tensor, factor: float) -> list[Tensor]:
    return [(factor * part).half() for part in parameter.split(tensor)]


def adapted_model(step: int) -> dict[str, Tensor]:
    """Megatron's name -> parameter after so many training steps; the adapted matrices among them."""
    model = {}
    for layer in range(LAYERS):
        at = f"decoder.layers.{layer}.down"
        generator = torch.Generator().manual_seed(1000 * step + layer)
        model[f"{at}.weight"] = torch.full((ROWS, WIDTH), float(layer))
        model[f"{at}.lora_a"] = torch.randn(RANK, WIDTH, generator=generator)
        model[f"{at}.lora_b"] = torch.randn(ROWS, RANK, generator=generator)
    return model


def quantised(full: ExportPlan) -> ExportPlan:
    """Every matrix as eight-bit integers around 128, each with a scale for every row behind it."""
    return replace(full, exports=tuple(map(_quantised_export, full.exports)))


def _quantised_export(export: Export) -> Export:
    if any(len(meta.shape) == 1 for meta in export.tensors):
        return export
    tensors = []
    for meta in export.tensors:
        scale = TensorMeta(f"{meta.name}_scale", "float32", (meta.shape[0], 1))
        tensors += [replace(meta, dtype="uint8"), scale]
    return Export(export.parameter, tuple(tensors), rounded_rows)


def rounded_rows(parameter: Parameter, tensor: Tensor) -> list[Tensor]:
    made = []
    for part in parameter.split(tensor):
        scale = part.float().abs().amax(-1, keepdim=True) / 127
        made += [((part / scale).round() + 128).to(torch.uint8), scale]
    return made


SIZES = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 64,
    "num_key_value_heads": 2, "num_hidden_layers": 1,
}  # fmt: skip


def save_qwen3(directory: Path, step: int) -> Family:
    """Qwen3 in float32 whose weights are not those of bfloat16."""
    config = hf_config("qwen3", False, **SIZES).to_dict() | {"architectures": ["Qwen3ForCausalLM"]}
    family = family_for(config)
    generator = torch.Generator().manual_seed(step)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in family.hf_tensors()}
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return family


class RanksInFp8(RanksOnGpus):
    """Of models in directories of theirs, one for each step."""

    def __init__(self, *args: Any, models: Path, **options: Any) -> None:
        self.models = models
        super().__init__(*args, **options)

    @cached_property
    def plan(self) -> ExportPlan:
        return fp8_plan(family_for(read_hf_config(self.models)))

    def stream(self, step: int) -> Stream:
        with HFTensors(self.models / f"step{step}") as tensors:
            yield from self.plan.made(tensors.merged)

    async def logprobs(self, batch: Any) -> Tensor:
        return batch.rollout_logprobs.clone()
