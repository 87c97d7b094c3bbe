"""What is exported: the tensors that are sent to engines, compared with what they hold, checksummed and saved for
Hugging Face, as one value.

The trainer makes its plan once and hands it on: sender, rollout manager, checksums and exports read names, shapes and
dtypes from it, and nothing else derives them. Another plan (adapters, weights in FP8) is another list of `Export`.
Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rltool.config.sections import LoraConfig
from rltool.engines.transfer.wire import dtype_of, plan_buckets, tensor_bytes
from rltool.engines.types import Bucket, TensorMeta
from rltool.models.adapters import adapters_of, peft_config
from rltool.models.base import Family, Parameter

Make = Callable[[Parameter, Tensor], list[Tensor]]
"""(parameter, its unsharded, unpadded tensor) -> the exported tensors, in memory of their own or views."""

Stream = Iterable[tuple[TensorMeta, Tensor | None]]
"""A plan's tensors in its order; None on ranks that do not get them. Producing it is a collective of the ranks."""


@dataclass(frozen=True)
class Export:
    """What one parameter of the Megatron model is exported as.

    tensors: what `make` returns, announced; of a tensor of all experts the last one's export announces it (`Join`)
    make: a function of a module, for plans are pickled
    """

    parameter: Parameter
    tensors: tuple[TensorMeta, ...]
    make: Make = Parameter.split

    def made_bytes(self, itemsize: int) -> int:
        """Memory that `made` adds, without what `make` frees before it returns. itemsize: bytes of an element of the
        parameter."""
        own = itemsize * torch.Size(self.parameter.merged_shape).numel()
        cut = own if self.parameter.split_copies else 0
        joined = own * self.parameter.experts
        return cut + joined if self.make is Parameter.split else cut + joined + sum(map(tensor_bytes, self.tensors))


class Join:
    """A plan's exports one after the other: those of the tensors of all experts wait until all parts have come."""

    def __init__(self) -> None:
        self._whole: Tensor | None = None

    def made(self, export: Export, tensor: Tensor) -> Iterator[tuple[TensorMeta, Tensor]]:
        """tensor: of the export's parameter, unsharded and unpadded."""
        parameter = export.parameter
        made = export.make(parameter, tensor)
        if not parameter.experts:
            yield from zip(export.tensors, made, strict=True)
            return
        [part] = made
        assert parameter.expert is not None
        if self._whole is None:
            self._whole = part.new_empty(parameter.experts, *part.shape)
        self._whole[parameter.expert] = part
        if parameter.ends_tensors:
            [meta], whole, self._whole = export.tensors, self._whole, None
            yield meta, whole


@dataclass(frozen=True)
class ExportPlan:
    """dtype: of the model (TensorMeta.dtype); num_layers, num_experts: of the model, which decide the ranks that hold a
    parameter; carried: of `Family`, saved for Hugging Face alone."""

    exports: tuple[Export, ...]
    dtype: str
    num_layers: int
    num_experts: int
    carried: tuple[str, ...] = ()
    peft: Mapping[str, Any] | None = None
    """Of adapters alone: their adapter_config.json. An engine takes them under a name, and pauses for nothing."""
    quantization: Mapping[str, Any] | None = None
    """quantization_config of the tensors' config.json; None: they are not quantised."""

    @property
    def tensors(self) -> list[TensorMeta]:
        """In the order in which they are made and sent."""
        return [meta for export in self.exports for meta in export.tensors]

    @property
    def bytes(self) -> int:
        return sum(map(tensor_bytes, self.tensors))

    def dtype_of(self, parameter: Parameter) -> torch.dtype:
        """That a parameter is gathered in."""
        return parameter.dtype(dtype_of(self.dtype))

    def buckets(self, limit: int) -> list[Bucket]:
        """See `plan_buckets`: the same wherever the plan is. Scales travel with their matrices: in buckets of one dtype
        each would be alone."""
        return plan_buckets(self.tensors, limit, one_dtype=self.quantization is None)

    def files(self, limit: int) -> list[Bucket]:
        """The tensors of each file of a Hugging Face directory."""
        return plan_buckets(self.tensors, limit, one_dtype=False)

    def made(self, read: Callable[[Parameter], Tensor]) -> Iterator[tuple[TensorMeta, Tensor]]:
        """All tensors, in one process. read: the unsharded tensor of a parameter, of which one at a time is held."""
        join = Join()
        for export in self.exports:
            yield from join.made(export, read(export.parameter))


def full_plan(family: Family, dtype: torch.dtype) -> ExportPlan:
    """Every tensor of the family's Hugging Face checkpoint, in `dtype` unless it keeps its own. A tied model has no
    lm_head."""

    def named(dtype: torch.dtype) -> str:
        return str(dtype).removeprefix("torch.")

    def announced(parameter: Parameter) -> tuple[TensorMeta, ...]:
        tensors = parameter.hf if parameter.ends_tensors else ()
        return tuple(TensorMeta(hf, named(parameter.dtype(dtype)), shape) for hf, shape in tensors)

    exports = tuple(Export(parameter, announced(parameter)) for parameter in family.parameters)
    return ExportPlan(exports, named(dtype), family.num_layers, family.num_experts, family.carried)


def adapter_plan(family: Family, lora: LoraConfig, base: str) -> ExportPlan:
    """A and B of every adapter as peft names them, in float32, unscaled: who loads them reads alpha in `peft`, so that
    they are scaled once. base: the model's path, for readers."""
    adapted = adapters_of(family, lora.rank, lora.targets)
    exports = tuple(
        Export(each, tuple(TensorMeta(name, "float32", shape) for name, shape in each.hf))
        for one in adapted
        for each in one.parameters
    )
    peft = peft_config(family, adapted, lora, base)
    return ExportPlan(exports, "float32", family.num_layers, family.num_experts, peft=peft)


def drain(stream: Stream) -> None:
    """What ranks that do nothing with the tensors do: take part in the collectives that produce the stream."""
    for item in stream:
        del item  # else it holds its gather's buffer while there is a next one
