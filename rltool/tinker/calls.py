"""What each call does with the trainer, and what it gives; in the words of the client's API."""

from __future__ import annotations

import base64
import dataclasses
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rltool.errors import UsageError
from rltool.tinker.journal import Call
from rltool.tinker.wire import decode_forward, encode_output
from rltool.training.served import AdamParams, AdapterSpec, ServedTrainer

ALPHA = 32.0
"""Of every adapter: the API has no setting for it (tinker-docs.thinkingmachines.ai, "LoRA Primer")."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
STATES, SAMPLERS = "weights", "sampler_weights"
"""Kinds of checkpoints, as their paths have it: what training goes on from, and what is sampled with."""
_PATH = re.compile(r"tinker://([^/]+)/(weights|sampler_weights)/([^/]+)")
SHARED = "shared"
"""In place of a model's name: checkpoints that the server was given for all clients. No model is called so."""
_UNNAMED = ".unnamed-"
"""Begins the names of weights for sampling that the client gave none; no client's name begins like this."""
KEPT_UNNAMED, KEPT_UNNAMED_FULL = 8, 2
"""Of each model, the newest: clients reach them by their sampling clients alone. FULL: where each is all weights."""


def checkpoint_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise UsageError(f"path {name!r}: a checkpoint's name is letters, digits, '.', '_' and '-', at most 100")
    return name


def checkpoint_path(model: str, kind: str, name: str) -> str:
    return f"tinker://{model}/{kind}/{name}"


def unnamed_sampler(seq: int) -> str:
    """The name of weights for sampling that have none; in the order of seq."""
    return f"{_UNNAMED}{seq:012d}"


def is_unnamed(name: str) -> bool:
    return name.startswith(_UNNAMED)


def parse_any_path(path: str) -> tuple[str, str, str]:
    """Model, kind and name."""
    found = _PATH.fullmatch(path)
    if not found:
        raise UsageError(f"{path!r} is no path of a checkpoint, expected tinker://MODEL/{STATES}/NAME or {SAMPLERS}")
    return found[1], found[2], checkpoint_name(found[3])


def parse_sampler_path(path: str) -> tuple[str, str]:
    """Model and name."""
    found = _PATH.fullmatch(path)
    if not found or found[2] != SAMPLERS:
        raise UsageError(
            f"{path!r} is no path of weights for sampling, expected tinker://MODEL/{SAMPLERS}/NAME, as "
            "save_weights_for_sampler gives it"
        )
    return found[1], checkpoint_name(found[3])


def parse_path(path: str) -> tuple[str, str]:
    """Model and name."""
    found = _PATH.fullmatch(path)
    if not found or found[2] != STATES:
        raise UsageError(f"{path!r} is no path of trained weights, expected tinker://MODEL/{STATES}/NAME")
    return found[1], checkpoint_name(found[3])


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
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UsageError(f"adam_params.{name} is {value!r}, expected a number")
    return AdamParams(**{name: float(value) for name, value in given.items()})


def perform(trainer: ServedTrainer, call: Call, checkpoints: Path, samplers: Path) -> dict[str, Any]:
    """The result that the client gets. UsageError: the call is wrong, and nothing has changed.

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
                directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                trainer.save(model, directory, optimizer=True)
            return {"type": "save_weights", "path": checkpoint_path(model, STATES, body["name"])}
        case "save_weights_for_sampler":
            kept = KEPT_UNNAMED_FULL if body.get("full") else KEPT_UNNAMED
            _export_for_sampling(trainer, model, samplers / model / body["name"], kept)
            saved: dict[str, Any] = {"type": "save_weights_for_sampler"}
            if body.get("sampling_session"):
                return saved | {"sampling_session_id": body["sampling_session"]}
            return saved | {"path": checkpoint_path(model, SAMPLERS, body["name"])}
        case "load_weights":
            of_model, name = parse_path(body["path"])
            name = body.get("copy", name)
            if body["create"]:
                trainer.create(model, adapter_spec(body["lora_config"]), call.number)
            try:
                trainer.load(model, checkpoints / of_model / name, optimizer=body["optimizer"])
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
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        trainer.save(model, directory, optimizer=False)
    for old in sorted(directory.parent.glob(f"{_UNNAMED}*"))[:-kept]:
        shutil.rmtree(old, ignore_errors=True)
