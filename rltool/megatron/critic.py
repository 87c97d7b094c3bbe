"""The critic of PPO: a Megatron model of its own with one value per token, trained beside the policy on the same ranks.

It shares the policy's runtime and layout, and nothing else: weights, gradients, optimizer and schedule are its own, and so is
the memory for them. Its weights never leave the trainer. Everything here is collective, as in `MegatronTrainer`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor, nn

from rltool.algorithms.batch import TrainBatch
from rltool.algorithms.gae import value_is_clipped, value_loss
from rltool.config.train import AlgorithmConfig, CriticConfig, OptimizerConfig
from rltool.megatron import hf_weights, loss
from rltool.megatron.collectives import sum_over_context_ranks
from rltool.megatron.micro_batch import MicroBatch, prepare
from rltool.megatron.model import build_model, output_hidden_states
from rltool.megatron.runtime import to_device
from rltool.megatron.trained import TrainedModel, in_row
from rltool.megatron.trainer import MegatronTrainer, in_megatron
from rltool.models.base import EMBEDDING, HEAD, Family
from rltool.models.registry import family_for, read_hf_config

HEAD_NAME = "output_layer"
"""Attribute of the model that holds the head, in the place of the vocabulary's: Megatron's state dict insists on a weight there."""
STATE_PREFIX = "critic."
"""Before the names of its tensors in a checkpoint, where the policy's stand beside them."""


