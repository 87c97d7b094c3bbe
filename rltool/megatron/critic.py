"""The critic of PPO: a Megatron model of its own with one value per token, trained beside the policy on the same ranks.

It shares the policy's runtime and layout, and nothing else: weights, gradients, optimizer and schedule are its own, and
so is the memory for them. Its weights never leave the trainer. Everything here is collective, as in `MegatronTrainer`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from rltool.algorithms.batch import TrainBatch
from rltool.algorithms.gae import value_is_clipped, value_loss
from rltool.config.algorithm import CriticConfig
from rltool.config.sections import OptimizerConfig
from rltool.megatron import loss
from rltool.megatron.micro_batch import MicroBatch
from rltool.megatron.model import build_model, output_hidden_states
from rltool.megatron.runtime import in_megatron, to_device
from rltool.megatron.trained import TrainedModel, first_of
from rltool.megatron.trainer import MegatronTrainer
from rltool.models.base import EMBEDDING, HEAD, Family
from rltool.models.registry import family_for, read_hf_config

HEAD_NAME = "output_layer"
"""Attribute of the model that holds the value head: the vocabulary's, as Megatron insists on a weight there."""
STATE_PREFIX = "critic."
"""Before the names of its tensors in a checkpoint, where the policy's stand beside them."""


class ValueHead(nn.Module):
    """hidden [R, hidden] -> values [R] float32. Starts at 0. It is tiny: every tensor-parallel rank holds all of it."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(1, dtype=dtype))

    def values(self, hidden: Tensor) -> Tensor:
        """hidden: [R, hidden]. Returns [R] float32."""
        return nn.functional.linear(hidden.float(), self.weight.float(), self.bias.float()).squeeze(-1)


def _untied(family: Family) -> Family:
    """The family with an embedding of its own.

    Without a vocabulary head it is tied to nothing: Megatron would hold it twice, on the first and the last stage.
    """
    if not family.tied_embeddings:
        return family
    head = replace(family.parameter(EMBEDDING), name=HEAD)
    return replace(family, tied_embeddings=False, parameters=(*family.parameters, head))


class Critic(TrainedModel):
    """The critic of one rank. After construction: `load_hf_weights` or `restore`, then anything else."""

    own_part = HEAD_NAME

    def __init__(self, trainer: MegatronTrainer, config: CriticConfig, *, total_optimizer_steps: int) -> None:
        """trainer: the policy of this rank, whose `setup` the critic takes, but for the optimizer settings in `config`.

        UsageError when critic.path names a model that cannot be built in this layout.
        """
        self.path = config.path or trainer.model_path
        shared = trainer.setup.optimizer
        own = OptimizerConfig(
            lr=config.lr,
            clip_grad=config.clip_grad,
            weight_decay=shared.weight_decay,
            beta1=shared.beta1,
            beta2=shared.beta2,
            eps=shared.eps,
        )
        family = family_for(read_hf_config(self.path), trainer.family.own)
        super().__init__(replace(trainer.setup, optimizer=own), family, total_optimizer_steps=total_optimizer_steps)

    def build(self) -> GPTModel:
        """The family's model with a value head in place of the vocabulary's."""
        model = build_model(_untied(self.family), self.coordinates, self.dtype, self.runtime.device, self.config)
        if model.post_process:
            head = ValueHead(self.family.transformer["hidden_size"], self.dtype).to(self.runtime.device)
            model.output_layer = cast(Any, head)
        output_hidden_states(model)
        return model

    def outputs(self, micro: MicroBatch, hidden: Tensor) -> tuple[Tensor, ...]:
        """Values of micro.rows."""
        # Each rank goes on to the whole loss by a head of its own: what comes back is already the whole gradient.
        states = self._states(micro, hidden, gradient_in_parts=False)
        return self._on_all_context_ranks(micro, cast(ValueHead, self.gpt.output_layer).values(states))

    @in_megatron
    @torch.no_grad()
    def compute_values(self, micro_batches: list[TrainBatch]) -> list[Tensor] | None:
        """Per micro-batch [T] float32 on the CPU: value of the state in which tokens[t] was chosen, 0 without a loss.

        micro_batches and the ranks that get None: as for `MegatronTrainer.compute_logprobs`.
        """
        return first_of(self._compute(micro_batches, loss.loss_rows))

    @in_megatron
    def train_step(self, micro_batches: list[TrainBatch], *, global_loss_tokens: int) -> dict[str, float]:
        """One optimizer step on the mean clipped value loss over all loss tokens of the global batch.

        micro_batches: as for `MegatronTrainer.forward_backward`, with `values` and `value_targets` (ValueError
        without). Returns train/value_loss, train/value_clip_fraction, train/critic_grad_norm, train/critic_lr and
        train/critic_skipped, equal on all ranks.
        """
        estimator = self.algorithm.advantage
        assert estimator.kind == "gae"
        clip = estimator.value_clip

        def loss_of(micro: MicroBatch, values: Tensor) -> tuple[Tensor, dict[str, Any]]:
            old, targets = (to_device(field[micro.rows], values.device) for field in _fields(micro.batch))
            total = value_loss(values, old, targets, clip=clip).sum()
            clipped = value_is_clipped(values.detach(), old, targets, clip=clip).sum()
            return total, {"loss": total.detach(), "clipped": clipped}

        _, sums = self._gradients(micro_batches, loss_of, ["loss", "clipped"], global_loss_tokens=global_loss_tokens)
        measured, made = self._step(sums["loss"])
        return {
            "train/value_loss": sums["loss"] / global_loss_tokens,
            "train/value_clip_fraction": sums["clipped"] / global_loss_tokens,
            **{f"train/critic_{name}": value for name, value in measured.items()},
            "train/critic_skipped": float(not made),
        }

    @in_megatron
    def sharded_state(self, *, loading: bool) -> dict[str, Any]:
        """Weights, optimizer and schedule under names of their own, to stand beside the policy's in one checkpoint."""
        state = super().sharded_state(loading=loading)
        add_prefix_for_sharding(state, STATE_PREFIX)
        return state


def _fields(batch: TrainBatch) -> tuple[Tensor, Tensor]:
    if batch.values is None or batch.value_targets is None:
        raise ValueError("TrainBatch.values or value_targets is None, but the critic needs both")
    return batch.values, batch.value_targets
