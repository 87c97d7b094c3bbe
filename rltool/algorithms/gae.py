"""Actor-critic: generalised advantage estimation and the clipped value loss of PPO. Pure tensor functions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rltool.algorithms.ragged import discounted_to_go, sample_of_token


def gae(
    token_rewards: Tensor, values: Tensor, lengths: Tensor, loss_mask: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16): (advantages [T], value targets [T]), both
    float32.

    token_rewards: [T], reward of each loss token (the sample's reward at its last one); values: [T], V of the state in
    which tokens[t] was chosen; loss_mask: [T]; lengths: [N]. With delta_t = r_t + gamma V_{t+1} - V_t and V = 0 behind
    the last loss token, A_t = sum over k of (gamma lam)^k delta_{t+k}; the target of V_t is A_t + V_t. Both are 0 where
    loss_mask is 0; t+1 is the next loss token, whatever an environment inserted between.
    """
    rows = loss_mask.nonzero().squeeze(-1)
    sample = sample_of_token(lengths)[rows]
    value = values[rows].double()
    following = torch.zeros_like(value)
    inside = sample[1:] == sample[:-1]
    following[:-1] = torch.where(inside, value[1:], following[1:])
    delta = torch.zeros(len(loss_mask), dtype=torch.float64)
    delta[rows] = token_rewards[rows].double() + gamma * following - value
    advantages = discounted_to_go(delta, lengths, loss_mask, gamma * lam)
    targets = torch.zeros_like(advantages)
    targets[rows] = advantages[rows] + value
    return advantages.float(), targets.float()


def value_loss(values: Tensor, old_values: Tensor, targets: Tensor, *, clip: float | None) -> Tensor:
    """Clipped value loss per token: max((V - R)^2, (V_old + clip(V - V_old, -c, c) - R)^2) / 2, [R] -> [R].

    From the reference implementation of Schulman et al. 2017 (openai/baselines, ppo2). clip in units of reward; None:
    no clip.
    """
    plain = (values - targets).square()
    if clip is None:
        return 0.5 * plain
    limited = old_values + (values - old_values).clamp(-clip, clip)
    return 0.5 * torch.maximum(plain, (limited - targets).square())


def value_is_clipped(values: Tensor, old_values: Tensor, targets: Tensor, *, clip: float) -> Tensor:
    """[R] bool: where the clipped loss is the larger one, so that no gradient pulls the value further from the old
    one."""
    moved = values - old_values
    limited = old_values + moved.clamp(-clip, clip)
    # Where nothing was limited the two losses still differ by rounding.
    return (moved.abs() > clip) & ((limited - targets).square() > (values - targets).square())


def explained_variance(values: Tensor, targets: Tensor, loss_mask: Tensor) -> float:
    """1 - Var(target - value) / Var(target) over the loss tokens: 1 for a perfect critic, 0 for a constant one; NaN
    without variance."""
    chosen = loss_mask > 0
    value, target = values[chosen].double(), targets[chosen].double()
    if len(target) < 2 or not bool(target.var() > 0):
        return math.nan
    return float(1 - (target - value).var() / target.var())
