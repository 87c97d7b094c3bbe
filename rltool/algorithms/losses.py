"""Per-token surrogates of the policy objective. The caller weights and sums them (TrainBatch.loss_weights) and divides
by the global token count.

R loss tokens of whole samples: a sample is never cut over micro-batches, so that what belongs to a sequence is all
here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import NamedTuple

import torch
from torch import Tensor

from rltool.algorithms.fields import LossFields, record, token

MAX_LOG_RATIO = 20.0


@record(frozen=True, kw_only=True)
class LossTokens(LossFields):
    """What is known of the R loss tokens of one micro-batch, all on one device; log-probabilities in nats. Its fields
    are LossFields of the table in algorithms/fields.py, [R] or [R, K] each, and these:

    sample: [R] int64, the sample of each token, ascending; num_samples: how many samples the micro-batch has; entropy:
    [R], in the graph, of the trainer's distribution at each token; topk_logprobs [R, K] and tail_logprobs [R], in the
    graph, as in algorithms/kl.py, topk_kl, None without algorithm.distill_kl_coef; metadata: name -> [R], at each token
    its sample's number of TrainBatch.metadata
    """

    old_logprobs: Tensor = token(required=True)
    advantages: Tensor = token(required=True)
    sample: Tensor
    num_samples: int
    entropy: Tensor
    topk_logprobs: Tensor | None = None
    tail_logprobs: Tensor | None = None
    metadata: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])


class PolicyLoss(NamedTuple):
    """loss: [R], to be minimised; ratio: [R], detached; clipped: [R] float, 1 where the clip decided the gradient,
        detached, None without a clip;
    dual_clipped: [R] float, 1 where the dual clip did, None without one."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor | None = None
    dual_clipped: Tensor | None = None


def bounded_ratio(log_ratio: Tensor) -> Tensor:
    """exp, with the log-ratio limited to +-20: one wild token gives a large finite value and not inf (inf * 0 is NaN,
    and would make the whole gradient NaN)."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def mean_of_sample(values: Tensor, sample: Tensor, num_samples: int, marked: Tensor | None = None) -> Tensor:
    """[R] -> [R]: at each token the mean of `values` over its sample's loss tokens. sample: [R] int64 below
    num_samples; marked: [R], 1 where a token counts, else 0; None: all do."""
    counts = torch.ones_like(values) if marked is None else marked
    total = torch.zeros(num_samples, dtype=values.dtype, device=values.device).index_add(0, sample, values * counts)
    count = torch.zeros_like(total).index_add(0, sample, counts)
    return (total / count.clamp(min=1))[sample]


def sequence_log_ratio(
    log_ratio: Tensor, sample: Tensor, num_samples: int, marked: Tensor | None = None
) -> Tensor:  # fmt: skip
    """GSPO's length-normalised sequence ratio, as a logarithm, at each token (Zheng et al. 2025): [R] -> [R].

    The value is eq. 7's: log s_i = mean over the sample's loss tokens of (log p - log p_old), those that are marked.
    The gradient is that of GSPO-token (eq. 14), s_it = sg[s_i] p / sg[p]: it goes to the token itself. Where a sample's
    tokens share one advantage and one weight the sum of both is the same; where they do not, eq. 7 would give each the
    mean of all, and a token that is masked the gradient of the others.
    """
    return mean_of_sample(log_ratio.detach(), sample, num_samples, marked) + (log_ratio - log_ratio.detach())


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


def sapo_loss(log_ratio: Tensor, advantages: Tensor, *, temperature_pos: float, temperature_neg: float) -> PolicyLoss:
    """Soft adaptive policy optimisation: -4 / tau sigmoid(tau (r - 1)) A (Gao et al. 2025, "Soft Adaptive Policy
    Optimization"), [R].

    tau is temperature_pos where A > 0, else temperature_neg. At r = 1 the gradient is PPO's; away from it the gate's
    slope, 4 sigmoid (1 - sigmoid), takes the place of a clip.
    """
    ratio = bounded_ratio(log_ratio)
    tau = torch.full_like(advantages, temperature_neg).masked_fill(advantages > 0, temperature_pos)
    return PolicyLoss(-torch.sigmoid(tau * (ratio - 1)) * (4 / tau) * advantages, ratio.detach())


def reinforce_loss(logprobs: Tensor, log_ratio: Tensor, advantages: Tensor) -> PolicyLoss:
    """-A log p (Williams 1992), [R]: no ratio and no clip, so the old policy has no part in it."""
    return PolicyLoss(-advantages * logprobs, bounded_ratio(log_ratio).detach())


def off_policy_sequence_mask(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    sample: Tensor,
    num_samples: int,
    *,
    threshold: float,
) -> Tensor:
    """0 where A < 0 and the sample's mean of log(p_engine / p) is above threshold, in nats, else 1; [R], a constant
    (DeepSeek-V3.2, 2025, "Off-Policy Sequence Masking").

    p is the policy in training and p_engine the sampling one, so both the engine's other kernels and earlier optimizer
    steps count. Bad samples that the policy would hardly draw any more teach it nothing and shake it.
    """
    divergence = mean_of_sample((rollout_logprobs - logprobs).detach(), sample, num_samples)
    return ((advantages >= 0) | (divergence <= threshold)).to(logprobs.dtype)


def sft_loss(logprobs: Tensor) -> Tensor:
    """Cross-entropy of the target tokens: [R] -> [R]."""
    return -logprobs
