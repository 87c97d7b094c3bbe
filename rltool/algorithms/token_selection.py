"""Entropy control: tokens picked out of a whole rollout by the old policy's entropy, or by the covariance of
log-probability and advantage, to be left out of the policy loss or given a penalty.

All rank tokens over samples, so they are made from the whole rollout before it is split: ranked within a micro-batch,
the choice would depend on how samples are packed. Pure; T tokens back to back, 0 or 1 where loss_mask is 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rltool.algorithms.batch import TrainBatch
from rltool.config.algorithm import AlgorithmConfig

TIE = 1e-5
"""Relative. Samples of one prompt have equal entropies at equal tokens, but for rounding, which differs by layout."""


def top_entropy(entropies: Tensor, loss_mask: Tensor, *, fraction: float) -> Tensor:
    """1 at the `fraction` of loss tokens with the highest entropy, else 0; [T] float32 (Wang et al. 2025, "Beyond the
    80/20 Rule": the tokens at which a chain of thought forks).

    entropies: [T] in nats, of the old policy. The threshold is the (1 - fraction) quantile of all loss tokens; what
    equals it to TIE is in.
    """
    chosen = loss_mask > 0
    values = entropies[chosen].double().sort().values
    if len(values) == 0:
        return torch.zeros_like(loss_mask)
    # 1e-9: 0.1 * 10 tokens must not become the second rank by rounding.
    rank = math.ceil((1 - fraction) * (len(values) - 1) - 1e-9)
    return (chosen & (entropies.double() >= values[rank] * (1 - TIE))).float()


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
    highest = covariance[rows].argsort(descending=True, stable=True)[: _count(fraction, loss_mask)]
    chosen = torch.zeros_like(loss_mask)
    chosen[rows[highest]] = 1.0
    return chosen


def _count(fraction: float, loss_mask: Tensor) -> int:
    return max(1, int(fraction * int(loss_mask.sum())))


def with_selected_tokens(batch: TrainBatch, algorithm: AlgorithmConfig) -> tuple[TrainBatch, dict[str, float]]:
    """is_weights without the tokens that algorithm.entropy = "high_entropy" leaves out, or kl_cov_coefs at those that
    "kl_cov" picks; and train/* metrics.

    Call it after the corrections, with advantages and, as configured, old_logprobs or old_entropies (ValueError
    without). The tokens left out keep their part in the number that the loss is divided by, as in the papers.
    """
    mask, chosen = batch.loss_mask, algorithm.entropy
    if chosen.kind == "high_entropy":
        kept = top_entropy(_present(batch.old_entropies, "old_entropies"), mask, fraction=chosen.fraction)
        factors = kept * mask if batch.is_weights is None else kept * batch.is_weights
        return batch.replace(is_weights=factors), {"train/top_entropy_fraction": _share(kept, mask)}
    if chosen.kind == "kl_cov":
        covariance = covariances(
            _present(batch.old_logprobs, "old_logprobs"), _present(batch.advantages, "advantages"), mask
        )
        picked = kl_cov(covariance, mask, fraction=chosen.fraction)
        mean = float(covariance[mask > 0].mean()) if bool(mask.any()) else 0.0
        return batch.replace(kl_cov_coefs=chosen.coef * picked), {"train/covariance_mean": mean}
    return batch, {}


def _present(value: Tensor | None, name: str) -> Tensor:
    if value is None:
        raise ValueError(f"TrainBatch.{name} is None, but the configured choice of tokens needs it")
    return value


def _share(kept: Tensor, mask: Tensor) -> float:
    return float((kept * mask).sum() / mask.sum()) if bool(mask.any()) else 0.0
