"""Per-token losses. The caller weights and sums them (TrainBatch.loss_weights) and divides by the global token count."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0


class PolicyLoss(NamedTuple):
    """loss: [T], to be minimised; ratio: [T], detached; clipped: [T] float, 1 where the clip decided the loss, detached."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


def policy_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> PolicyLoss:
    """Clipped surrogate of PPO per token: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (Schulman et al. 2017, eq. 7).

    logprobs, old_logprobs, advantages: [T] float32; r = exp(logprobs - old_logprobs). clip_high > clip_low is DAPO's
    clip-higher (Yu et al. 2025, section 3.1). The log-ratio is limited to +-20 so that one wild token gives a large finite
    value and not inf (inf * 0 would make the whole gradient NaN).
    """
    ratio = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    plain = -ratio * advantages
    limited = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return PolicyLoss(torch.maximum(plain, limited), ratio.detach(), (limited > plain).float().detach())


def sft_loss(logprobs: Tensor) -> Tensor:
    """Cross-entropy of the target tokens: [T] -> [T]."""
    return -logprobs


def token_loss_weights(lengths: Tensor, loss_mask: Tensor, reduction: str) -> Tensor:
    """Weight of each token's loss, so that sum(weight * loss) / (number of loss tokens) is the configured reduction.

    lengths: [N]; loss_mask: [T]. Returns [T] float32, summing over loss tokens to their count.
    "token": the mean over all loss tokens (DAPO), weight 1. "sample": the mean over samples of each sample's own token
    mean (GRPO), weight (loss tokens in all) / (samples with a loss) / (loss tokens of the sample).
    """
    if reduction == "token":
        return loss_mask.clone()
    if reduction != "sample":
        raise ValueError(f"unknown loss reduction {reduction!r}; known: token, sample")
    sample = torch.arange(len(lengths)).repeat_interleave(lengths)
    per_sample = torch.zeros(len(lengths), dtype=torch.float64).index_add(0, sample, loss_mask.double())
    with_loss = (per_sample > 0).sum().clamp(min=1)
    weight = per_sample.sum() / with_loss / per_sample.clamp(min=1)
    return (weight[sample] * loss_mask).float()
