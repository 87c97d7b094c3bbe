"""Saving and loading through megatron.core.dist_checkpointing, atomically and verified. Collective over the trainer's ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.models.gpt import GPTModel

from rltool.checkpoints import directory as directories
from rltool.checkpoints import manifest as manifests
from rltool.checkpoints.carried import carry
from rltool.checkpoints.manifest import Manifest
from rltool.errors import UsageError
from rltool.megatron.hf_weights import load_hf
from rltool.megatron.runtime import Runtime, save_without_manager_process
from rltool.megatron.state import model_state
from rltool.megatron.trainer import MegatronTrainer
from rltool.models.base import Family
from rltool.models.registry import family_for, read_hf_config

STATE = "torch_dist"
"""Subdirectory with the files of dist_checkpointing; beside it the manifest, extra.json, config and tokenizer."""
EXTRA = "extra.json"


def save_checkpoint(trainer: MegatronTrainer, directory: Path, extra: dict[str, Any]) -> None:
    """Model, optimizer, schedule and random state into `directory`, which must not exist, then `latest` points at it.

    extra: what else the run needs to resume; JSON. Its "step", "weight_version" and "config" also go into the manifest.
    The directory must be one that all ranks see. On failure nothing of that name appears and the last good one stays.
    """
    manifest = Manifest(
        kind="training",
        architecture=trainer.family.architecture,
        dtype=str(trainer.dtype).removeprefix("torch."),
        step=extra.get("step"),
        weight_version=extra.get("weight_version"),
        layout=trainer.layout,
        config=extra.get("config") or {},
    )

    def beside(partial: Path) -> None:
        (partial / EXTRA).write_text(json.dumps(extra), encoding="utf-8")
        carry(trainer.model_path, partial, dtype=manifest.dtype)

    runtime, final = trainer.runtime, Path(directory)
    write_state(runtime, trainer.sharded_state(loading=False), final, manifest, beside)
    runtime.on_rank_zero(lambda: directories.set_latest(final), "setting the latest checkpoint")


def load_checkpoint(trainer: MegatronTrainer, directory: Path) -> dict[str, Any]:
    """Restores everything that `save_checkpoint` saved, under any layout of ranks, and returns its `extra`.

    With a KL term load the initial weights first: they become the reference, and this call does not change it. Under another
    layout the random generators start anew. Raises CheckpointDamaged before anything is loaded, UsageError for a checkpoint
    of another model or without training state.
    """
    manifest = open_verified(trainer.runtime, trainer.family, directory)
    if manifest.kind != "training":
        raise UsageError(f"{directory} holds weights only; resuming needs a checkpoint that a training run saved")
    state = trainer.sharded_state(loading=True, with_rng=manifest.layout == trainer.layout)
    with trainer.runtime.mode():
        loaded = dist_checkpointing.load(state, str(Path(directory) / STATE), strict="raise_unexpected")
    trainer.restore(loaded)
    return json.loads((Path(directory) / EXTRA).read_text(encoding="utf-8"))


def load_weights(trainer: MegatronTrainer, path: Path) -> None:
    """Initial weights from a Hugging Face directory or from a checkpoint of ours; they also become the reference."""
    if not manifests.is_checkpoint(path):
        trainer.load_hf_weights(path)
        return
    open_verified(trainer.runtime, trainer.family, path)
    load_model(trainer.runtime, trainer.gpt, path)
    with trainer.runtime.mode():
        trainer.weights_changed(initial=True)


def load_teacher(trainer: MegatronTrainer, path: Path) -> None:
    """The teacher's weights, from a Hugging Face directory or a checkpoint of ours; the policy's stay as they are.

    UsageError when they do not fit the policy's model: they are swapped into it.
    """
    if manifests.is_checkpoint(path):
        open_verified(trainer.runtime, trainer.family, path)
        trainer.load_teacher(lambda: load_model(trainer.runtime, trainer.gpt, path))
    else:
        trainer.load_teacher(lambda: load_hf(trainer.gpt, trainer.family, path, trainer.runtime))


def load_model(runtime: Runtime, model: GPTModel, directory: Path) -> None:
    """The weights alone into the unwrapped model, cast to its dtype. Verify first: `open_verified`."""
    with runtime.mode():
        state = {"model": model_state(model)}
        loaded = dist_checkpointing.load(state, str(Path(directory) / STATE), strict="raise_unexpected")
        model.load_state_dict(loaded["model"])


def open_verified(runtime: Runtime, family: Family, directory: Path) -> Manifest:
    """The manifest, after rank 0 has checked every hash. UsageError when the checkpoint is of another model."""
    manifest = manifests.read(directory)
    runtime.on_rank_zero(lambda: manifests.verify(directory, manifest), f"checking {directory}")
    saved = family_for(read_hf_config(directory))
    if saved.hf_tensors() != family.hf_tensors():
        raise UsageError(
            f"{directory} holds another model ({saved.architecture}, {saved.num_layers} layers, vocabulary "
            f"{saved.vocab_size}) than the configured one ({family.architecture}, {family.num_layers} layers, vocabulary "
            f"{family.vocab_size})"
        )
    return manifest


def write_state(
    runtime: Runtime,
    state: dict[str, Any],
    final: Path,
    manifest: Manifest,
    beside: Callable[[Path], object],
    check: Callable[[Path], object] | None = None,
) -> None:
    """A sharded state dict as a complete directory: temporary name, files, checks, manifest, rename.

    beside: called on rank 0 to write further files; check: called on every rank once all files are there.
    """
    partial = final.parent / f".{final.name}.partial"
    runtime.on_rank_zero(lambda: (directories.begin(final) / STATE).mkdir(), f"creating {partial}")
    try:
        save_without_manager_process()
        with runtime.mode():
            dist_checkpointing.save(state, str(partial / STATE))
        runtime.on_rank_zero(lambda: beside(partial), f"writing {partial}")
        if check is not None:
            check(partial)
        runtime.on_rank_zero(lambda: finish(partial, final, manifest), f"completing {final}")
    except BaseException:
        if runtime.coordinates.rank == 0:
            directories.abandon(partial)
        raise


def finish(partial: Path, final: Path, manifest: Manifest) -> None:
    """Hashes every file, writes the manifest, makes all of it durable and gives it its name."""
    versions = {name: version(name) for name in ("rltool", "megatron-core", "torch")}
    complete = Manifest(**{**vars(manifest), "versions": versions, "files": manifests.describe_files(partial)})
    directories.write_text(partial / manifests.FILE, manifests.to_text(complete))
    directories.commit(partial, final)
