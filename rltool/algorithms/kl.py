"""Estimates of KL(policy || reference) per token from log-probabilities of the sampled token."""

from __future__ import annotations

from torch import Tensor


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Schulman's k3 estimator: exp(r) - 1 - r with r = log p_ref - log p (J. Schulman, "Approximating KL divergence", 2020).

    Non-negative, unbiased under samples of the policy, and differentiable as a loss: unlike k1, whose gradient does not
    depend on the reference at all. Same shape as its inputs, in nats.
    """
    log_ratio = ref_logprobs - logprobs
    return log_ratio.exp() - 1 - log_ratio
