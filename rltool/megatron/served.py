"""One rank of a served trainer: models in training over one base, each with gradients and an optimizer of its own.

An adapter model is a set of modules beside the base's, with Megatron's gradient buffers and optimizer around them, as
`train` builds its one. To change the model in use is to hang these into the base: nothing is copied, and each model
computes as if it were alone. Memory of an adapter model: 16 bytes a parameter of the adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from rltool.algorithms.batch import TrainBatch
from rltool.algorithms.named_losses import FIELDS, named_token_losses
from rltool.algorithms.ragged import sample_of_token
from rltool.config.algorithm import AlgorithmConfig
from rltool.config.sections import LoraConfig, ModelConfig, OptimizerConfig, TrainerConfig
from rltool.megatron import optimizer as optim
from rltool.megatron.export_plan import ExportPlan, adapter_plan
from rltool.megatron.lora import Adapters
from rltool.megatron.micro_batch import MicroBatch
from rltool.megatron.runtime import Rendezvous, in_megatron, to_device
from rltool.megatron.trainer import MegatronTrainer, TrainingRun
from rltool.models.adapters import PART


@dataclass
class _Model:
    """What is hung into the base. adapters, plan None: its own weights are trained. gradient: one was added up."""

    lora: LoraConfig
    seed: int
    adapters: Adapters | None
    plan: ExportPlan | None
    ddp: Any
    optimizer: Any
    schedule: Any
    gradient: bool = False


class ServedModel(MegatronTrainer):
    """The base model, and the models over it. What a MegatronTrainer does, it does with the model in use (`use`)."""

    def __init__(self, model: ModelConfig, trainer: TrainerConfig, rendezvous: Rendezvous) -> None:
        self._models: dict[str, _Model] = {}
        self._in_use: str | None = None
        self._trainable: list[torch.nn.Parameter] = []
        self._put_in = False
        algorithm = AlgorithmConfig(loss="sft")
        super().__init__(model, trainer, OptimizerConfig(), algorithm, rendezvous, TrainingRun(1))

    def build(self) -> GPTModel:
        model = super().build()
        self._trainable = [p for p in model.parameters() if p.requires_grad]
        model.requires_grad_(False)
        return model

    def _build_optimizer(self, total_optimizer_steps: int) -> None:
        """Of models, in `create`: the base has none."""
        self.ddp = cast(Any, self.gpt)

    def weights_changed(self, *, initial: bool = False) -> None:
        if self._in_use is not None:
            super().weights_changed(initial=initial)

    # -- models

    def use(self, name: str | None) -> None:
        """Everything else is about this model from now on; None: about the base."""
        if name == self._in_use:
            return
        if self.adapters is not None:
            self.adapters.remove(self.gpt)
        found = _Model(LoraConfig(), 0, None, None, self.gpt, None, None) if name is None else self._models[name]
        if found.adapters is not None:
            found.adapters.install(self.gpt)
        self.lora, self.adapters, self.own_part = found.lora, found.adapters, PART if found.adapters else None
        self.ddp, self.optimizer, self.schedule = found.ddp, found.optimizer, found.schedule
        self.adapter_plan = found.plan
        if name is not None and found.ddp.ddp_config.overlap_grad_reduce:
            self.gpt.config.no_sync_func = found.ddp.no_sync
        self._in_use = name

    @in_megatron
    def create(self, name: str, lora: LoraConfig, seed: int) -> None:
        """lora.rank 0: all weights are trained. UsageError where the model has no such adapters."""
        self.use(None)
        adapters = Adapters(self.gpt, self.family, lora, self.coordinates, seed) if lora.rank else None
        for p in () if adapters else self._trainable:
            p.requires_grad_(True)
        # What _build_optimizer wraps and asks for; `use` puts in the rest.
        self.adapters = adapters
        if adapters is not None:
            adapters.install(self.gpt)
        super()._build_optimizer(1)
        plan = adapter_plan(self.family, lora, str(self.model_path)) if adapters else None
        self._models[name] = _Model(lora, seed, adapters, plan, self.ddp, self.optimizer, self.schedule)
        if adapters is not None:
            adapters.remove(self.gpt)
        self.adapters = None
        self.use(name)

    @in_megatron
    def put_in(self, load: Callable[[], None]) -> None:
        """What `load` writes into the model stands in it, until `put_back`; the model's weights wait on the CPU. There
        are no adapters beside it. Where `load` raises, they are back."""
        assert self.adapters is None and not self._put_in
        self._waiting["policy"] = self._copy_of_weights("policy", self._waiting.get("policy"))
        self._put_in = True
        try:
            load()
        except BaseException:
            self.put_back()
            raise

    @in_megatron
    def put_back(self) -> None:
        if self._put_in:
            self._put_weights(self._waiting["policy"])
            self._put_in = False

    @torch.no_grad()
    def forget_optimizer(self) -> None:
        """The optimizer of the model in use has made no step."""
        for inner in _inner(self._model):
            for group in inner.param_groups:
                group.pop("step", None)
            for state in inner.state.values():
                for moment in state.values():
                    moment.zero_()

    def forget_gradients(self) -> None:
        """Of the model in use."""
        self.discard_gradients()
        self._model.gradient = False

    def drop(self, name: str) -> bool:
        """Returns whether the base has other weights now than those that were loaded."""
        self.use(None)
        model = self._models.pop(name)
        full = model.adapters is None
        # Which have the hooks of Megatron's wrapper, that would run beside those of the parameters' next wrapper.
        model.ddp.grad_accs.clear()
        for p in self._trainable if full else ():
            p.requires_grad_(False)
            cast(Any, p).main_grad = None
            del cast(Any, p).main_grad
        return full

    @property
    def names(self) -> list[str]:
        return list(self._models)

    @property
    def _model(self) -> _Model:
        assert self._in_use is not None, "use comes first"
        return self._models[self._in_use]

    # -- training

    @in_megatron
    def add_gradients(
        self, micro_batches: list[TrainBatch], loss: str, settings: Mapping[str, float]
    ) -> list[Tensor] | None:
        """Adds the gradient of the sum of a named loss over all data-parallel ranks' micro-batches to the model's.

        Ranks, micro-batches and result as for `compute_logprobs`; the log-probabilities are those of target_ids.
        """

        def loss_of(micro: MicroBatch, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, Any]]:
            batch, rows = micro.batch, micro.rows
            values = {name: getattr(batch, field) for name, field in FIELDS.items()}
            inputs = {n: to_device(v[rows], logprobs.device) for n, v in values.items() if v is not None}
            sample = to_device(sample_of_token(batch.lengths)[rows], logprobs.device)
            return named_token_losses(loss, logprobs, inputs, sample, batch.num_samples, settings).sum(), {}

        model = self._model
        # The end of a backward pass sums over ranks: what was summed already stays out of it.
        before = [buffer.grad_data.clone() for buffer in self._buffers()] if model.gradient else None
        rows, _ = self._gradients(micro_batches, loss_of, [], global_loss_tokens=1)
        for buffer, earlier in zip(self._buffers(), before or (), strict=before is not None):
            buffer.grad_data.add_(earlier)
        model.gradient = True
        return [values.cpu() for values in rows] if self.coordinates.returns_logprobs else None

    def _buffers(self) -> list[Any]:
        return [*self.ddp.buffers, *self.ddp.expert_parallel_buffers]

    @in_megatron
    def adam_step(self, adam: Mapping[str, float]) -> dict[str, float]:
        """One step with the gradient that was added up, by the fields of training.served.AdamParams; then it is 0.

        Returns grad_norm and skipped, as ServedTrainer.optim_step, equal on all ranks.
        """
        for group in self.optimizer.param_groups:
            group["lr"], group["weight_decay"] = adam["learning_rate"], adam["weight_decay"]
            group["betas"], group["eps"] = (adam["beta1"], adam["beta2"]), adam["eps"]
        for each in (self.optimizer, *getattr(self.optimizer, "chained_optimizers", ())):
            each.config.clip_grad = adam["grad_clip_norm"]
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        (skip,) = self.runtime.max_over_world([float(not torch.isfinite(torch.tensor(norm)))])
        if not skip:
            self.optimizer.step()
        self.forget_gradients()
        return {"grad_norm": norm, "skipped": skip}

    # -- everything, bit for bit

    @in_megatron
    def save_all(self, path: Path) -> None:
        """This rank's part of all models."""
        models: list[dict[str, Any]] = []
        for name, model in self._models.items():
            self.use(name)
            models.append(
                {"name": name, "lora": model.lora.model_dump(mode="json"), "seed": model.seed,
                 "gradient": [buffer.grad_data for buffer in self._buffers()] if model.gradient else None,
                 "weights": [p.detach() for p in self.gpt.parameters() if p.requires_grad], **_optimizer_state(model)}
            )  # fmt: skip
        with path.open("wb") as file:  # torch's own file does not say why it fails
            torch.save({"layout": repr(self.coordinates), "models": models}, file)

    @in_megatron
    def load_all(self, path: Path) -> None:
        """The inverse, on a rank that has no models."""
        assert not self._models
        loaded = torch.load(path, map_location="cpu", weights_only=True)
        if loaded["layout"] != repr(self.coordinates):
            raise RuntimeError(f"{path} is of another layout of ranks: {loaded['layout']}, not {self.coordinates!r}")
        for saved in loaded["models"]:
            self.create(saved["name"], LoraConfig.model_validate(saved["lora"]), saved["seed"])
            model = self._model
            trained = [p for p in self.gpt.parameters() if p.requires_grad]
            _copy(trained, saved["weights"])
            _restore_optimizer(model, saved)
            if saved["gradient"] is not None:
                _copy([buffer.grad_data for buffer in self._buffers()], saved["gradient"])
                model.gradient = True


