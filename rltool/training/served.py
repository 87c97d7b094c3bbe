"""The trainer as `serve-trainer` drives it: named models, each driven call by call, over the ranks that `train` has.

A model is an adapter beside the base model, or the base model's own weights. Calls on different models may alternate in
any way: each model computes as if it were alone. A served trainer is driven by one caller at a time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from rltool.algorithms.batch import TrainBatch
from rltool.algorithms.named_losses import FIELDS, check_loss, named_token_losses
from rltool.checkpoints import directory as directories
from rltool.config.sections import LoraConfig, LoraTarget
from rltool.errors import UsageError

Values = np.ndarray[Any, Any]


@dataclass(frozen=True)
class AdapterSpec:
    """Of a model's adapter. rank: >= 1; what it adds is multiplied with alpha / rank; targets: as lora.targets."""

    rank: int
    alpha: float = 32.0
    targets: Literal["all-linear"] | tuple[LoraTarget, ...] = "all-linear"


@dataclass(frozen=True)
class AdamParams:
    """Of one optimizer step. AdamW (Loshchilov and Hutter 2019): decay is decoupled, and of every parameter.

    grad_clip_norm: limit of the global norm of the gradient; 0 does not clip. Defaults are those of tinker's client.
    """

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True)
class Datum:
    """One sequence. The state after token i predicts targets[i].

    tokens, targets: [n] int64, n >= 1; inputs: by name [n] float32, of the loss (algorithms/named_losses.py)
    """

    tokens: Values
    targets: Values
    inputs: Mapping[str, Values] = field(default_factory=dict[str, Values])


@dataclass(frozen=True)
class StepOutput:
    """Of each datum, in the order of the data: logprobs, elementwise_loss: [n] float32, log-probability and loss of
    each target (in the sum of losses it has its weight already).

    metrics: loss_sum, the loss itself, and num_tokens, of targets
    """

    logprobs: tuple[Values, ...]
    elementwise_loss: tuple[Values, ...]
    metrics: Mapping[str, float]


class ServedTrainer(Protocol):
    """DiskFull (nothing has changed, and nothing of its name is there) of `save` and `snapshot`.
    UsageError (nothing has changed then) for a model that is not there or is there already, data and settings that
    do not fit, and what is not supported, by name. PartLost and other errors: the ranks are of no more use; start
    others and `restore` them."""

    def create(self, name: str, adapter: AdapterSpec | None, seed: int) -> None:
        """A model as the base model: A drawn by seed, B 0. adapter None: all weights are trained; then it is the only
        model there may be."""
        ...

    def forward(
        self, name: str, data: Sequence[Datum], loss: str, loss_config: Mapping[str, float], *, backward: bool
    ) -> StepOutput:
        """Log-probabilities of the targets and the sum of losses. backward: its gradient is added to the model's."""
        ...

    def optim_step(self, name: str, adam: AdamParams) -> Mapping[str, float]:
        """One step with the gradient that has been added up since the last, which is 0 then.

        Returns grad_norm, before clipping, and skipped: 1 where the gradient was not finite, and nothing but the
        gradient has changed.
        """
        ...

    def save(self, name: str, directory: Path, *, optimizer: bool) -> None:
        """A checkpoint, as those of `train`. optimizer: with Adam's moments; gradients are in `snapshot` alone. Without
        it what engines take: an adapter in peft's format, or all weights in Hugging Face's."""
        ...

    def load(self, name: str, directory: Path, *, optimizer: bool) -> None:
        """Into a model of the same kind. optimizer: Adam's state too, else it begins anew. Gradients are dropped."""
        ...

    def put_in(self, directory: Path) -> None:
        """The weights of a directory stand in the place of the model's, for a sync, until `put_back`; the model, its
        optimizer and gradients stay what they are. Where adapters are trained there is no such thing."""
        ...

    def put_back(self) -> None: ...

    def drop(self, name: str) -> None:
        """Forgets the model."""
        ...

    def snapshot(self, directory: Path) -> None:
        """Everything, bit for bit: all models with moments and gradients. The directory appears whole or not at all."""
        ...

    def restore(self, directory: Path) -> None:
        """In place of all models those of a snapshot, by ranks of the same layout and base model."""
        ...


