"""DAPO's overlong reward shaping."""

from __future__ import annotations

import torch
from torch import Tensor

from rltool.algorithms.ragged import sample_of_token


def response_lengths(lengths: Tensor, response_mask: Tensor) -> Tensor:
    """[N] int64: tokens from each sample's first sampled token to its end, with what an environment inserted; 0 without
    any.

    response_mask: [T], TrainBatch.sampled and not loss_mask: a masked response is as long as it was.
    """
    sample = sample_of_token(lengths)
    position = torch.arange(len(response_mask))
    ends = lengths.cumsum(0)
    first = ends.scatter_reduce(0, sample[response_mask > 0], position[response_mask > 0], reduce="amin")
    return ends - first


def overlong_reward(response: Tensor, *, max_length: int, buffer: int) -> Tensor:
    """Soft overlong punishment, [N] float32 in [-1, 0], to be added to the reward (Yu et al. 2025, "DAPO", eq. 13).

    response: [N] tokens; max_length: L_max, at which generation is cut; buffer: L_cache. 0 up to L_max - L_cache, then
    (L_max - L_cache - |y|) / L_cache, -1 from L_max on. ValueError unless 0 < buffer <= max_length.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer {buffer} must lie above 0 and within max_length {max_length}")
    return ((max_length - buffer - response).float() / buffer).clamp(-1.0, 0.0)
