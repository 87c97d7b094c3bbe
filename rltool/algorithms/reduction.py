"""How token losses become one number: as weights, so that ranks and micro-batches only ever add."""

from __future__ import annotations

import torch
from torch import Tensor

from rltool.algorithms.ragged import numbered, sample_of_token


def token_loss_weights(
    lengths: Tensor,
    loss_mask: Tensor,
    reduction: str,
    *,
    group_ids: Tensor | None = None,
    constant_length: int | None = None,
) -> Tensor:
    """Weight of each token's loss, so that sum(weight * loss) / (number of loss tokens) is the configured reduction.

    lengths, group_ids: [N]; loss_mask: [T], all of one *global* batch of an optimizer step. Returns [T] float32, 0
    where loss_mask is 0.
    "token": mean over all loss tokens (DAPO's implementation; Yu et al. 2025, section 3.3). "sample": mean over samples
    of each sample's token mean (GRPO; Shao et al. 2024, eq. 3). "group": mean over prompt groups of each group's token
    mean (DAPO as written; Yu et al. 2025, eq. 8). These ignore samples and groups without loss tokens, and sum to the
    number of loss tokens. "constant": sum over loss tokens / (samples * constant_length) (Dr. GRPO; Liu et al. 2025).
    ValueError for another reduction, or if what it needs is None.
    """
    if reduction == "token":
        return loss_mask.clone()
    tokens = loss_mask.double().sum()
    if reduction == "constant":
        if constant_length is None:
            raise ValueError('loss reduction "constant" needs constant_length')
        return (loss_mask * (tokens / (len(lengths) * constant_length))).float()
    if reduction == "sample":
        part = sample_of_token(lengths)
    elif reduction == "group":
        if group_ids is None:
            raise ValueError('loss reduction "group" needs group_ids')
        part = numbered(group_ids)[1][sample_of_token(lengths)]
    else:
        raise ValueError(f"unknown loss reduction {reduction!r}; known: token, sample, group, constant")
    per_part = torch.zeros(len(lengths), dtype=torch.float64).index_add(0, part, loss_mask.double())
    with_loss = (per_part > 0).sum().clamp(min=1)
    return (loss_mask * (tokens / with_loss / per_part.clamp(min=1))[part]).float()
