"""What the ranks hand back, put in order for the driver; without ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from rltool.algorithms.contracts import example_batch
from rltool.training.sharding import Shards
from rltool.training.trainer_group import TrainerGroup


def test_log_probabilities_and_entropies_come_back_in_the_order_of_the_batch():
    batch = example_batch()
    pair = torch.stack([batch.old_logprobs, torch.arange(len(batch.tokens)).float()])
    shards = Shards(batch, [[[6, 0], [3]], [[1, 5], [2, 4]]])
    of_sample = pair.split(batch.lengths.tolist(), dim=1)

    def computed(dp_rank: int) -> list[torch.Tensor]:
        return [torch.cat([of_sample[i] for i in samples], 1) for samples in shards.plan[dp_rank]]

    group: Any = TrainerGroup.__new__(TrainerGroup)
    group.coordinates = [SimpleNamespace(dp_rank=rank) for rank in (0, 0, 1, 1)]
    # Two ranks a replica, of which the last pipeline stage alone hands anything back.
    group._on_shards = lambda *_: (shards, [None, computed(0), None, computed(1)])
    logprobs, entropies = group.logprobs_and_entropies(batch)
    assert torch.equal(logprobs, pair[0]) and torch.equal(entropies, pair[1])
