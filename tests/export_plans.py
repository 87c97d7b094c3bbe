"""Plans beside the full one, as a user of adapters or of quantised weights would have them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from rltool.engines.types import TensorMeta
from rltool.megatron.export_plan import Export, ExportPlan
from rltool.models.base import Parameter

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
