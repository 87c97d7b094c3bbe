"""The trainer's ranks for tests with real engines: one of them, with transformers in place of Megatron."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rltool.algorithms.batch import TrainBatch
from rltool.models.registry import family_for
from rltool.weights.implied_checksums import Rules, rules_of
from tests.e2e.weights import tensors_of
from tests.ranks import SenderRanks


class HfRanks(SenderRanks):
    """`model` is what it holds now."""

    model: torch.nn.Module | None = None

    def weights(self, step: int) -> Mapping[str, Tensor]:
        return tensors_of(self.model)

    def rules(self) -> Rules:
        assert isinstance(self.model, PreTrainedModel)
        return rules_of(family_for(self.model.config.to_dict()))

    async def logprobs(self, batch: TrainBatch) -> Tensor:
        """log p of each token given those before it, [T] float32; 0 for the first of a sample."""
        assert self.model is not None
        parts = []
        for ids in batch.tokens.split(batch.lengths.tolist()):
            with torch.no_grad():
                logprobs = self.model(ids[None]).logits[0, :-1].float().log_softmax(-1)
            parts += [torch.zeros(1), logprobs.gather(1, ids[1:, None])[:, 0]]
        return torch.cat(parts)