def _inner(model: _Model) -> list[Any]:
    """The optimizers that update tensors: of a rank that has none of a kind, none."""
    every = getattr(model.optimizer, "chained_optimizers", [model.optimizer])
    return [each.optimizer for each in every if each.optimizer is not None]


def _optimizer_state(model: _Model) -> dict[str, Any]:
    """What Megatron's own state dicts leave to checkpoints: the updated tensors and their moments, by position."""
    groups = [group for each in _inner(model) for group in each.param_groups]
    states = [each.state.get(p, {}) for each in _inner(model) for g in each.param_groups for p in g["params"]]
    return {
        "groups": [{key: value for key, value in group.items() if key != "params"} for group in groups],
        "updated": [p.detach() for group in groups for p in group["params"]],
        "moments": [dict(state) for state in states],
    }


def _restore_optimizer(model: _Model, saved: Mapping[str, Any]) -> None:
    if any(saved["moments"]):
        optim.make_moments(model.optimizer)
    groups = [group for each in _inner(model) for group in each.param_groups]
    for group, values in zip(groups, saved["groups"], strict=True):
        group.update(values)
    _copy([p for group in groups for p in group["params"]], saved["updated"])
    states = [each.state.get(p, {}) for each in _inner(model) for g in each.param_groups for p in g["params"]]
    for state, values in zip(states, saved["moments"], strict=True):
        _copy([state[key] for key in values], list(values.values()))


@torch.no_grad()
def _copy(places: list[Any], values: list[Tensor]) -> None:
    for place, value in zip(places, values, strict=True):
        place.copy_(value)
