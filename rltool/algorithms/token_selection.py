"""Tokens picked out of a whole rollout by the old policy's entropy, or by the covariance of log-probability and
advantage.

All rank tokens over samples, so they are made from the whole rollout before it is split: ranked within a micro-batch,
the choice would depend on how samples are packed. Pure; T tokens back to back, 0 or 1 where loss_mask is 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def top_entropy(entropies: Tensor, loss_mask: Tensor, *, fraction: float) -> Tensor:
    """1 at the `fraction` of loss tokens with the highest entropy, else 0; [T] float32 (Wang et al. 2025, "Beyond the
    80/20 Rule": the tokens at which a chain of thought forks).

    entropies: [T] in nats, of the old policy. The threshold is the (1 - fraction) quantile of all loss tokens; what
    equals it is in.
    """
    chosen = loss_mask > 0
    values = entropies[chosen].double().sort().values
    if len(values) == 0:
        return torch.zeros_like(loss_mask)
    # 1e-9: 0.1 * 10 tokens must not become the second rank by rounding.
    rank = math.ceil((1 - fraction) * (len(values) - 1) - 1e-9)
    return (chosen & (entropies.double() >= values[rank])).float()


def covariances(logprobs: Tensor, advantages: Tensor, loss_mask: Tensor) -> Tensor:
    """(log p - mean log p) (A - mean A) of each loss token, means over all of them; [T] float64, 0 elsewhere (Cui et
    al. 2025, "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models").

    Their mean is the rate at which a policy-gradient step lowers the entropy: tokens that are likely and good.
    logprobs: of the old policy, so that all optimizer steps of a rollout share one ranking.
    """
    chosen = loss_mask > 0
    out = torch.zeros(len(loss_mask), dtype=torch.float64)
    if bool(chosen.any()):
        logprob, advantage = logprobs[chosen].double(), advantages[chosen].double()
        out[chosen] = (logprob - logprob.mean()) * (advantage - advantage.mean())
    return out


def kl_cov(covariance: Tensor, loss_mask: Tensor, *, fraction: float) -> Tensor:
    """1 at floor(fraction * loss tokens), at least one, of the highest covariance, else 0; [T] float32 (KL-Cov, Cui et
    al. 2025)."""
    rows = (loss_mask > 0).nonzero().squeeze(-1)
    highest = covariance[rows].argsort(descending=True, stable=True)[: _share(fraction, loss_mask)]
    chosen = torch.zeros_like(loss_mask)
    chosen[rows[highest]] = 1.0
    return chosen


def _share(fraction: float, loss_mask: Tensor) -> int:
    return max(1, int(fraction * int(loss_mask.sum())))
