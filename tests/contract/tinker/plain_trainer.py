"""A served trainer in plain torch, for tests of what stands before one: its model is a table of logits, a row a token.

Deterministic, bit for bit over snapshot and restore.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from rltool.algorithms.named_losses import check_loss, named_token_losses
from rltool.errors import UsageError
from rltool.training.served import AdamParams, AdapterSpec, Datum, ServedTrainer, StepOutput

VOCAB = 16


class PlainTrainer(ServedTrainer):
    def __init__(self) -> None:
        self.models: dict[str, dict[str, torch.Tensor]] = {}
        self.held: torch.Tensor | None = None

    def create(self, name: str, adapter: AdapterSpec | None, seed: int) -> None:
        if name in self.models:
            raise UsageError(f"model {name!r} is there already")
        weights = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))
        self.models[name] = {"weights": weights} | {
            each: torch.zeros_like(weights) for each in ("gradient", "mean", "square")
        }

    def forward(
        self, name: str, data: Sequence[Datum], loss: str, loss_config: Mapping[str, float], *, backward: bool
    ) -> StepOutput:
        model = self._model(name)
        settings = check_loss(loss, list(data[0].inputs), loss_config)
        weights = model["weights"].clone().requires_grad_()
        table, logprobs, losses = weights.log_softmax(-1), [], []
        for datum in data:
            found = table[torch.from_numpy(datum.tokens), torch.from_numpy(datum.targets)]
            inputs = {"weights": torch.ones(len(found))}
            inputs |= {key: torch.from_numpy(value) for key, value in datum.inputs.items()}
            sample = torch.zeros(len(found), dtype=torch.int64)
            losses.append(named_token_losses(loss, found, inputs, sample, 1, settings))
            logprobs.append(found)
        if backward:
            [gradient] = torch.autograd.grad(torch.cat(losses).sum(), weights)
            model["gradient"] = model["gradient"] + gradient
        metrics = {"loss_sum": float(torch.cat(losses).detach().sum()), "num_tokens": float(sum(map(len, logprobs)))}
        shown = [tuple(each.detach().numpy() for each in rows) for rows in (logprobs, losses)]
        return StepOutput(shown[0], shown[1], metrics)

    def optim_step(self, name: str, adam: AdamParams) -> Mapping[str, float]:
        model = self._model(name)
        gradient = model["gradient"]
        model["mean"] = adam.beta1 * model["mean"] + (1 - adam.beta1) * gradient
        model["square"] = adam.beta2 * model["square"] + (1 - adam.beta2) * gradient**2
        model["weights"] = model["weights"] - adam.learning_rate * model["mean"] / (model["square"].sqrt() + 1e-8)
        model["gradient"] = torch.zeros_like(gradient)
        return {"grad_norm": float(gradient.norm()), "skipped": 0.0}

    def save(self, name: str, directory: Path, *, optimizer: bool) -> None:
        self._write(self._model(name), directory)

    def load(self, name: str, directory: Path, *, optimizer: bool) -> None:
        held = torch.load(directory / "state.pt", weights_only=True)
        if not optimizer:
            held |= {each: torch.zeros_like(held["weights"]) for each in ("mean", "square")}
        self._model(name).update(held | {"gradient": torch.zeros_like(held["weights"])})

    def put_in(self, directory: Path) -> None:
        if not directory.is_dir():
            raise UsageError(f"{directory} is not there")
        self.held = torch.load(directory / "state.pt", weights_only=True)["weights"]

    def put_back(self) -> None:
        self.held = None

    def drop(self, name: str) -> None:
        del self.models[name]

    def snapshot(self, directory: Path) -> None:
        self._write(self.models, directory)

    def restore(self, directory: Path) -> None:
        self.models = torch.load(directory / "state.pt", weights_only=True)

    def _model(self, name: str) -> dict[str, torch.Tensor]:
        if name not in self.models:
            raise UsageError(f"there is no model {name!r}")
        return self.models[name]

    @staticmethod
    def _write(state: object, directory: Path) -> None:
        partial = directory.with_name(directory.name + ".partial")
        partial.mkdir(exist_ok=True)
        torch.save(state, partial / "state.pt")
        os.rename(partial, directory)
