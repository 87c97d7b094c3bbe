"""What each call does with the trainer, and what it gives; in the words of the client's API."""

from __future__ import annotations

import base64
import dataclasses
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rltool.errors import UsageError
from rltool.processes.files import saving
from rltool.tinker.journal import Call
from rltool.tinker.paths import SAMPLERS, STATES, UNNAMED, CheckpointPath, parse_path
from rltool.tinker.wire import decode_forward, encode_output
from rltool.training.served import AdamParams, AdapterSpec, ServedTrainer

ALPHA = 32.0
"""Of every adapter: the API has no setting for it (tinker-docs.thinkingmachines.ai, "LoRA Primer")."""

KEPT_UNNAMED, KEPT_UNNAMED_FULL = 8, 2
"""Of each model, the newest weights for sampling without a name: clients reach them by their sampling clients alone.
FULL: where each is all weights."""


def trains_all(lora: Mapping[str, Any] | None) -> bool:
    """Whether a model of this lora_config has no adapter: its rank is 0, as SkyRL has it, or there is none."""
    return lora is None or lora.get("rank") == 0


def adapter_spec(lora: Mapping[str, Any] | None) -> AdapterSpec | None:
    """Of create_model's lora_config; None: all weights are trained. Adapters of the unembedding are not trained: the
    session says so to its client."""
    if lora is None:
        return None
    unknown = set(lora) - {"rank", "seed", "train_unembed", "train_mlp", "train_attn"}
    if unknown:
        raise UsageError(f"lora_config: {', '.join(sorted(unknown))} is not supported")
    attention, mlp = lora.get("train_attn", True), lora.get("train_mlp", True)
    if not attention and not mlp:
        raise UsageError("lora_config: one of train_attn and train_mlp has to be true")
    seed = lora.get("seed")
    if isinstance(seed, bool) or not isinstance(seed, int | None) or abs(seed or 0) >= 2**63:
        raise UsageError(f"lora_config.seed is {str(seed)[:40]}, expected an integer below 2**63")
    rank = lora.get("rank")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
        raise UsageError(f"lora_config.rank is {rank!r}, expected an integer of at least 0")
    if rank == 0:
        left_out = [name for name in ("train_attn", "train_mlp", "train_unembed") if not lora.get(name, True)]
        if left_out:
            raise UsageError(f"lora_config.rank is 0, so all weights are trained; {', '.join(left_out)} has to be true")
        return None
    if attention and mlp:
        return AdapterSpec(rank, ALPHA)
    return AdapterSpec(rank, ALPHA, ("qkv", "proj") if attention else ("gate_up", "down"))


def adam_params(given: Mapping[str, Any]) -> AdamParams:
    known = {each.name for each in dataclasses.fields(AdamParams)}
    unknown = set(given) - known
    if unknown:
        raise UsageError(f"adam_params: {', '.join(sorted(unknown))} is not supported")
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > sys.float_info.max:
            raise UsageError(f"adam_params.{name} is {str(value)[:40]}, expected a number")
    return AdamParams(**{name: float(value) for name, value in given.items()})


def perform(trainer: ServedTrainer, call: Call, checkpoints: Path, samplers: Path) -> dict[str, Any]:
    """The result that the client gets. UsageError: the call is wrong, DiskFull: a save has no room; and nothing has
    changed.

    checkpoints, samplers: with a folder for each model. What is there was saved by this same call, before a restart:
    names are given once.
    """
    body, model = call.body, call.model
    match call.kind:
        case "create_model":
            seed = body["lora_config"].get("seed") if body.get("lora_config") else None
            trainer.create(model, adapter_spec(body.get("lora_config")), call.number if seed is None else seed)
            return {"type": "create_model", "model_id": model}
        case "forward_backward":
            request = decode_forward(base64.b64decode(body["proto"]))
            output = trainer.forward(model, request.data, request.loss, request.settings, backward=request.backward)
            proto = base64.b64encode(encode_output(output)).decode()
            return {"proto": proto, "loss": output.metrics["loss_sum"], "backward": request.backward}
        case "optim_step":
            return {"metrics": dict(trainer.optim_step(model, adam_params(body["adam_params"])))}
        case "save_weights":
            directory = checkpoints / model / body["name"]
            if not directory.exists():
                with saving(f"checkpoint {body['name']!r}", directory):
                    directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                    trainer.save(model, directory, optimizer=True)
            return {"type": "save_weights", "path": str(CheckpointPath(model, STATES, body["name"]))}
        case "save_weights_for_sampler":
            kept = KEPT_UNNAMED_FULL if body.get("full") else KEPT_UNNAMED
            _export_for_sampling(trainer, model, samplers / model / body["name"], kept)
            saved: dict[str, Any] = {"type": "save_weights_for_sampler"}
            if body.get("sampling_session"):
                return saved | {"sampling_session_id": body["sampling_session"]}
            return saved | {"path": str(CheckpointPath(model, SAMPLERS, body["name"]))}
        case "load_weights":
            source = parse_path(body["path"], STATES)
            name = body.get("copy", source.name)
            if body["create"]:
                trainer.create(model, adapter_spec(body["lora_config"]), call.number)
            try:
                trainer.load(model, checkpoints / source.model / name, optimizer=body["optimizer"])
            except UsageError:
                if body["create"]:
                    trainer.drop(model)
                raise
            return {"type": "load_weights", "path": body["path"], "model_id": model}
        case "unload_model":
            trainer.drop(model)
            return {"type": "unload_model", "model_id": model}
        case _:
            raise AssertionError(call.kind)


def _export_for_sampling(trainer: ServedTrainer, model: str, directory: Path, kept: int) -> None:
    if not directory.exists():
        with saving("weights for sampling", directory):
            directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            trainer.save(model, directory, optimizer=False)
    for old in sorted(directory.parent.glob(f"{UNNAMED}*"))[:-kept]:
        shutil.rmtree(old, ignore_errors=True)
