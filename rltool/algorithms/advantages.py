"""Advantages from rewards. Pure tensor functions."""

from __future__ import annotations

import torch
from torch import Tensor

STD_EPSILON = 1e-6


def group_advantages(rewards: Tensor, group_ids: Tensor, *, normalize_std: bool) -> Tensor:
    """GRPO advantage of each sample within its prompt group (Shao et al. 2024, "DeepSeekMath", section 4.1.2).

    rewards: [num_samples] float; group_ids: [num_samples] int, any values, groups of any size, in any order.
    Returns [num_samples]: reward minus its group's mean, divided by the group's unbiased std + 1e-6 when normalize_std
    (False: Dr. GRPO, Liu et al. 2025). A group of one sample has advantage 0.

    Groups are found by id, never by reshape: one dropped sample would shift every group behind it.
    """
    if rewards.shape != group_ids.shape or rewards.dim() != 1:
        raise ValueError(f"rewards {tuple(rewards.shape)} and group_ids {tuple(group_ids.shape)} must be equal vectors")
    _, group = group_ids.unique(return_inverse=True)
    values = rewards.double()  # sums over large groups of near-equal rewards cancel badly in float32
    num_groups = int(group.max()) + 1 if len(group) else 0
    zeros = torch.zeros(num_groups, dtype=torch.float64)
    count = zeros.index_add(0, group, torch.ones_like(values))
    mean = zeros.index_add(0, group, values) / count
    centred = values - mean[group]
    if normalize_std:
        variance = zeros.index_add(0, group, centred.square()) / (count - 1).clamp(min=1)
        centred = centred / (variance.sqrt()[group] + STD_EPSILON)
    return torch.where(count[group] > 1, centred, torch.zeros_like(centred)).to(rewards.dtype)


def broadcast_to_tokens(per_sample: Tensor, lengths: Tensor, loss_mask: Tensor) -> Tensor:
    """per_sample [N] -> [T]: each sample's value at its loss tokens, 0 elsewhere. lengths: [N]; loss_mask: [T]."""
    return per_sample.float().repeat_interleave(lengths) * loss_mask
