"""How old the tokens of a batch are, and what may be done with old ones. Pure: a batch and the training step in, a
batch out.

The age of a token at training step s (s steps are finished) is s - TrainBatch.token_versions: training steps between
the weights that are trained now and those that sampled it. 0 is on-policy. A negative age is that of a replay whose
record comes from later weights than it is trained on; such tokens are not of the current policy either.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rltool.algorithms.batch import TrainBatch
from rltool.errors import TrainingStopped, UsageError


def token_ages(batch: TrainBatch, step: int) -> Tensor:
    """[T] int64, in training steps; 0 where a token has no loss. ValueError where the versions are unknown (None)."""
    if batch.token_versions is None:
        raise ValueError("TrainBatch.token_versions is None: the weights that sampled these tokens were not recorded")
    return torch.where(batch.loss_mask > 0, step - batch.token_versions, torch.zeros_like(batch.token_versions))


def staleness_metrics(batch: TrainBatch, step: int) -> dict[str, float]:
    """rollout/staleness_mean and rollout/staleness_max over the loss tokens, in training steps; empty where versions
    are unknown."""
    chosen = batch.loss_mask > 0
    if batch.token_versions is None or not bool(chosen.any()):
        return {}
    ages = token_ages(batch, step)[chosen]
    return {"rollout/staleness_mean": float(ages.double().mean()), "rollout/staleness_max": float(ages.max())}


def mask_older_than(batch: TrainBatch, step: int, limit: int) -> tuple[TrainBatch, dict[str, float]]:
    """(the batch without a loss on tokens more than `limit` training steps old, rollout/tokens_masked_stale: how many).

    Call it before advantages and loss weights are made. What a masked token did for its sample's reward and length
    stays, so that no baseline depends on the mask: TrainBatch.response_mask still has it. UsageError where versions are
    unknown; TrainingStopped if no token with a loss is left.
    """
    if batch.token_versions is None:
        raise UsageError(
            f"tokens older than {limit} training steps cannot be masked: these samples do not record which weights "
            "sampled them (synthetic, or recorded from engines that rltool never synced); leave "
            "algorithm.mask_tokens_older_than out"
        )
    old = token_ages(batch, step) > limit
    mask = batch.loss_mask.masked_fill(old, 0.0)
    count = int(old.sum())
    if not bool(mask.any()):
        raise TrainingStopped(
            f"step {step}: no token with a loss is left, all {count} are older than {limit} training steps and were "
            "masked; lower rollout.max_staleness, or raise algorithm.mask_tokens_older_than"
        )
    masked = batch.replace(
        loss_mask=mask,
        response_mask=batch.sampled,
        loss_weights=batch.loss_weights * mask,
        token_versions=batch.token_versions.masked_fill(old, -1),
    )
    return masked, {"rollout/tokens_masked_stale": float(count)}


def current_tokens(batch: TrainBatch, step: int) -> Tensor:
    """[T] bool: loss tokens that the weights of this training step sampled, so that the trainer's log-probabilities
    must be the engine's. None of them where versions are unknown."""
    chosen = batch.loss_mask > 0
    return torch.zeros_like(chosen) if batch.token_versions is None else chosen & (batch.token_versions == step)
