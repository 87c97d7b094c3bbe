"""An advantage: the best samples of a prompt against all others."""

import torch

from rltool.api import AlgorithmConfig, TrainBatch


def best_of_group(batch: TrainBatch, algorithm: AlgorithmConfig) -> torch.Tensor:
    """algorithm.advantage = "examples.advantage:best_of_group": 1 for samples as good as the best of their prompt, else
    0; less the mean over all."""
    same = batch.group_ids[:, None] == batch.group_ids[None]
    best = torch.where(same, batch.rewards[None], -torch.inf).amax(1)
    wins = (batch.rewards == best).float()
    return wins - wins.mean()
