"""What `rltool models PATH` says of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rltool.config.loader import load_config
from rltool.config.sections import LoraConfig, TrainerConfig
from rltool.config.train import TrainConfig
from rltool.errors import UsageError
from rltool.models.base import Family
from rltool.models.hub import local_model
from rltool.models.memory import (
    BESIDE_BYTES,
    GIB,
    USED,
    EngineBytes,
    Parameters,
    RankMemory,
    engine_bytes,
    fitting_layout,
    parameters_of,
    training_memory,
)
from rltool.models.registry import family_for, read_hf_config


@dataclass(frozen=True)
class Asked:
    """gpus: of the trainer; gpu_bytes: of each; tokens: of a micro-batch; settings: `trainer.KEY=VALUE` of a layout;
    none: one that fits is looked for. lora_rank: of adapters that are trained in place of the weights; 0: none."""

    gpus: int
    gpu_bytes: int
    tokens: int
    dtype: str
    settings: tuple[str, ...] = ()
    lora_rank: int = 0

    @property
    def lora(self) -> LoraConfig:
        return LoraConfig(rank=self.lora_rank)


@dataclass(frozen=True)
class Estimate:
    """refused: why the checkpoint is not supported; then nothing else is known. trainer, training: of the asked layout,
    or of one that fits; None: none fits. serving: of an engine on `engine_gpus` (None: more than eight are needed)."""

    asked: Asked
    refused: str | None = None
    architecture: str | None = None
    parameters: Parameters | None = None
    trainer: TrainerConfig | None = None
    training: RankMemory | None = None
    serving: EngineBytes | None = None
    engine_gpus: int | None = None

    @property
    def fits(self) -> bool:
        return self.training is not None and self.training.total <= USED * self.asked.gpu_bytes

    def as_json(self) -> dict[str, Any]:
        """Sizes in bytes."""
        if self.refused is not None:
            return {"supported": False, "why_not": self.refused}
        training = self.training and asdict(self.training) | {"total": self.training.total}
        return {
            "supported": True,
            "architecture": self.architecture,
            "parameters": self.parameters and asdict(self.parameters),
            "gpus": self.asked.gpus,
            "gpu_bytes": self.asked.gpu_bytes,
            "lora_rank": self.asked.lora_rank,
            "trainer": self.trainer and self._settings(),
            "training": training,
            "fits": self.fits,
            "serving": self.serving and asdict(self.serving) | {"gpus": self.engine_gpus},
        }

    def lines(self) -> Iterator[str]:
        if self.refused is not None:
            yield f"no: {self.refused}"
            return
        assert self.parameters is not None and self.serving is not None
        size, room = self.parameters, f"{self.asked.gpu_bytes / GIB:.0f} GiB"
        yield f"yes: {self.architecture}"
        yield (
            f"parameters  {size.total:,}; a token meets {size.active:,}; {size.embedding:,} are of the vocabulary"
        )
        if self.training is None:
            yield (
                f"training    no layout of {self.asked.gpus} x {room} fits {self.asked.tokens:,} tokens a micro-batch; "
                "more --gpus, or fewer --tokens"
            )
        else:
            held = self.training
            parts = ", ".join(
                f"{name} {getattr(held, name) / GIB:.1f}"
                for name in ("weights", "gradients", "optimizer", "activations", "head")
            )
            of = f", adapters of rank {self.asked.lora_rank}" if self.asked.lora_rank else ""
            yield f"training    {held.total / GIB:.1f} GiB on each GPU at most ({parts}), in {self.asked.dtype}{of}"
            fits = "fits" if self.fits else "does not fit"
            yield f"            {fits} {self.asked.gpus} x {room}, of which a tenth is left free; [trainer] with"
            yield f"            {', '.join(f'{key} = {json.dumps(value)}' for key, value in self._settings().items())}"
        cache, gpus = self.serving, self.engine_gpus
        windowed = f", and {cache.windowed / GIB:.2f} GiB of windows or states a sequence" if cache.windowed else ""
        yield f"serving     weights {cache.weights / GIB:.1f} GiB, KV cache {cache.cache:,} bytes a token{windowed}"
        if gpus is None:
            yield f"            more than eight GPUs of {room} an engine"
        else:
            left = USED * self.asked.gpu_bytes - BESIDE_BYTES - cache.weights / gpus
            many = f"{gpus} GPU{'s' * (gpus > 1)}"
            yield f"            an engine on {many} of {room}: a cache of about {int(left // cache.cache):,} tokens"

    def _settings(self) -> dict[str, Any]:
        """Those of [trainer] that differ from the defaults."""
        assert self.trainer is not None
        shown, defaults = self.trainer.shown(), TrainerConfig().shown()
        given = {key: value for key, value in shown.items() if value != defaults[key]}
        return {"world_size": self.trainer.world_size} | given


def estimate(path: Path, asked: Asked, *, own: str | None = None) -> Estimate:
    """UsageError for a path without a config.json and for a layout that does not exist; a model that is not supported
    is an answer."""
    hf_config = read_hf_config(local_model(path, setting="PATH", files=("config.json",)))
    try:
        family = family_for(hf_config, own)
    except UsageError as error:
        return Estimate(asked, refused=str(error))
    if asked.settings:
        trainer = _trainer(asked)
        found = trainer, training_memory(family, trainer, dtype=asked.dtype, lora=asked.lora)
    else:
        found = fitting_layout(
            family, gpus=asked.gpus, gpu_bytes=asked.gpu_bytes, tokens=asked.tokens, dtype=asked.dtype, lora=asked.lora
        ) or (None, None)
    gpus, serving = _engine(family, asked)
    return Estimate(asked, None, family.architecture, parameters_of(family), *found, serving, gpus)


def _trainer(asked: Asked) -> TrainerConfig:
    flags = {
        "trainer.world_size": ("--gpus", asked.gpus),
        "trainer.max_tokens_per_micro_batch": ("--tokens", asked.tokens),
        "model.path": ("PATH", "."),
    }
    return load_config(TrainConfig, sets=list(asked.settings), flags=flags, rules=()).config.trainer


def _engine(family: Family, asked: Asked) -> tuple[int | None, EngineBytes]:
    """The fewest GPUs that hold weights and something of a cache."""
    heads = family.transformer["num_attention_heads"]
    for gpus in (1, 2, 4, 8):
        found = engine_bytes(family, tensor_parallel=gpus, dtype=asked.dtype)
        if heads % gpus == 0 and found.weights / gpus + BESIDE_BYTES < USED * asked.gpu_bytes:
            return gpus, found
    return None, engine_bytes(family, tensor_parallel=1, dtype=asked.dtype)
