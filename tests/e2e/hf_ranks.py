"""The trainer's ranks for tests with real engines: one of them, with transformers in place of Megatron."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rltool.algorithms.batch import TrainBatch
from rltool.megatron.export_plan import ExportPlan
from rltool.models.registry import family_for
from tests.e2e.weights import tensors_of
from tests.ranks import SenderRanks, plan_of, whole


class HfRanks(SenderRanks):
    """`model` is what it holds now."""

    model: torch.nn.Module | None = None

    def weights(self, step: int) -> Mapping[str, Tensor]:
        return tensors_of(self.model)

    @cached_property
    def plan(self) -> ExportPlan:
        """The model's tensors, in its own order; engines cut them as those of its family."""
        assert isinstance(self.model, PreTrainedModel)
        parameters = family_for(self.model.config.to_dict()).parameters
        owners = {name: parameter for parameter in parameters for name, _ in parameter.hf}
        return plan_of(self.weights(0), lambda name, tensor: owners.get(name) or whole(name, tensor))

    async def logprobs(self, batch: TrainBatch) -> Tensor:
        """log p of each token given those before it, [T] float32; 0 for the first of a sample."""
        assert self.model is not None
        parts = []
        for ids in batch.tokens.split(batch.lengths.tolist()):
            with torch.no_grad():
                logprobs = self.model(ids[None]).logits[0, :-1].float().log_softmax(-1)
            parts += [torch.zeros(1), logprobs.gather(1, ids[1:, None])[:, 0]]
        return torch.cat(parts)