class ValueHead(nn.Module):
    """hidden [R, hidden] -> values [R] float32. Starts at 0. It is tiny: every tensor-parallel rank holds all of it."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(1, dtype=dtype))

    def values(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden.float(), self.weight.float(), self.bias.float()).squeeze(-1)


def build_value_model(family: Family, trainer: MegatronTrainer) -> GPTModel:
    """The family's model with a value head in place of the vocabulary's. Its last stage gives hidden states."""
    model = build_model(_untied(family), trainer.coordinates, trainer.dtype, trainer.runtime.device, trainer.config)
    if model.post_process:
        model.output_layer = ValueHead(family.transformer["hidden_size"], trainer.dtype).to(trainer.runtime.device)
    output_hidden_states(model)
    return model


def _untied(family: Family) -> Family:
    """Without a vocabulary head the embedding is tied to nothing: Megatron would hold it twice, on the first and the last stage."""
    if not family.tied_embeddings:
        return family
    head = replace(family.parameter(EMBEDDING), name=HEAD)
    return replace(family, tied_embeddings=False, parameters=(*family.parameters, head))


class Critic:
    """The critic of one rank. After construction: `load_weights` or `restore`, then anything else."""

    def __init__(
        self, trainer: MegatronTrainer, config: CriticConfig, optimizer: OptimizerConfig, algorithm: AlgorithmConfig, *, total_optimizer_steps: int
    ) -> None:
        """trainer: the policy of this rank, whose runtime, layout and dtype the critic takes. optimizer: the policy's, for what
        `config` does not say. UsageError when critic.path names a model that cannot be built in this layout."""
        self.runtime, self.config, self.algorithm = trainer.runtime, trainer.config, algorithm
        self.path = config.path or trainer.model_path
        self.family = family_for(read_hf_config(self.path))
        with self.runtime.mode():
            gpt = build_value_model(self.family, trainer)
            own = OptimizerConfig(
                lr=config.lr, clip_grad=config.clip_grad, weight_decay=optimizer.weight_decay, beta1=optimizer.beta1, beta2=optimizer.beta2, eps=optimizer.eps
            )
            self.trained = TrainedModel(gpt, own, self.runtime, trainer.dtype, trainer.config, total_optimizer_steps=total_optimizer_steps)

    @property
    def gpt(self) -> GPTModel:
        return self.trained.gpt

    @in_megatron
    def load_hf_weights(self, path: Path) -> None:
        """All but the value head from a Hugging Face directory of `family`; the head stays as it is. Errors of `hf_weights.load_hf`."""
        hf_weights.load_hf(self.gpt, self.family, path, self.runtime, without=HEAD_NAME)
        self.weights_changed()

    def weights_changed(self) -> None:
        """After the parameters were overwritten: refreshes fp32 master weights."""
        self.trained.optimizer.reload_model_params()

    @in_megatron
    @torch.no_grad()
    def compute_values(self, micro_batches: list[TrainBatch]) -> list[Tensor] | None:
        """Per micro-batch [T] float32 on the CPU: the value of the state in which tokens[t] was chosen, 0 where there is no loss.

        micro_batches and the ranks that get None: as for `MegatronTrainer.compute_logprobs`.
        """

        def result(micro: MicroBatch, hidden: Tensor, non_loss_data: bool = True) -> Tensor:
            return in_row(micro, self._values(micro, hidden))

        results = self.trained.run(self._prepare(micro_batches), result, forward_only=True)
        return [values.cpu() for values in results] if self.runtime.coordinates.returns_logprobs else None

    @in_megatron
    def train_step(self, micro_batches: list[TrainBatch], *, global_loss_tokens: int) -> dict[str, float]:
        """One optimizer step on the mean clipped value loss over all loss tokens of the global batch.

        micro_batches: as for `MegatronTrainer.forward_backward`, with `values` and `value_targets`. Returns train/value_loss,
        train/value_clip_fraction, train/critic_grad_norm, train/critic_lr and train/critic_skipped, equal on all ranks.
        """
        at = self.runtime.coordinates

        def step_loss(micro: MicroBatch, hidden: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
            values = self._values(micro, hidden)
            count = torch.zeros((), dtype=torch.int)
            if len(micro.rows) == 0:
                # Still part of the graph: earlier pipeline stages wait for this micro-batch's gradient.
                return values.sum() * 0.0, count, None
            old, targets = (to_device(field[micro.rows], values.device) for field in _fields(micro.batch))
            total = value_loss(values, old, targets, clip=self.algorithm.value_clip).sum()
            clipped = value_is_clipped(values.detach(), old, targets, clip=self.algorithm.value_clip)
            return total / global_loss_tokens, count, (total.detach(), clipped.sum())

        if global_loss_tokens < 1:
            raise ValueError(f"global_loss_tokens is {global_loss_tokens}: a global batch without loss tokens cannot train")
        self.trained.discard_gradients()
        sums = [entry for entry in self.trained.run(self._prepare(micro_batches), step_loss, forward_only=False) if entry is not None]
        local = [math.fsum(float(entry[i]) for entry in sums) if at.returns_logprobs else 0.0 for i in (0, 1)]
        value_total, clipped = self.runtime.sum_over_world(local)
        metrics = {"train/value_loss": value_total / global_loss_tokens, "train/value_clip_fraction": clipped / global_loss_tokens}
        measured, made = self.trained.step(value_total)
        metrics |= {f"train/critic_{name}": value for name, value in measured.items()}
        return metrics | {"train/critic_skipped": float(not made)}

    def _prepare(self, micro_batches: list[TrainBatch]) -> list[MicroBatch]:
        at, device, cut = self.runtime.coordinates, self.runtime.device, self.config.sequence_parallel
        return [prepare(batch, loss.loss_rows(batch), at, device, sequence_parallel=cut) for batch in micro_batches]

    def _values(self, micro: MicroBatch, hidden: Tensor) -> Tensor:
        """Values of micro.rows, [R] float32, the same on all ranks of a replica's last stage. hidden: as for log-probabilities."""
        if self.config.sequence_parallel:
            # Each rank goes on to the whole loss by a head of its own: the gradient that reaches here is already the whole one.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        values = self.gpt.output_layer.values(hidden[micro.sources])
        if self.runtime.coordinates.cp_size == 1:
            return values
        spread = values.new_zeros(len(micro.rows))
        spread = spread.index_copy(0, micro.held, values) if micro.held is not None else values
        return sum_over_context_ranks(spread, self.runtime.cp_group)

    @in_megatron
    def sharded_state(self, *, loading: bool) -> dict[str, Any]:
        """Weights, optimizer and schedule under names of their own, to stand beside the policy's in one checkpoint."""
        state = self.trained.sharded_state(loading=loading)
        add_prefix_for_sharding(state, STATE_PREFIX)
        return state

    @in_megatron
    def restore(self, loaded: dict[str, Any]) -> None:
        """The inverse of `sharded_state`."""
        self.trained.restore(loaded)

    @in_megatron
    def parameter_hash(self) -> str:
        """As the policy's."""
        return self.trained.parameter_hash()


def _fields(batch: TrainBatch) -> tuple[Tensor, Tensor]:
    if batch.values is None or batch.value_targets is None:
        raise ValueError("TrainBatch.values or value_targets is None, but the critic needs both")
    return batch.values, batch.value_targets