class Ranks(Protocol):
    """What is asked of the ranks: a TrainerGroup with served ranks, whose weights are loaded."""

    def call(self, method: str, *arguments: Any, **named: Any) -> list[Any]: ...

    def call_on_shards(
        self, batch: TrainBatch, method: str, *arguments: Any, forward_only: bool = False
    ) -> Tensor: ...


@dataclass
class _Known:
    """Of a model. rank 0: all weights. steps: of its optimizer."""

    lora: LoraConfig
    seed: int
    steps: int = 0


MODELS = "models.json"
"""In a snapshot, beside the ranks' files: what the driver knows."""


class RankedTrainer(ServedTrainer):
    """Over trainer ranks.

    vocab_size: of the model; max_tokens: of a micro-batch (TrainerConfig.micro_batch_tokens).
    """

    def __init__(self, ranks: Ranks, *, vocab_size: int, max_tokens: int) -> None:
        self._ranks, self._vocab_size, self._max_tokens = ranks, vocab_size, max_tokens
        self._models: dict[str, _Known] = {}

    def create(self, name: str, adapter: AdapterSpec | None, seed: int) -> None:
        if name in self._models:
            raise UsageError(f"model {name!r} is there already")
        full = next((other for other, known in self._models.items() if not known.lora.rank), None)
        if full is not None:
            raise UsageError(f"model {full!r} trains all weights, so there can be no other beside it; drop it first")
        if adapter is None and self._models:
            raise UsageError(
                f"model {name!r} would train all weights, which the adapters {', '.join(map(repr, self._models))} "
                "stand beside; drop these first, or give it a rank"
            )
        if adapter is None:
            lora = LoraConfig()
        elif adapter.rank < 1 or not 0 < adapter.alpha < math.inf:
            raise UsageError(
                f"model {name!r}: rank is {adapter.rank} and alpha {adapter.alpha:g}, expected a rank of at least 1 "
                "and an alpha above 0"
            )
        else:
            lora = LoraConfig(rank=adapter.rank, alpha=adapter.alpha, targets=adapter.targets)
        self._ranks.call("create", name, lora, seed)
        self._models[name] = _Known(lora, seed)

    def forward(
        self, name: str, data: Sequence[Datum], loss: str, loss_config: Mapping[str, float], *, backward: bool
    ) -> StepOutput:
        self._known(name)
        settings = self._checked(data, loss, loss_config)
        batch = batch_of(data)
        if backward:
            rows = self._ranks.call_on_shards(batch, "add_gradients", name, loss, settings)
        else:
            rows = self._ranks.call_on_shards(batch, "logprobs", name, forward_only=True)
        targets = batch.loss_mask.nonzero().squeeze(-1)
        logprobs = rows[targets]
        sizes = [len(datum.tokens) for datum in data]
        values = {n: getattr(batch, field) for n, field in FIELDS.items()}
        inputs = {n: value[targets] for n, value in values.items() if value is not None}
        sample = torch.repeat_interleave(torch.arange(len(data)), torch.tensor(sizes))
        losses = named_token_losses(loss, logprobs, inputs, sample, len(data), settings)

        def cut(values: Tensor) -> tuple[Values, ...]:
            return tuple(part.numpy() for part in values.split(sizes))

        metrics = {"loss_sum": float(losses.double().sum()), "num_tokens": float(len(targets))}
        return StepOutput(cut(logprobs), cut(losses), metrics)

    def optim_step(self, name: str, adam: AdamParams) -> Mapping[str, float]:
        known, values = self._known(name), asdict(adam)
        for key, value in values.items():
            below_one = key in ("beta1", "beta2")
            if not math.isfinite(value) or value < 0 or (below_one and value >= 1):
                raise UsageError(f"{key} is {value}, expected {'0 <= x < 1' if below_one else 'at least 0'}")
        metrics: dict[str, float] = self._ranks.call("adam_step", name, values)[0]
        known.steps += not metrics["skipped"]
        return metrics

    def save(self, name: str, directory: Path, *, optimizer: bool) -> None:
        known = self._known(name)
        directories.refuse_existing(directory)
        self._ranks.call("save", name, directory, optimizer=optimizer, step=known.steps)

    def load(self, name: str, directory: Path, *, optimizer: bool) -> None:
        known = self._known(name)
        if not directory.is_dir():
            raise UsageError(f"{directory} is not there")
        known.steps = self._ranks.call("load", name, directory, optimizer=optimizer)[0]

    def put_in(self, directory: Path) -> None:
        if any(known.lora.rank for known in self._models.values()):
            raise UsageError("adapters are trained here, so the model beside them stays what it is")
        if not directory.is_dir():
            raise UsageError(f"{directory} is not there")
        self._ranks.call("put_in", directory)

    def put_back(self) -> None:
        self._ranks.call("put_back")

    def drop(self, name: str) -> None:
        self._known(name)
        self._ranks.call("drop", name)
        del self._models[name]

    def snapshot(self, directory: Path) -> None:
        described = {
            name: {"lora": known.lora.model_dump(mode="json"), "seed": known.seed, "steps": known.steps}
            for name, known in self._models.items()
        }
        self._ranks.call("snapshot", directory, {MODELS: json.dumps(described)})

    def restore(self, directory: Path) -> None:
        described = json.loads((directory / MODELS).read_text(encoding="utf-8"))
        self._ranks.call("restore", directory)
        self._models = {
            name: _Known(LoraConfig.model_validate(known["lora"]), known["seed"], known["steps"])
            for name, known in described.items()
        }

    def _known(self, name: str) -> _Known:
        if name not in self._models:
            raise UsageError(f"there is no model {name!r}; there are: {', '.join(self._models) or 'none'}")
        return self._models[name]

    def _checked(self, data: Sequence[Datum], loss: str, loss_config: Mapping[str, float]) -> dict[str, float]:
        """The loss's settings. UsageError for data that cannot be computed."""
        if not data:
            raise UsageError("there is no datum")
        settings = check_loss(loss, list(data[0].inputs), loss_config)
        for i, datum in enumerate(data):
            size = len(datum.tokens)
            if list(datum.inputs) != list(data[0].inputs):
                check_loss(loss, list(datum.inputs), loss_config)
            if not 0 < size < self._max_tokens:
                raise UsageError(
                    f"datum {i} has {size} tokens, expected 1 to {self._max_tokens - 1}; more need a higher "
                    "trainer.max_tokens_per_micro_batch"
                )
            for what, values in {"model_input": datum.tokens, "target_tokens": datum.targets, **datum.inputs}.items():
                if values.shape != (size,):
                    raise UsageError(f"datum {i}: {what} has shape {values.shape}, expected ({size},), as model_input")
                if not np.isfinite(values).all():
                    raise UsageError(f"datum {i}: {what} is not finite everywhere")
                if what == "sequence_ratio_mask" and not values.any():
                    raise UsageError(f"datum {i}: {what} marks no token, so there is no ratio")
            for what, values in {"model_input": datum.tokens, "target_tokens": datum.targets}.items():
                if values.min() < 0 or values.max() >= self._vocab_size:
                    raise UsageError(f"datum {i}: {what} has tokens outside of the vocabulary of {self._vocab_size}")
        return settings


