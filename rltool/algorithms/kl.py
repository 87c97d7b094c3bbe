"""Estimates of KL(policy || reference) per token from the sampled token alone (J. Schulman, "Approximating KL
divergence", 2020).

logprobs, ref_logprobs: log-probabilities of the sampled tokens, any shape; results have that shape, in nats.
All have the right value at policy = reference. As a *loss* they differ: k1 is useless there (see `k1`).
"""

from __future__ import annotations

from torch import Tensor

from rltool.algorithms.losses import bounded_ratio


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
    """exp(r) - 1 - r with r = log p_ref - log p: non-negative, unbiased under samples of the policy (GRPO's estimator).

    Differentiable as a loss: unlike k1's, its gradient, (1 - exp(r)) grad log p, sees the reference.
    """
    log_ratio = ref_logprobs - logprobs
    return log_ratio.exp() - 1 - log_ratio


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


def kl_loss(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor, *, estimator: str, unbiased: bool) -> Tensor:
    """Per-token KL for the loss; KeyError for an unknown estimator.

    unbiased: the estimate times p / p_old, gradient through both (DeepSeek-V3.2, 2025, "Unbiased KL Estimate"). The
    samples are those of the old policy; weighted so, value and gradient are unbiased for the KL of the current one, for
    k1 too: grad [r k1] = r (k1 + 1) grad log p.
    """
    estimate = ESTIMATORS[estimator](logprobs, ref_logprobs)
    return bounded_ratio(logprobs - old_logprobs) * estimate if unbiased else estimate
