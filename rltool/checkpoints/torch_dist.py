"""Saving and loading through megatron.core.dist_checkpointing, verified. Collective over the trainer's ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.models.gpt import GPTModel

from rltool.checkpoints import directory as directories
from rltool.checkpoints import manifest as manifests
from rltool.checkpoints.completion import EXTRA, STATE, finish
from rltool.checkpoints.lora import check_base, check_lora
from rltool.checkpoints.manifest import Manifest
from rltool.checkpoints.peft_format import PeftAdapter, check_settings, is_peft
from rltool.checkpoints.saving import CheckpointSaver
from rltool.checkpoints.streamed import AdapterLayout, TorchDistReader
from rltool.config.sections import LoraConfig
from rltool.errors import UsageError
from rltool.megatron.critic import STATE_PREFIX, Critic
from rltool.megatron.hf_weights import load_hf
from rltool.megatron.runtime import Runtime
from rltool.megatron.state import REFERENCE_PREFIX, model_state
from rltool.megatron.trained import TrainedModel
from rltool.megatron.trainer import MegatronTrainer
from rltool.models.adapters import adapters_of
from rltool.models.base import Family
from rltool.models.registry import family_for, read_hf_config

__all__ = [
    "STATE",
    "finish",
    "load_adapters",
    "load_checkpoint",
    "load_model",
    "load_teacher",
    "load_weights",
    "open_verified",
    "read_weights",
    "save_checkpoint",
]


def save_checkpoint(
    trainer: MegatronTrainer, directory: Path, extra: dict[str, Any], *, critic: Critic | None = None
) -> None:
    """One checkpoint, complete on return: see `CheckpointSaver.save`. A run keeps a saver instead."""
    saver = CheckpointSaver(trainer, asynchronous=False, critic=critic)
    try:
        saver.save(directory, extra)
        saver.wait()
    finally:
        saver.close()


def load_checkpoint(trainer: MegatronTrainer, directory: Path, *, critic: Critic | None = None) -> dict[str, Any]:
    """Restores everything that a `CheckpointSaver` saved, under any layout of ranks, and returns its `extra`.

    A run with adapters loads the model first, beside which they were trained: it is compared by its hashes. With a KL
    term load the initial weights first: they become the reference, and stay it unless the checkpoint has
    later ones. Under another layout the random generators start anew. Without `critic` that of the checkpoint, if it
    has one, is left out. Raises CheckpointDamaged before anything is loaded, UsageError for a checkpoint of another
    model or without training state.
    """
    manifests.read(directory)
    with directories.reading(directory):
        manifest = open_verified(trainer.runtime, trainer.family, directory)
        if manifest.kind != "training":
            raise UsageError(f"{directory} holds weights only; resuming needs a checkpoint that a training run saved")
        check_lora(manifest, trainer.lora, directory)
        check_optimizer(manifest, trainer, directory)
        if trainer.lora.rank:
            check_base_together(trainer.runtime, manifest, trainer.model_path, directory)
        if critic is not None:
            check_has_critic(directory)
        state = trainer.sharded_state(
            loading=True,
            with_rng=manifest.layout == trainer.coordinates.layout,
            with_reference=has_tensors(directory, REFERENCE_PREFIX),
        )
        if critic is not None:
            state["critic"] = critic.sharded_state(loading=True)
        with trainer.runtime.mode():
            loaded = _load(state, directory)
        trainer.restore(loaded)
        if critic is not None:
            critic.restore(loaded["critic"])
        return json.loads((Path(directory) / EXTRA).read_text(encoding="utf-8"))


def check_optimizer(manifest: Manifest, trainer: MegatronTrainer, directory: Path) -> None:
    """UsageError when the optimizer state is not of this trainer's kind: Megatron stores the two differently."""
    saved, ours = manifest.distributed_optimizer, trainer.config.distributed_optimizer
    if saved != ours:
        raise UsageError(
            f"{directory} was saved with trainer.distributed_optimizer = {str(saved).lower()}, but it is "
            f"{str(ours).lower()} now, and optimizer states of one kind cannot be read by the other; resume with the "
            f"setting of the checkpoint, or start a new run from its weights (model.path = {directory})"
        )


def check_has_critic(directory: Path) -> None:
    """UsageError when the run that saved this checkpoint trained none."""
    if not has_tensors(directory, STATE_PREFIX):
        raise UsageError(
            f'{directory} holds no critic: it was saved by a run without algorithm.advantage = "gae"; resume with the '
            f"setting of the checkpoint, or start a new run from its weights (model.path = {directory})"
        )


