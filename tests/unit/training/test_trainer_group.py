"""The cut of a batch over ranks, and what they hand back in the order of the batch; without ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rltool.algorithms.contracts import example_batch
from rltool.config.train import ModelConfig, TrainConfig, TrainerConfig
from rltool.megatron.offload import PARTS
from rltool.training.ranks.sharding import Sharder
from rltool.training.ranks.trainer_actor import TrainerActor


def test_what_ranks_compute_of_their_micro_batches_comes_back_in_the_order_of_the_batch():
    """Two replicas of two pipeline stages, of which the last alone hands anything back."""
    batch = example_batch()
    trainer = TrainerConfig(world_size=4, pipeline_parallel=2, max_tokens_per_micro_batch=int(batch.lengths.max()) + 1)
    sampling = {"max_prompt_tokens": 1, "max_response_tokens": 1}
    shards = Sharder(TrainConfig(model=ModelConfig(path="model"), trainer=trainer, sampling=sampling)).shard(batch)
    coordinates = [SimpleNamespace(dp_rank=rank) for rank in (0, 0, 1, 1)]
    parts = [shards.micro_batches(rank) for rank in (0, 1)]
    assert all(len(part) > 1 for part in parts) and sorted(
        i for of_rank in shards.plan for samples in of_rank for i in samples
    ) == list(range(batch.num_samples))

    def computed(of) -> list[list[torch.Tensor] | None]:
        return [None, [of(micro) for micro in parts[0]], None, [of(micro) for micro in parts[1]]]

    assert torch.equal(shards.in_order(coordinates, computed(lambda micro: micro.old_logprobs)), batch.old_logprobs)
    wide = shards.in_order(coordinates, computed(lambda micro: torch.stack([micro.tokens, 2 * micro.tokens], 1)))
    assert torch.equal(wide, torch.stack([batch.tokens, 2 * batch.tokens], 1))


class Model:
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.away: tuple[str, ...] = ()

    def discard_gradients(self) -> None:
        self.calls.append("discard")

    def offload(self, parts) -> None:
        self.calls.append("offload")

    def give_back(self, parts) -> None:
        self.calls.append("give back")


@pytest.mark.parametrize(("stays", "calls"), [(False, ["discard", "offload"]), (True, ["give back"])])
def test_ranks_that_have_room_beside_the_engines_move_nothing(stays, calls):
    actor = TrainerActor.__ray_metadata__.modified_class(TrainConfig(model={"path": "m"}), 0, None, stays=stays)
    model = Model()
    actor._started = SimpleNamespace(trainer=model, critic=None)
    actor.offload(PARTS)
    assert model.calls == calls
