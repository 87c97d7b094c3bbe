"""One rank of a served trainer with its files: what `TrainerGroup.call` names. Collective, as ServedModel is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from rltool.algorithms.batch import TrainBatch
from rltool.checkpoints import directory as directories
from rltool.checkpoints import manifest as manifests
from rltool.checkpoints.hf_export import export_hf
from rltool.checkpoints.peft_format import is_peft, write_adapter_files
from rltool.checkpoints.saving import CheckpointSaver
from rltool.checkpoints.torch_dist import load_adapters, load_checkpoint, load_weights, read_weights
from rltool.config.sections import LoraConfig
from rltool.errors import UsageError
from rltool.megatron.served import ServedModel
from rltool.processes.files import saving


class ServedRank:
    """base: where the base model is."""

    def __init__(self, model: ServedModel, saver: CheckpointSaver, base: Path) -> None:
        self._model, self._saver, self._base = model, saver, base

    def create(self, name: str, lora: LoraConfig, seed: int) -> None:
        self._model.create(name, lora, seed)

    def drop(self, name: str) -> None:
        if self._model.drop(name):
            load_weights(self._model, self._base)

    def put_in(self, directory: Path) -> None:
        """Weights that engines are sent in place of the model's, until `put_back`."""
        self._model.put_in(lambda: read_weights(self._model, directory))

    def put_back(self) -> None:
        self._model.put_back()

    def logprobs(self, micro_batches: list[TrainBatch], name: str) -> list[Tensor] | None:
        """As MegatronTrainer.compute_logprobs."""
        self._model.use(name)
        return self._model.compute_logprobs(micro_batches)

    def add_gradients(
        self, micro_batches: list[TrainBatch], name: str, loss: str, settings: Mapping[str, float]
    ) -> list[Tensor] | None:
        self._model.use(name)
        return self._model.add_gradients(micro_batches, loss, settings)

    def adam_step(self, name: str, adam: Mapping[str, float]) -> dict[str, float]:
        self._model.use(name)
        return self._model.adam_step(adam)

    def save(self, name: str, directory: Path, *, optimizer: bool, step: int) -> None:
        self._model.use(name)
        with saving(f"what is saved of {name!r}", directory):
            if optimizer:
                self._saver.save(directory, {"step": step})
                self._saver.wait()
            elif self._model.lora.rank:
                self.export_adapter(name, directory)
            else:
                export_hf(self._model, directory)

    def load(self, name: str, directory: Path, *, optimizer: bool) -> int:
        """Returns the steps that the model's optimizer has made."""
        self._model.use(name)
        if optimizer:
            if is_peft(directory) or not manifests.is_checkpoint(directory):
                raise UsageError(f"{directory} holds no optimizer's state: load the weights alone, or save with it")
            extra: dict[str, Any] = load_checkpoint(self._model, directory)
            self._model.forget_gradients()
            return int(extra.get("step") or 0)
        load = load_adapters if self._model.lora.rank else load_weights
        load(self._model, directory)
        self._model.forget_gradients()
        self._model.forget_optimizer()
        return 0

    def export_adapter(self, name: str, directory: Path) -> None:
        """Written by rank 0."""
        model = self._model
        model.use(name)
        plan = model.adapter_plan
        assert plan is not None and plan.peft is not None, "RankedTrainer.export_adapter refuses others"
        config, layout = plan.peft, [(meta.name, meta.shape) for meta in plan.tensors]
        tensors = [tensor.clone() for _, tensor in model.export_adapters() if tensor is not None]
        model.runtime.on_rank_zero(
            lambda: write_adapter_files(directory, config, layout, tensors), f"writing {directory}"
        )

    def snapshot(self, directory: Path, files: Mapping[str, str]) -> None:
        """A file of each rank, and these of rank 0."""
        runtime, partial = self._model.runtime, directories.partial_of(directory)

        def finish() -> None:
            for name, content in files.items():
                directories.write_text(partial / name, content)
            directories.commit(partial, directory)

        try:
            with saving("a snapshot", directory):
                runtime.on_rank_zero(lambda: directories.begin(directory), f"creating {directory}")
                runtime.on_every_rank(lambda: self._model.save_all(self._file(partial)), f"writing {directory}")
                runtime.on_rank_zero(finish, f"writing {directory}")
        except BaseException:
            if self._model.coordinates.rank == 0:
                directories.abandon(partial)
            raise

    def restore(self, directory: Path) -> None:
        for name in self._model.names:
            self.drop(name)
        self._model.load_all(self._file(directory))

    def _file(self, directory: Path) -> Path:
        return directory / f"rank_{self._model.coordinates.rank}.pt"
