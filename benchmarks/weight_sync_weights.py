"""What benchmarks.weight_sync sends: tensors that lie ready, or those of a Megatron model, merged and cut at every sync
as the trainer does it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.weight_sync_models import random_weights, randomize
from rltool.engines.types import TensorMeta
from rltool.megatron.export_plan import ExportPlan
from rltool.processes.ports import reserved_ports
from tests.ranks import plan_of

SOURCES = ("tensors", "megatron")


class Weights(ABC):
    """Of one rank of the trainer, on its device."""

    plan: ExportPlan
    stream_bytes: int = 0
    """What `stream` holds at most beside them."""

    @abstractmethod
    def stream(self) -> Iterator[tuple[TensorMeta, Tensor]]:
        """For one sync, under Hugging Face's names."""

    @abstractmethod
    def held(self) -> list[Tensor]:
        """What they are made of."""

    def tensors(self) -> dict[str, Tensor]:
        return {meta.name: tensor for meta, tensor in self.stream()}

    def negate(self) -> None:
        """Other weights without the room for them; twice: every bit is as it was."""
        for tensor in self.held():
            tensor.neg_()


class ReadyTensors(Weights):
    def __init__(self, size: str, device: torch.device, dtype: torch.dtype) -> None:
        self._tensors = random_weights(size, 1, device, dtype)
        self.plan = plan_of(self._tensors)

    def stream(self) -> Iterator[tuple[TensorMeta, Tensor]]:
        return zip(self.plan.tensors, self._tensors.values(), strict=True)

    def held(self) -> list[Tensor]:
        return list(self._tensors.values())


class MegatronModel(Weights):
    """Without optimizer and gradients. One in a process."""

    def __init__(self, directory: Path, device: torch.device, dtype: torch.dtype) -> None:
        from rltool.config.parallel import ParallelLayout
        from rltool.config.sections import TrainerConfig
        from rltool.megatron.export_plan import full_plan
        from rltool.megatron.gathering import gather_bytes
        from rltool.megatron.model import build_model, global_names
        from rltool.megatron.runtime import Rendezvous, Runtime
        from rltool.models.base import FINAL_NORM
        from rltool.models.registry import family_for, read_hf_config

        layout = ParallelLayout(world_size=1)
        with reserved_ports(1) as reserved:
            [port] = reserved.ports
        self._runtime = Runtime(layout, Rendezvous(0, "127.0.0.1", port, timeout=60.0), device=device.type, seed=1)
        family = family_for(read_hf_config(directory))
        with self._runtime.mode():
            self._model = build_model(
                family, self._runtime.coordinates, dtype, self._runtime.device, TrainerConfig()
            ).to(device)
        self.plan = full_plan(family, dtype)
        self.stream_bytes = gather_bytes(self.plan, layout)
        generator = torch.Generator(device).manual_seed(1)
        for name, parameter in global_names(self._model).items():
            randomize(name, parameter.data, generator, last_norm=FINAL_NORM)

    def stream(self) -> Iterator[tuple[TensorMeta, Tensor]]:
        from rltool.megatron.hf_weights import export_weights

        for meta, tensor in export_weights(self._model, self.plan, self._runtime):
            assert tensor is not None, "this is rank 0"
            yield meta, tensor

    def held(self) -> list[Tensor]:
        return [parameter.data for parameter in self._model.parameters()]


def make_weights(source: str, size: str, directory: Path, device: torch.device, dtype: torch.dtype) -> Weights:
    return ReadyTensors(size, device, dtype) if source == "tensors" else MegatronModel(directory, device, dtype)