def batch_of(data: Sequence[Datum]) -> TrainBatch:
    """The data as ranks compute them: one token more each, the last target, for a batch's values stand at the tokens
    that they are about. Weights that a datum lacks, and others have, are 1."""

    def joined(dtype: torch.dtype, rows: Sequence[Values]) -> Tensor:
        return torch.from_numpy(np.concatenate(rows)).to(dtype)

    def behind(dtype: torch.dtype, rows: Sequence[Values]) -> Tensor:
        """Rows of a value for each target, behind a 0 for the first token."""
        return joined(dtype, [part for row in rows for part in (row[:1] * 0, row)])

    ones = [np.ones(len(datum.tokens), np.float32) for datum in data]
    given = {name for datum in data for name in datum.inputs} | {"weights"}
    fields: dict[str, Any] = {
        FIELDS[name]: behind(torch.float32, [d.inputs.get(name, one) for d, one in zip(data, ones, strict=True)])
        for name in given
    }
    return TrainBatch(
        tokens=joined(torch.int64, [part for datum in data for part in (datum.tokens, datum.targets[-1:])]),
        target_ids=behind(torch.int64, [datum.targets for datum in data]),
        lengths=torch.tensor([len(datum.tokens) + 1 for datum in data]), loss_mask=behind(torch.float32, ones),
        rewards=torch.zeros(len(data)), group_ids=torch.arange(len(data)), **fields,
    )  # fmt: skip
