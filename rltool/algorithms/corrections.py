"""Corrections for samples that another policy drew: the engine computes in other kernels, and perhaps from older
weights.

All compare the trainer's log-probability before the first optimizer step with the engine's (rho = p_old / p_engine).
The weights are constants: nothing here is differentiated. T tokens back to back, N samples.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rltool.algorithms.losses import bounded_ratio
from rltool.algorithms.ragged import sample_of_token, sum_per_sample
from rltool.config.algorithm import AlgorithmConfig


def mismatch_factors(
    old_logprobs: Tensor, rollout_logprobs: Tensor, lengths: Tensor, loss_mask: Tensor, algorithm: AlgorithmConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """Factors of the policy loss, [T] float32, for tokens that the engine drew from another distribution than the
    trainer's old policy; and metrics of them by name, means over the loss tokens, [T] float32 each, 0 where
    loss_mask is 0.

    In other kernels, or from older weights: with is_weights = {kind = "token", cap = inf} the factors are the pi_prox /
    pi_behav of decoupled PPO (Fu et al. 2025, "AReaL", eq. 5), the old policy being the proximal one. lengths are read
    where AlgorithmConfig.corrects_by_token is false.
    """
    mask = loss_mask.to(old_logprobs.dtype)

    def ratio_of(level: str) -> Tensor:
        return mismatch_ratio(old_logprobs, rollout_logprobs, lengths, mask, level=level)

    factors, values = mask.clone(), dict[str, Tensor]()
    if (chosen := algorithm.is_weights).kind != "none":
        ratio = ratio_of(chosen.kind)
        weights = truncated_weights(ratio, cap=chosen.cap, floor=chosen.floor)
        values["is_weight_mean"] = weights * mask
        values["is_truncated_fraction"] = (ratio > chosen.cap) * mask
        if chosen.normalize:
            weights = self_normalised(weights, lengths, mask, per_sample=chosen.kind != "token")
        factors = factors * weights
    if (bounds := algorithm.is_mask).kind != "none":
        ratio = ratio_of(bounds.kind)
        kept = inside_range(ratio, low=bounds.low, high=bounds.high)
        values["masked_fraction"] = (1.0 - kept) * mask
        factors = factors * kept
    if algorithm.is_veto is not None:
        kept = without_impossible_tokens(ratio_of("token"), lengths, mask, veto=algorithm.is_veto)
        values["vetoed_fraction"] = (1.0 - kept) * mask
        factors = factors * kept
    return factors, values


def metric_names(algorithm: AlgorithmConfig) -> list[str]:
    """Of the metrics of `mismatch_factors`."""
    names = ["is_weight_mean", "is_truncated_fraction"] if algorithm.is_weights.kind != "none" else []
    names += ["masked_fraction"] if algorithm.is_mask.kind != "none" else []
    return names + (["vetoed_fraction"] if algorithm.is_veto is not None else [])


def mismatch_ratio(
    old_logprobs: Tensor, rollout_logprobs: Tensor, lengths: Tensor, loss_mask: Tensor, *, level: str
) -> Tensor:
    """rho of every token, [T] float32, 0 where loss_mask is 0.

    level "token": the token's own; "sequence": the product over the sample's loss tokens, which is the exact importance
    ratio of the sample; "geometric": their geometric mean, which does not grow with length. ValueError for another
    level.
    """
    chosen = loss_mask > 0
    difference = torch.where(chosen, old_logprobs - rollout_logprobs, torch.zeros_like(old_logprobs))
    if level in ("sequence", "geometric"):
        total = sum_per_sample(difference, lengths, loss_mask)
        if level == "geometric":
            total = total / sum_per_sample(loss_mask, lengths, loss_mask).clamp(min=1)
        difference = total[sample_of_token(lengths)].float()
    elif level != "token":
        raise ValueError(f"unknown level {level!r}; known: token, sequence, geometric")
    return torch.where(chosen, bounded_ratio(difference), torch.zeros_like(difference))


def truncated_weights(ratio: Tensor, *, cap: float, floor: float = 0.0) -> Tensor:
    """Truncated importance sampling: min(rho, cap) (Ionides 2008; Yao et al. 2025, "Your Efficient RL Framework
    Secretly Brings You Off-Policy RL Training"), and at least `floor`. Same shape as `ratio`."""
    return ratio.clamp(min=floor, max=cap)


def self_normalised(weights: Tensor, lengths: Tensor, loss_mask: Tensor, *, per_sample: bool) -> Tensor:
    """Weights divided by their mean over the rollout's loss tokens: self-normalised importance sampling (Owen 2013,
    "Monte Carlo theory, methods and examples", section 9.2). [T] -> [T].

    per_sample: a sample's tokens share one weight, and each sample counts once in the mean, whatever its length.
    Weights that are all 0 stay 0.
    """
    chosen = loss_mask > 0
    if per_sample:
        count = sum_per_sample(loss_mask, lengths, loss_mask)
        values = (sum_per_sample(weights, lengths, loss_mask) / count.clamp(min=1))[count > 0]
    else:
        values = weights[chosen].double()
    mean = float(values.mean()) if len(values) else 0.0
    return weights / mean if mean > 0 else weights


def without_impossible_tokens(ratio: Tensor, lengths: Tensor, loss_mask: Tensor, *, veto: float) -> Tensor:
    """0 at the tokens of samples in which the ratio of any loss token is below `veto`, else 1; [T] float32 (Liu, Li et
    al. 2025, "When Speed Kills Stability").

    ratio: [T] of single tokens. What the engine sampled and the trainer finds all but impossible is a fault somewhere,
    and all that follows it in its sample was drawn in a state that the policy does not reach.
    """
    bad = sum_per_sample((ratio < veto).float(), lengths, loss_mask)
    return (bad == 0).float()[sample_of_token(lengths)]


def inside_range(ratio: Tensor, *, low: float, high: float) -> Tensor:
    """1 where low <= rho <= high, else 0; float32, same shape.

    By token this is the mask of IcePop (Ling team 2025, "Every Step Evolves"), whose M(rho) is rho inside and 0
    outside: with truncated weights of cap >= high the product is M. By sequence or geometric mean it drops whole
    samples (Liu, Li et al. 2025, "When Speed Kills Stability", sequence-level masked importance sampling).
    """
    return ((ratio >= low) & (ratio <= high)).float()
