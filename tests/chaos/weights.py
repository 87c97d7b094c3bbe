"""A model whose weights are one number, so that every token shows which weights sampled it.

Engine, ranks and checker compute a token's log-probability from the token and that number alone. A token that bears the
label of one version and came from the weights of another does not agree with what its label says.
"""

from __future__ import annotations

import asyncio
import shutil
import zlib
from pathlib import Path

import torch

from rltool.algorithms.batch import TrainBatch
from rltool.engines.weight_version import BadWeightVersion, WeightVersion
from rltool.engines.wire import meta_of
from rltool.weights.sender import write_to_disk

FROM_DISK = -1
"""The number of an engine that nobody has sent weights."""
STEPS = 4096
"""More than an attempt makes."""
NAME = "a"
KEPT_DIRECTORIES = 4


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


class OneNumberRanks:
    """The trainer's ranks: `weights` is their model. The disk transport carries it."""

    def __init__(self, attempt: int, model_files: Path) -> None:
        self._attempt, self._model_files = attempt, model_files
        self.step = 0
        self._written: list[Path] = []

    @property
    def weights(self) -> int:
        return self._attempt * STEPS + self.step

    def _tensor(self) -> torch.Tensor:
        return torch.full((4,), float(self.weights))

    async def weight_metadata(self):
        return [meta_of(NAME, self._tensor())]

    async def write(self, buckets, directory):
        tensor = self._tensor()
        self._written = [path for path in self._written if path != directory] + [directory]
        for old in self._written[:-KEPT_DIRECTORIES]:
            shutil.rmtree(old, ignore_errors=True)
        del self._written[:-KEPT_DIRECTORIES]
        return await asyncio.to_thread(
            write_to_disk, [(meta_of(NAME, tensor), tensor)], buckets, directory, self._model_files
        )

    async def leave_transfer(self, urls=None):
        pass

    async def logprobs(self, batch: TrainBatch) -> torch.Tensor:
        return torch.tensor([logprob(token, self.weights) for token in batch.tokens.tolist()])
