"""Algorithms of papers as functions of your own: GPG, OPO and Clip-Cov as advantages, GMPO as an objective.

Each takes the place of a built-in kind; what it reads of `options` is in its docstring. Samples of one prompt are
compared with each other, each for itself: where an agent's episode is several samples, it counts so many times.
"""

import math

import torch
from torch import Tensor

from rltool.api import AlgorithmConfig, LossTokens, TrainBatch


def gpg(batch: TrainBatch, algorithm: AlgorithmConfig) -> Tensor:
    """Group policy gradient (Chu et al. 2025, "GPG", https://arxiv.org/abs/2504.02546): (r - mean) N / (N - M), M of N
    samples in groups whose rewards are all equal. [N].

    algorithm.advantage = "examples.algorithms:gpg", algorithm.objective = "reinforce", and one optimizer step a
    rollout.
    """
    rewards, group = batch.sample_rewards().double(), group_of(batch)
    lowest, highest = (
        rewards.scatter_reduce(0, group, rewards, how, include_self=False)[group] for how in ("amin", "amax")
    )
    differs = highest > lowest
    scale = len(rewards) / max(1, int(differs.sum()))
    return torch.where(differs, scale * (rewards - mean_of_group(rewards, group)), 0.0).float()


def opo(batch: TrainBatch, algorithm: AlgorithmConfig) -> Tensor:
    """Reward minus the mean of its group weighted by length, sum(l r) / sum(l), the baseline of least variance where a
    squared gradient grows with the length (Hao et al. 2025, "On-Policy RL with Optimal Reward Baseline",
    https://arxiv.org/abs/2505.23585). [N], 0 for a group of one.

    algorithm.advantage = "examples.algorithms:opo", algorithm.objective = "reinforce"; exactly on-policy: one optimizer
    step a rollout, rollout.max_staleness = 0, neither KL nor entropy bonus.
    """
    rewards, group = batch.sample_rewards().double(), group_of(batch)
    length = torch.stack([own.sum() for own in batch.sampled.split(batch.lengths.tolist())]).double()
    length = length.clamp(min=1e-9)  # of a group without a sampled token
    return (rewards - sum_of_group(length * rewards, group) / sum_of_group(length, group)).float()


def clip_cov(batch: TrainBatch, algorithm: AlgorithmConfig) -> Tensor:
    """GRPO, but no advantage, and so no policy loss, for a few tokens of those whose covariance of log-probability and
    advantage lies between two limits: Clip-Cov (Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning for
    Reasoning Language Models", https://arxiv.org/abs/2505.22617). [T].

    algorithm.advantage = "examples.algorithms:clip_cov"; options: fraction (2e-4 of the rollout's tokens, at least
    one), low (1.0), high (5.0).
    """
    options = {"fraction": 2e-4, "low": 1.0, "high": 5.0, **algorithm.advantage.options}
    rewards, group = batch.sample_rewards().double(), group_of(batch)
    centred = rewards - mean_of_group(rewards, group)
    others = (sum_of_group(torch.ones_like(rewards), group) - 1).clamp(min=1)
    deviation = (sum_of_group(centred.square(), group) / others).sqrt()
    advantages = (centred / (deviation + 1e-6)).repeat_interleave(batch.lengths)

    chosen, logprobs = batch.loss_mask > 0, batch.old_logprobs.double()
    covariance = (logprobs - logprobs[chosen].mean()) * (advantages - advantages[chosen].mean())
    candidates = (chosen & (covariance > options["low"]) & (covariance < options["high"])).nonzero().squeeze(-1)
    # Drawn by the last bits of the log-probability: whatever the order of samples, and again by a run that resumes.
    order = (logprobs[candidates] * 2**23 * 0.6180339887498949 % 1).argsort()
    count = max(1, int(options["fraction"] * int(chosen.sum())))
    advantages[candidates[order[:count]]] = 0.0
    return advantages.float()


def gmpo(logprobs: Tensor, tokens: LossTokens, algorithm: AlgorithmConfig) -> Tensor:
    """Geometric-mean policy optimisation: -s A, s the geometric mean of the sample's ratios, each clipped on the side
    where its advantage pulls (Zhao et al. 2025, "Geometric-Mean Policy Optimization",
    https://arxiv.org/abs/2507.20673). The gradient goes to each token by itself, s times that of its own log p. [R].

    algorithm.objective = "examples.algorithms:gmpo", algorithm.loss_reduction = "sample"; options: clip_low (0.3297),
    clip_high (0.4918): ratios are clipped to [1 - clip_low, 1 + clip_high].
    """
    options = {"clip_low": 0.3297, "clip_high": 0.4918, **algorithm.objective.options}
    low = math.log1p(-options["clip_low"]) if options["clip_low"] < 1 else -math.inf
    log_ratio = logprobs - tokens.old_logprobs
    bad = tokens.advantages < 0
    clipped = torch.where(bad, log_ratio.clamp(min=low), log_ratio.clamp(max=math.log1p(options["clip_high"])))
    zeros = torch.zeros(tokens.num_samples, dtype=logprobs.dtype, device=logprobs.device)
    total = zeros.index_add(0, tokens.sample, clipped.detach())
    count = zeros.index_add(0, tokens.sample, torch.ones_like(clipped))
    mean = (total / count.clamp(min=1))[tokens.sample]
    ratio = (mean + clipped - clipped.detach()).clamp(-20, 20).exp()
    return -ratio * tokens.advantages


def group_of(batch: TrainBatch) -> Tensor:
    """[N], the number of each sample's group, below N. By id and never by position: dropped samples leave gaps."""
    return batch.group_ids.unique(return_inverse=True)[1]


def sum_of_group(values: Tensor, group: Tensor) -> Tensor:
    """[N] -> [N]: at each sample the sum over its group."""
    return torch.zeros_like(values).index_add(0, group, values)[group]


def mean_of_group(values: Tensor, group: Tensor) -> Tensor:
    return sum_of_group(values, group) / sum_of_group(torch.ones_like(values), group)
