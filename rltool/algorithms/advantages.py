"""Advantages from rewards. Pure tensor functions over a whole rollout, so that no split into ranks or micro-batches
matters.

Shapes: N samples, T tokens back to back (see TrainBatch). rewards, group_ids, lengths: [N]; loss_mask, token_rewards:
[T]. Per-sample estimators return [N], per-token ones [T] with 0 where loss_mask is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rltool.algorithms.ragged import at_last_loss_token, discounted_to_go, numbered

STD_EPSILON = 1e-6
WHITEN_EPSILON = 1e-8


def _by_group(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(group of each sample [N], members of each group [G], reward minus its group's mean [N]), the floats in float64.

    Groups are found by id, never by reshape: one dropped sample would shift every group behind it.
    """
    if rewards.shape != group_ids.shape or rewards.dim() != 1:
        raise ValueError(f"rewards {tuple(rewards.shape)} and group_ids {tuple(group_ids.shape)} must be equal vectors")
    _, group, _ = numbered(group_ids)
    values = rewards.double()  # sums over large groups of near-equal rewards cancel badly in float32
    zeros = torch.zeros(int(group.max()) + 1 if len(group) else 0, dtype=torch.float64)
    count = zeros.index_add(0, group, torch.ones_like(values))
    mean = zeros.index_add(0, group, values) / count
    return group, count, values - mean[group]


def group_advantages(rewards: Tensor, group_ids: Tensor, *, normalize_std: bool, std_over: str = "group") -> Tensor:
    """GRPO advantage of each sample within its prompt group (Shao et al. 2024, "DeepSeekMath", section 4.1.2).

    rewards: [N] float; group_ids: [N] int, any values, groups of any size, in any order. ValueError for unequal shapes.
    Returns [N]: reward minus its group's mean, divided by the group's unbiased std + 1e-6 when normalize_std
    (False: Dr. GRPO, Liu et al. 2025). std_over "batch": by the unbiased std of all rewards + 1e-6 (Lite PPO, Liu et
    al. 2025, "Tricks or Traps?"), so that a group of near-equal rewards is not blown up to the size of the others.
    A group of one sample has advantage 0.
    """
    group, count, centred = _by_group(rewards, group_ids)
    if normalize_std and std_over == "batch":
        centred = centred / ((rewards.double().std() if len(rewards) > 1 else 1.0) + STD_EPSILON)
    elif normalize_std:
        variance = torch.zeros_like(count).index_add(0, group, centred.square()) / (count - 1).clamp(min=1)
        centred = centred / (variance.sqrt()[group] + STD_EPSILON)
    return torch.where(count[group] > 1, centred, torch.zeros_like(centred)).to(rewards.dtype)


