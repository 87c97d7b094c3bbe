"""The cut of a batch over ranks, and what they hand back in the order of the batch; without ranks."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rltool.algorithms.batch import Wide, fetched
from rltool.algorithms.contracts import example_batch
from rltool.config.sections import ModelConfig, TrainerConfig
from rltool.config.train import TrainConfig
from rltool.errors import UsageError
from rltool.megatron.offload import PARTS
from rltool.training.ranks.rank_handles import RankHandles
from rltool.training.ranks.sharding import Sharder, Shards
from rltool.training.ranks.trainer_actor import TrainerActor
from rltool.training.ranks.trainer_group import TrainerGroup
from rltool.training.served import Datum, RankedTrainer
from tests.declared import Store


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
    pairs = shards.in_order(coordinates, computed(lambda micro: torch.stack([micro.tokens, 2 * micro.tokens], 1)))
    assert torch.equal(pairs, torch.stack([batch.tokens, 2 * batch.tokens], 1))

    store = Store()

    def put(micro):
        ids = torch.stack([micro.tokens, 2 * micro.tokens], 1).int()
        return Wide.cut({"teacher_topk_ids": ids, "teacher_topk_logprobs": ids.float()}, micro.lengths, store.put)

    scored = batch.replace(wide=(shards.wide_in_order(coordinates, computed(put)),))
    assert scored.teacher_topk_ids is None and len(store.blocks) == sum(map(len, parts))
    for samples in (list(range(batch.num_samples)), [2, 0]):
        [found] = fetched([scored.select(samples)], store.get)
        assert torch.equal(found.teacher_topk_ids.long(), pairs[found.tokens])  # tokens of the example are numbered
        assert torch.equal(found.teacher_topk_logprobs, found.teacher_topk_ids.float())


def test_micro_batches_without_samples_are_not_taken_for_any_samples_fields():
    batch, store = example_batch(), Store()
    shards = Shards(batch, [[[1, 0, 2], []], [[3], list(range(4, batch.num_samples))]])
    results = [
        [Wide.cut({"routed_experts": micro.tokens[:, None].byte()}, micro.lengths, store.put) for micro in parts]
        for parts in map(shards.micro_batches, (0, 1))
    ]
    wide = shards.wide_in_order([SimpleNamespace(dp_rank=rank) for rank in (0, 1)], results)
    [found] = fetched([batch.replace(wide=(wide,))], store.get)
    assert torch.equal(found.routed_experts[:, 0], batch.tokens.byte())
    assert store.asked == [["block 0", "block 2", "block 3"]]


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


def test_samples_of_one_prompt_go_to_one_micro_batch_with_shared_prefixes():
    """Four prompts of 30 tokens, samples of 4 more, mixed; two replicas."""
    batch = example_batch()
    rows = [torch.tensor([prompt] * 30 + [10 + number] * 4) for number in range(6) for prompt in range(4)]
    total = len(rows) * 34
    batch = type(batch)(
        tokens=torch.cat(rows), lengths=torch.full((len(rows),), 34), loss_mask=torch.ones(total),
        rewards=torch.zeros(len(rows)), group_ids=torch.zeros(len(rows), dtype=torch.int64),
        loss_weights=torch.ones(total),
    )  # fmt: skip
    trainer = TrainerConfig(world_size=2, max_tokens_per_micro_batch=60, shared_prefixes=True)
    sampling = {"max_prompt_tokens": 1, "max_response_tokens": 1}
    plan = Sharder(TrainConfig(model=ModelConfig(path="model"), trainer=trainer, sampling=sampling)).shard(batch).plan
    assert sorted(tuple(sorted(micro)) for rank in plan for micro in rank) == [
        tuple(range(prompt, len(rows), 4)) for prompt in range(4)
    ]
    assert [len(rank) for rank in plan] == [2, 2]
    short = trainer.model_copy(update={"max_tokens_per_micro_batch": 33})
    sharder = Sharder(TrainConfig(model=ModelConfig(path="model"), trainer=short, sampling=sampling))
    with pytest.raises(UsageError, match="sample 0 has 34 tokens, more than the 33 of a micro-batch"):
        sharder.shard(batch)


def test_micro_batches_are_larger_where_nothing_is_trained_and_samples_are_not():
    batch = example_batch()
    longest, total = int(batch.lengths.max()), len(batch.tokens)
    sampling = {"max_prompt_tokens": 1, "max_response_tokens": 1}

    def plan_of(**changes) -> list[list[list[int]]]:
        trainer = TrainerConfig(**{"max_tokens_per_micro_batch": longest} | changes)
        config = TrainConfig(model=ModelConfig(path="model"), trainer=trainer, sampling=sampling)
        plan = Sharder(config).shard(batch, forward_only=True).plan
        assert Sharder(config).shard(batch).plan != plan or "logprob_tokens_per_micro_batch" not in changes
        return plan

    assert len(plan_of()[0]) > 1
    for shared in (False, True):
        [[whole]] = plan_of(logprob_tokens_per_micro_batch=total, shared_prefixes=shared)
        assert sorted(whole) == list(range(batch.num_samples))
    with pytest.raises(UsageError, match=f"has {longest} tokens, more than the {longest - 1} of a micro-batch"):
        plan_of(max_tokens_per_micro_batch=longest - 1, logprob_tokens_per_micro_batch=total)
    with pytest.raises(ValueError, match="logprob_tokens_per_micro_batch = 9 is below max_tokens_per_micro_batch = 10"):
        TrainerConfig(max_tokens_per_micro_batch=10, logprob_tokens_per_micro_batch=9)


def test_all_passes_that_train_nothing_and_no_others_take_the_larger_ones():
    group, batch, asked = object.__new__(TrainerGroup), example_batch(), []
    group.coordinates = []
    shards = SimpleNamespace(in_order=lambda *_: batch.tokens, wide_in_order=lambda *_: Wide((), (), batch.lengths))
    result = None

    def on_shards(batch, call, *, forward_only=False):
        asked.append(forward_only)
        return shards, [result]

    group._on_shards = on_shards
    for weights in ("policy", "reference", "teacher"):
        group.logprobs(batch, weights=weights)
    for untrained in (group.logprobs_and_entropies, group.with_teacher_fields, group.values):
        untrained(batch)
    assert asked == 6 * [True]
    asked.clear()
    result = (None, {})
    for trained in (group.train_step, group.forward_backward, group.critic_step):
        trained(batch)
    assert asked == 3 * [False]


def test_log_probabilities_of_the_manager_and_of_a_served_model_take_the_larger_ones_too():
    batch, asked = example_batch(), []
    shards = SimpleNamespace(plan=[], in_order=lambda *_: batch.tokens)

    def shard(batch, *, forward_only=False):
        asked.append(forward_only)
        return shards

    handles = RankHandles([], [], SimpleNamespace(shard=shard), None)
    assert torch.equal(asyncio.run(handles.logprobs(batch)), batch.tokens) and asked == [True]

    def call_on_shards(batch, method, *_, forward_only=False):
        asked.append((method, forward_only))
        return torch.zeros(len(batch.tokens))

    trainer = RankedTrainer(
        SimpleNamespace(call=lambda *_: [None], call_on_shards=call_on_shards), vocab_size=9, max_tokens=9
    )
    trainer.create("model", None, 0)
    tokens = np.arange(3)
    for backward in (False, True):
        trainer.forward("model", [Datum(tokens, tokens, {"weights": np.ones(3, "f4")})], "cross_entropy", {},
                        backward=backward)  # fmt: skip
    assert asked[1:] == [("logprobs", True), ("add_gradients", False)]
