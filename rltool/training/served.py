"""The trainer as `serve-trainer` drives it: named models, each driven call by call, over the ranks that `train` has.

A model is an adapter beside the base model, or the base model's own weights. Calls on different models may alternate in
any way: each model computes as if it were alone. A served trainer is driven by one caller at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from rltool.config.sections import LoraTarget

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
    """UsageError (nothing has changed then) for a model that is not there or is there already, data and settings that
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
        """A checkpoint, as those of `train`. optimizer: with Adam's moments; gradients are in `snapshot` alone."""
        ...

    def load(self, name: str, directory: Path, *, optimizer: bool) -> None:
        """Into a model of the same kind. optimizer: Adam's state too, else it begins anew. Gradients are dropped."""
        ...

    def export_adapter(self, name: str, directory: Path) -> None:
        """A directory in peft's format."""
        ...

    def sync(self, name: str) -> int:
        """The model's whole weights, adapters merged in, to the engines; returns their version."""
        ...

    def drop(self, name: str) -> None:
        """Forgets the model."""
        ...

    def snapshot(self, directory: Path) -> None:
        """Everything, bit for bit: all models with moments and gradients. The directory appears whole or not at all."""
        ...

    def restore(self, directory: Path) -> None:
        """In place of all models those of a snapshot, by ranks of the same layout and base model."""
        ...
