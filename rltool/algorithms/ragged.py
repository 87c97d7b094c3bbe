"""Sums along ragged samples: T tokens back to back, sample i owning lengths[i] of them. Pure tensor functions.

"Along" always means over the loss tokens alone: tokens that an environment inserted are no steps of the policy.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor


def numbered(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Equal ids are one group. ids: [N], any integers -> (ids of the groups [G], ascending; group of each [N]; members
    of each group [G])."""
    return cast("tuple[Tensor, Tensor, Tensor]", ids.unique(return_inverse=True, return_counts=True))  # pyright: ignore[reportUnknownMemberType]


def numbers(values: Tensor) -> list[Any]:
    """Of a vector, as Python has them."""
    return cast("list[Any]", values.tolist())  # pyright: ignore[reportUnknownMemberType]


def as_array(values: Tensor) -> np.ndarray[Any, Any]:
    """The same memory; values: on the CPU."""
    return cast("np.ndarray[Any, Any]", values.numpy())  # pyright: ignore[reportUnknownMemberType]


def sample_of_token(lengths: Tensor) -> Tensor:
    """lengths: [N] -> [T] int64, the sample that each token belongs to."""
    return torch.arange(len(lengths)).repeat_interleave(lengths)


def sum_per_sample(values: Tensor, lengths: Tensor, loss_mask: Tensor) -> Tensor:
    """values, loss_mask: [T] -> [N] float64, sums over each sample's loss tokens; 0 for a sample without any."""
    chosen = loss_mask > 0
    out = torch.zeros(len(lengths), dtype=torch.float64)
    return out.index_add(0, sample_of_token(lengths)[chosen], values[chosen].double())


def broadcast_to_tokens(per_sample: Tensor, lengths: Tensor, loss_mask: Tensor) -> Tensor:
    """per_sample [N] -> [T] float32: each sample's value at its loss tokens, 0 elsewhere. lengths: [N]; loss_mask:
    [T]."""
    return per_sample.float().repeat_interleave(lengths) * loss_mask


def at_last_loss_token(per_sample: Tensor, lengths: Tensor, loss_mask: Tensor) -> Tensor:
    """per_sample [N] -> [T] float64: each sample's value at its last loss token, 0 elsewhere. A sample without any gets
    none."""
    out = torch.zeros(len(loss_mask), dtype=torch.float64)
    rows = loss_mask.nonzero().squeeze(-1)
    sample = sample_of_token(lengths)[rows]
    last = torch.ones_like(rows, dtype=torch.bool)
    last[:-1] = sample[1:] != sample[:-1]
    out[rows[last]] = per_sample.double()[sample[last]]
    return out


def discounted_to_go(values: Tensor, lengths: Tensor, loss_mask: Tensor, discount: float) -> Tensor:
    """y_t = values_t + discount * y of the next loss token of the same sample (0 behind the last).

    values, loss_mask: [T]; lengths: [N]. Returns [T] float64, 0 where loss_mask is 0.
    """
    rows = loss_mask.nonzero().squeeze(-1)
    out = torch.zeros(len(loss_mask), dtype=torch.float64)
    if len(rows) == 0:
        return out
    sample = sample_of_token(lengths)[rows]
    counts = torch.bincount(sample, minlength=len(lengths))
    # Distance to the sample's last loss token, so that padding is on the left and every row ends in the same column.
    remaining = counts.cumsum(0)[sample] - 1 - torch.arange(len(rows))
    longest = int(counts.max())
    padded = torch.zeros(longest, len(lengths), dtype=torch.float64)
    padded[remaining, sample] = values[rows].double()
    if discount == 1.0:
        padded = padded.cumsum(0)
    else:
        for step in range(1, longest):
            padded[step] += discount * padded[step - 1]
    out[rows] = padded[remaining, sample]
    return out