def rloo_advantages(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """REINFORCE leave-one-out (Ahmadian et al. 2024, "Back to Basics"): r_i - mean of the group's other rewards.

    Same shapes and errors as `group_advantages`. Equals n / (n - 1) times the centred reward in a group of n; 0 for n =
    1.
    """
    group, count, centred = _by_group(rewards, group_ids)
    return (centred * (count / (count - 1).clamp(min=1))[group]).to(rewards.dtype)


def remax_advantages(rewards: Tensor, baselines: Tensor) -> Tensor:
    """ReMax (Li et al. 2023, "ReMax: A Simple, Effective, and Efficient Reinforcement Learning Method for Aligning
    Large Language Models", arXiv 2310.10505): reward minus that of the greedy response to the same prompt, [N].

    baselines: [N], of the policy as it was when the group was complete. It needs no group: one sample a prompt will do.
    """
    if rewards.shape != baselines.shape:
        raise ValueError(f"rewards {tuple(rewards.shape)} and baselines {tuple(baselines.shape)} must be equal vectors")
    return rewards - baselines


def gdpo_advantages(parts: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
    """Group reward-decoupled normalisation (Liu et al. 2026, "GDPO", arXiv 2601.05242), [N].

    parts, weights: [N, P], the rewards of each sample one by one, and their weights; 0 and 0 where a part did not score
    a sample. Each part is normalised within its group as by `group_advantages`, these are summed with their weights,
    and the sum is brought to mean 0 and unbiased standard deviation 1 (+ 1e-6) over the rollout, so that its size does
    not grow with P. GRPO normalises the sum: parts of other spreads then drown each other, and sums of different parts
    that are equal become one advantage. Same errors as `group_advantages`.
    """
    if parts.shape != weights.shape or parts.dim() != 2:
        raise ValueError(f"parts {tuple(parts.shape)} and weights {tuple(weights.shape)} must be equal matrices")
    normalised = [group_advantages(part, group_ids, normalize_std=True) for part in parts.double().unbind(1)]
    total = (weights.double() * torch.stack(normalised, 1)).sum(1)
    std = total.std() if len(total) > 1 else 1.0
    return ((total - total.mean()) / (std + STD_EPSILON)).to(parts.dtype)


def reinforce_pp_advantages(
    rewards: Tensor, token_rewards: Tensor | None, lengths: Tensor, loss_mask: Tensor, *, gamma: float
) -> Tensor:
    """REINFORCE++ (Hu 2025) before its whitening: the discounted return behind each token, [T] float32.

    A_t = sum over loss tokens i >= t of gamma^(i - t) r_i, where r_i is token_rewards_i (-beta KL_i, None: 0) and the
    last loss token has the sample's reward besides. The paper then whitens A over the global batch: `whiten`.
    """
    per_token = at_last_loss_token(rewards, lengths, loss_mask)
    if token_rewards is not None:
        per_token = per_token + token_rewards.double()
    return discounted_to_go(per_token, lengths, loss_mask, gamma).float()


def reinforce_pp_baseline_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    token_rewards: Tensor | None,
    lengths: Tensor,
    loss_mask: Tensor,
    *,
    gamma: float,
    episode_ids: Tensor | None = None,
) -> Tensor:
    """REINFORCE++-baseline (Hu 2025) before its whitening: REINFORCE++ on rewards minus their group's mean.

    The group gives the baseline, the whole batch the scale: no division by a group's own standard deviation.
    episode_ids: [N], equal for samples of one episode, which counts once in its group's mean, with the mean of their
    rewards; None: each sample is an episode. Same errors as `group_advantages`.
    """
    group, count, centred = _by_group(rewards, group_ids)
    if episode_ids is not None:
        _, episode, samples = numbered(episode_ids)
        share = 1.0 / samples[episode].double()
        zeros = torch.zeros_like(count)
        episodes = zeros.index_add(0, group, share)
        centred = centred - (zeros.index_add(0, group, share * centred) / episodes)[group]
    return reinforce_pp_advantages(centred, token_rewards, lengths, loss_mask, gamma=gamma)


def distillation_advantages(logprobs: Tensor, teacher_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """On-policy distillation: minus the k1 estimate of KL(student || teacher) of each token, [T] in nats (Lu et al.
    2025, "On-Policy Distillation"; Agarwal et al. 2024, "On-Policy Distillation of Language Models", reverse KL).

    A_t = log p_teacher - log p_student at the sampled token. logprobs: the student's before the optimizer step, at the
    temperature that the teacher's have. Discount 0: a token answers for its own divergence alone.
    """
    return torch.where(loss_mask > 0, teacher_logprobs - logprobs, torch.zeros_like(logprobs))


def whiten(advantages: Tensor, loss_mask: Tensor) -> Tensor:
    """Mean 0 and (unbiased) standard deviation 1 over all loss tokens: (A - mean) / (std + 1e-8). [T] -> [T] float32.

    Each token counts once, so long responses weigh more in both.

    Call it with the whole rollout. Whitened per rank, each rank would have a mean of its own, and the result would
    depend on how samples were sharded. Fewer than two loss tokens: 0.
    """
    chosen = loss_mask > 0
    values = advantages[chosen].double()
    out = torch.zeros_like(advantages, dtype=torch.float64)
    if len(values) > 1:
        out[chosen] = (values - values.mean()) / (values.std() + WHITEN_EPSILON)
    return out.float()