def has_tensors(directory: Path, prefix: str) -> bool:
    """Whether the checkpoint holds tensors whose names begin with prefix."""
    tensors = dist_checkpointing.load_tensors_metadata(str(Path(directory) / STATE))
    return any(name.startswith(prefix) for name in tensors)


def load_weights(model: TrainedModel, path: Path) -> None:
    """Initial weights from a Hugging Face directory or from the policy of a checkpoint of ours.

    The policy's also become the reference; the value head of a critic stays. UsageError for another model than this
    one, CheckpointDamaged before anything is loaded.
    """
    read_weights(model, path)
    with model.runtime.mode():
        model.weights_changed(initial=True)


def load_teacher(trainer: MegatronTrainer, path: Path) -> None:
    """The teacher's weights, from a Hugging Face directory or a checkpoint of ours; the policy's stay as they are.

    UsageError when they do not fit the policy's model: they are swapped into it.
    """
    trainer.load_teacher(lambda: read_weights(trainer, path))


def read_weights(model: TrainedModel, path: Path) -> None:
    """Overwrites the model's parameters, but not those of a part of its own; its optimizer does not know yet."""
    if not manifests.is_checkpoint(path):
        with model.runtime.mode():
            load_hf(model.gpt, model.family, path, model.runtime, without=model.own_part)
        return
    with directories.reading(path):
        check_lora(open_verified(model.runtime, model.family, path), LoraConfig(), path)
        load_model(model.runtime, model.gpt, path, without=model.own_part)


def load_model(runtime: Runtime, model: GPTModel, directory: Path, *, without: str | None = None) -> None:
    """The weights alone into the unwrapped model, cast to its dtype. Verify first: `open_verified`.

    without: as for `load_hf`.
    """
    with runtime.mode():
        state = {"model": {name: value for name, value in model_state(model).items() if name.split(".")[0] != without}}
        model.load_state_dict(_load(state, directory)["model"], strict=without is None)


def load_adapters(trainer: MegatronTrainer, directory: Path) -> None:
    """Adapters to begin with (lora.init), from a directory of peft's or from a checkpoint of ours, saved under any
    layout. The model is there already.

    UsageError for other adapters than the trainer's, or for another model than the checkpoint's.
    """
    adapted = adapters_of(trainer.family, trainer.lora.rank, trainer.lora.targets)
    if is_peft(directory):
        check_settings(directory, trainer.lora)
        with PeftAdapter(directory, adapted) as adapter:
            trainer.load_adapters(adapter.read)
        return
    with directories.reading(directory):
        manifest = open_verified(trainer.runtime, trainer.family, directory)
        check_lora(manifest, trainer.lora, directory)
        check_base_together(trainer.runtime, manifest, trainer.model_path, directory)
        trainer.load_adapters(TorchDistReader(AdapterLayout(), Path(directory) / STATE).read)


def check_base_together(runtime: Runtime, manifest: Manifest, base: Path, directory: Path) -> None:
    """`check_base`, shared out among the ranks."""
    at = runtime.coordinates
    runtime.on_every_rank(
        lambda: check_base(manifest, base, directory, part=at.rank, parts=at.layout.world_size), f"checking {base}"
    )


def _load(state: dict[str, Any], directory: Path) -> dict[str, Any]:
    """What the checkpoint holds in the places that `state` names. Raises where it holds more, or less."""
    loaded = dist_checkpointing.load(state, str(Path(directory) / STATE), strict="raise_unexpected")
    assert isinstance(
        loaded, dict
    )  # Megatron returns a tuple for the values of `strict` that report, in place of raising
    return loaded


def open_verified(runtime: Runtime, family: Family, directory: Path) -> Manifest:
    """The manifest, after the ranks have checked all hashes together.

    UsageError when the checkpoint is of another model, CheckpointDamaged when its files are not those that were saved.
    """
    manifest = manifests.read(directory)
    at = runtime.coordinates
    runtime.on_every_rank(
        lambda: manifests.verify(directory, manifest, part=at.rank, parts=at.layout.world_size), f"checking {directory}"
    )
    saved = family_for(read_hf_config(directory), family.own)
    if saved.hf_tensors() != family.hf_tensors():
        raise UsageError(
            f"{directory} holds another model ({saved.architecture}, {saved.num_layers} layers, vocabulary "
            f"{saved.vocab_size}) than the configured one ({family.architecture}, {family.num_layers} layers, "
            f"vocabulary {family.vocab_size})"
        )
    return manifest
