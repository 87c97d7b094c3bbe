"""A model whose weights are one number, so that every token shows which weights sampled it.

Engine, ranks and checker compute a token's log-probability from the token and that number alone. A token that bears the
label of one version and came from the weights of another does not agree with what its label says.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import torch

from rltool.algorithms.batch import TrainBatch
from rltool.config.rollout import WeightsConfig
from rltool.engines.weight_version import BadWeightVersion, WeightVersion
from tests.ranks import SenderRanks

FROM_DISK = -1
"""The number of an engine that nobody has sent weights."""
STEPS = 4096
"""More than an attempt makes."""
NAME = "a"


def weights_of(version: str) -> int:
    """The number that a version names; FROM_DISK for a label that is no version."""
    try:
        found = WeightVersion.parse(version)
    except BadWeightVersion:
        return FROM_DISK
    return found.attempt * STEPS + found.number


def logprob(token: int, weights: int) -> float:
    """Between -0.01 and -3, and exact in float32."""
    return -(11 + zlib.crc32(f"{token} {weights}".encode()) % 3061) / 1024


class OneNumberRanks(SenderRanks):
    """The trainer's ranks: `number` is their model. The disk transport carries it."""

    def __init__(self, config: WeightsConfig, attempt: int, model_files: Path) -> None:
        super().__init__(config, model_files)
        self._attempt = attempt
        self.step = 0

    @property
    def number(self) -> int:
        return self._attempt * STEPS + self.step

    def weights(self, step: int) -> dict[str, torch.Tensor]:
        return {NAME: torch.full((4,), float(self.number))}

    async def logprobs(self, batch: TrainBatch) -> torch.Tensor:
        return torch.tensor([logprob(token, self.number) for token in batch.tokens.tolist()])
