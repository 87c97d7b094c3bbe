"""Per-token losses. The caller weights and sums them (TrainBatch.loss_weights) and divides by the global token count.

R loss tokens of whole samples: a sample is never cut over micro-batches, so that what belongs to a sequence is all
here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class LossTokens:
    """What is known of the R loss tokens of one micro-batch, all on one device; log-probabilities in nats.

    old_logprobs: [R], the trainer's before the first optimizer step; advantages: [R]; sample: [R] int64, the sample of
    each token, ascending; num_samples: how many samples the micro-batch has; entropy: [R], in the graph, of the
    trainer's distribution at each token; rollout_logprobs, ref_logprobs, teacher_logprobs: [R], None where not computed
    """

    old_logprobs: Tensor
    advantages: Tensor
    sample: Tensor
    num_samples: int
    entropy: Tensor
    rollout_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None


class PolicyLoss(NamedTuple):
    """loss: [R], to be minimised; ratio: [R], detached; clipped: [R] float, 1 where the clip decided the gradient,
        detached;
    dual_clipped: [R] float, 1 where the dual clip did, None without one."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor
    dual_clipped: Tensor | None = None


def bounded_ratio(log_ratio: Tensor) -> Tensor:
    """exp, with the log-ratio limited to +-20: one wild token gives a large finite value and not inf (inf * 0 is NaN,
    and would make the whole gradient NaN)."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def sequence_log_ratio(log_ratio: Tensor, sample: Tensor, num_samples: int) -> Tensor:
    """GSPO's length-normalised sequence ratio, as a logarithm, at each token (Zheng et al. 2025, eq. 7): [R] -> [R].

    log s_i = mean over the sample's loss tokens of (log p - log p_old). sample: [R] int64 below num_samples. The
    gradient goes through the mean, to every token of the sample.
    """
    total = torch.zeros(num_samples, dtype=log_ratio.dtype, device=log_ratio.device).index_add(0, sample, log_ratio)
    count = torch.zeros_like(total).index_add(0, sample, torch.ones_like(log_ratio))
    return (total / count.clamp(min=1))[sample]


def ppo_loss(
    log_ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> PolicyLoss:
    """Clipped surrogate of PPO: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (Schulman et al. 2017, eq. 7).

    log_ratio, advantages: [R] float32; r = exp(log_ratio), by token, or by sequence for GSPO (Zheng et al. 2025, eq.
    5). clip_high > clip_low is DAPO's clip-higher (Yu et al. 2025, eq. 8). dual_clip c > 1: for A < 0 the loss is at
    most -c A (Ye et al. 2020, "Mastering Complex Control in MOBA Games"): a token that became far likelier than
    it was, and was bad, stops pulling.
    """
    ratio = bounded_ratio(log_ratio)
    plain = -ratio * advantages
    limited = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    loss, clipped = torch.maximum(plain, limited), (limited > plain).float()
    if dual_clip is None:
        return PolicyLoss(loss, ratio.detach(), clipped)
    ceiling = -dual_clip * advantages
    over = (advantages < 0) & (loss > ceiling)
    return PolicyLoss(torch.where(over, ceiling, loss), ratio.detach(), clipped, over.float())


def cispo_loss(
    logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> PolicyLoss:
    """CISPO: -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log p (MiniMax 2025, "MiniMax-M1", eq. 4), [R].

    The clip limits a token's weight and never takes its gradient away, as PPO's does. clip_low = 1 is no lower limit,
    as in the paper. `clipped` marks ratios outside the range.
    """
    ratio = bounded_ratio(log_ratio).detach()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return PolicyLoss(-weight * advantages * logprobs, ratio, (weight != ratio).float())


def sft_loss(logprobs: Tensor) -> Tensor:
    """Cross-entropy of the target tokens: [R] -> [R]."""
    return -logprobs
