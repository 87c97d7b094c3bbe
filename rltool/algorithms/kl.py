"""Estimates of KL(policy || reference) per token from the sampled token alone (J. Schulman, "Approximating KL
divergence", 2020); and KL(teacher || policy) over the teacher's most probable tokens (`topk_kl`).

logprobs, ref_logprobs: log-probabilities of the sampled tokens, any shape; results have that shape, in nats.
All have the right value at policy = reference. As a *loss* they differ: k1 is useless there (see `k1`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rltool.algorithms.losses import MAX_LOG_RATIO

MAX_K3 = 10.0
"""Nats. A token that the policy all but lost (r = 25) would otherwise have a gradient of 7e10 and be the whole step."""


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """log p - log p_ref: unbiased, of any sign, of high variance.

    For the reward, where only its value counts. Its gradient is that of log p, which does not depend on the reference
    and whose expectation is 0: as a loss it pulls towards nothing.
    """
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """(log p - log p_ref)^2 / 2: biased in value, small variance; on-policy its gradient is an unbiased one of the
    KL."""
    return 0.5 * (logprobs - ref_logprobs).square()


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """min(exp(r) - 1 - r, 10) with r = log p_ref - log p: not negative; unbiased under samples of the policy but for
    the limit, which is verl's and OpenRLHF's (GRPO's estimator).

    Differentiable as a loss: unlike k1's, its gradient, (1 - exp(r)) grad log p, sees the reference; at the limit it is
    0. By expm1: near the reference exp(r) - 1 would cancel to a few digits in float32.
    """
    # exp is kept finite first: behind the limit its gradient is multiplied by 0, and 0 * inf is NaN.
    log_ratio = (ref_logprobs - logprobs).clamp(max=MAX_LOG_RATIO)
    return (log_ratio.expm1() - log_ratio).clamp(max=MAX_K3)


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


def kl_loss(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor, *, estimator: str, unbiased: bool) -> Tensor:
    """Per-token KL for the loss; KeyError for an unknown estimator.

    unbiased: the estimate times p / p_old, gradient through both (DeepSeek-V3.2, 2025, "Unbiased KL Estimate"). The
    samples are those of the old policy; weighted so, value and gradient are unbiased for the KL of the current one, for
    k1 too: grad [r k1] = r (k1 + 1) grad log p. Here k3 has no limit, for what is large in it cancels (`_weighted_k3`).
    """
    if not unbiased:
        return ESTIMATORS[estimator](logprobs, ref_logprobs)
    # Limited from above alone: from below the limit would stop the gradient of one factor, and what has to cancel
    # would not.
    ratio = (logprobs - old_logprobs).clamp(max=MAX_LOG_RATIO).exp()
    if estimator == "k3":
        return _weighted_k3(logprobs, ref_logprobs, old_logprobs, ratio)
    return ratio * ESTIMATORS[estimator](logprobs, ref_logprobs)


def _weighted_k3(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor, ratio: Tensor) -> Tensor:
    """ratio * (exp(r) - 1 - r), as this product where r is small, as p_ref / p_old - ratio * (1 + r) where it is not.

    The gradient is -ratio * r in both. In the product it is a difference of terms of the size of exp(r); in the sum the
    large term is a constant, since log p is not in it.
    """
    log_ratio = ref_logprobs - logprobs
    near = log_ratio.clamp(max=1.0)
    product = ratio * (near.expm1() - near)
    constant = (ref_logprobs - old_logprobs).clamp(max=MAX_LOG_RATIO).exp()
    return torch.where(log_ratio > 1.0, constant - ratio * (1 + log_ratio), product)


def topk_kl(teacher_topk: Tensor, topk: Tensor, tail: Tensor) -> Tensor:
    """KL(teacher || policy) at each position over K + 1 outcomes: the teacher's K most probable tokens, and all others
    as one (forward KL of Agarwal et al. 2024, arXiv 2306.13649, eq. 1; K tokens as verl has it, and a tail).

    teacher_topk: [R, K], the teacher's log-probabilities of its tokens, constants, -inf allowed; topk: [R, K] the
    policy's of the same tokens; tail: [R] the logarithm of the policy's probability of all others, -inf where there are
    none. Returns [R] in nats, in topk's dtype. Merging outcomes loses divergence and adds none, so this is at most the
    KL over the whole vocabulary, which it is at K = V; 0 where both agree on the K tokens; up to rounding not negative.
    The teacher's tail is what its K leave of 1. Its gradient with respect to the policy's logits is softmax minus
    target, at most 1 for any token.
    """
    target = teacher_topk.exp()
    apart = torch.where(target > 0, teacher_topk - topk, 0.0)
    # In float64: of K that are nearly everything, float32 leaves no digit of the rest.
    rest = (1 - teacher_topk.double().exp().sum(-1)).clamp(min=0.0).to(topk.dtype)
    rest = torch.where(tail > -torch.inf, rest, 0.0)
    return (target * apart).sum(-1) + torch.xlogy(rest, rest) - rest * torch.where(rest > 0, tail, 0.0)
