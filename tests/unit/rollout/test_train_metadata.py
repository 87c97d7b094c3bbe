"""train_metadata on its way: who may write it, what training sees of it, and what is refused."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
import torch

from rltool.agents.outcome import AgentFailed, parted, result_of
from rltool.agents.pool import CommandAgents
from rltool.agents.recorded import samples_of
from rltool.agents.task import AgentTask
from rltool.algorithms.contracts import (
    check_advantage_function,
    check_loss_function,
    example_batch,
    example_tokens,
)
from rltool.algorithms.shaping import with_advantages
from rltool.config.algorithm import AlgorithmConfig
from rltool.errors import ContractViolation, TrainingStopped, UsageError
from rltool.megatron.loss import loss_rows, micro_batch_loss
from rltool.report.sample_text import sample_view
from rltool.rollout.batching import samples_to_batch
from rltool.rollout.contracts import check_group_hook, example_group
from rltool.rollout.measure.dump import DumpError, read_dump, write_dump
from rltool.rollout.measure.sample_records import sample_record
from rltool.rollout.rewards.pool import RewardPool
from rltool.rollout.rewards.scoring import Scorer
from rltool.rollout.sample import Sample, SampleStatus
from rltool.terminal import Console
from tests.unit.agents.test_agents import trajectory
from tests.unit.rollout.test_rollout_batching import sample as scored

HERE, OWN = "tests.unit.rollout.test_train_metadata:", "tests.unit.algorithms.own_algorithms:"
TRUST = torch.tensor([0.5, 1.0, 0.0, 2.0, 0.25, 1.0, 3.0])


def told(*values: dict[str, Any]) -> list[Sample]:
    samples = [scored(i // 2, [1, 2], [3 + i] * (1 + i % 2)) for i in range(len(values))]
    for i, (one, value) in enumerate(zip(samples, values, strict=True)):
        one.index, one.train_metadata = i % 2, value
    return samples


# -- samples to a batch


def test_numbers_become_a_tensor_of_each_name_and_everything_else_stays_in_the_samples():
    batch = samples_to_batch(told({"a": 1, "ok": True, "why": "x"}, {"a": 0.5, "ok": False, "why": [1]}))
    assert {name: value.tolist() for name, value in batch.metadata.items()} == {"a": [1.0, 0.5], "ok": [1.0, 0.0]}
    assert all(value.dtype == torch.float32 for value in batch.metadata.values())
    assert samples_to_batch(told({}, {"only": "text"})).metadata == {}


@pytest.mark.parametrize(
    ("value", "found"),
    [({}, "nothing"), ({"a": None}, "None"), ({"a": "high"}, "'high'"), ({"a": float("nan")}, "nan"),
     ({"a": 10**400}, "1000"), ({"a": 1e39}, "1e\\+39"), ({"a": [1.0]}, r"\[1.0\]")],
)  # fmt: skip
def test_a_number_that_one_sample_has_and_another_lacks_is_named_with_the_sample(value, found):
    with pytest.raises(TrainingStopped, match=rf"train_metadata\['a'\] is a number .* and {found}.* in sample 0/0"):
        samples_to_batch(told(value, {"a": 1.0}))


def test_numbers_follow_their_samples_into_every_part_of_the_batch():
    batch = samples_to_batch(told(*({"a": float(i)} for i in range(4))))
    assert batch.select([3, 1]).metadata["a"].tolist() == [3.0, 1.0]
    assert batch.micro_batch([]).metadata["a"].tolist() == [0.0]  # the filler is the shortest sample
    assert batch.replace(advantages=batch.loss_mask).metadata["a"].tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("value", [torch.ones(3), torch.ones(2, 1), torch.ones(2, dtype=torch.int64)])
def test_a_batch_refuses_metadata_that_is_not_one_float32_a_sample(value):
    with pytest.raises(ValueError, match=r"metadata\['a'\].*expected float32 of \(2,\)"):
        samples_to_batch(told({}, {})).replace(metadata={"a": value})


# -- training


def test_an_own_advantage_and_an_own_objective_see_the_numbers_of_their_samples():
    batch = example_batch().replace(metadata={"trust": TRUST})
    algorithm = AlgorithmConfig(advantage=f"{OWN}weighted_by_trust", objective=f"{OWN}reinforce_by_trust")
    batch, _ = with_advantages(batch, algorithm, max_response_tokens=9)
    per_sample = (batch.rewards - batch.rewards.mean()) * TRUST
    assert torch.allclose(batch.advantages, per_sample.repeat_interleave(batch.lengths) * batch.loss_mask)
    part = batch.select([1, 0])  # as a rank gets it
    rows = loss_rows(part)
    logprobs = part.old_logprobs[rows].clone().requires_grad_()
    value, _ = micro_batch_loss(part, rows, logprobs, torch.zeros(len(rows)), algorithm)
    value.backward()
    trust = TRUST[[1, 0]].repeat_interleave(part.lengths)[rows]
    assert torch.allclose(logprobs.grad, -(trust * part.advantages[rows] * part.loss_weights[rows]))


def with_trust() -> tuple[torch.Tensor, Any]:
    logprobs, tokens = example_tokens()
    return logprobs, dataclasses.replace(tokens, metadata={"trust": TRUST[tokens.sample]})


def test_contracts_of_functions_that_read_it_take_an_example_with_it():
    batch = example_batch().replace(metadata={"trust": TRUST})
    check_advantage_function(f"{OWN}weighted_by_trust", batch=batch)
    check_loss_function(f"{OWN}reinforce_by_trust", example=with_trust())
    with pytest.raises(ContractViolation, match=r"changed its inputs: metadata\['trust'\]"):
        check_advantage_function(f"{OWN}changes_metadata", batch=batch)
    with pytest.raises(ContractViolation, match="a sample alone has another loss"):
        check_loss_function(f"{OWN}over_everybodys_trust", example=with_trust())
    with pytest.raises(ContractViolation, match="KeyError: 'trust'"):
        check_loss_function(f"{OWN}reinforce_by_trust")


# -- who writes it


class OneEach:
    async def score(self, samples, texts):
        return [1.0 for _ in samples]


def finish(group: list[Sample], *, hook=None, rewards: Any = None) -> list[Sample]:
    async def run() -> None:
        assert await Scorer(rewards or OneEach(), str, group_hook=hook).finish(group) is None

    asyncio.run(run())
    return group


def counted(group: list[Sample]) -> None:
    for one in group:
        one.train_metadata["size"] = len(group)


def a_set(group: list[Sample]) -> None:
    group[1].train_metadata["seen"] = {1, 2}


def a_tensor(group: list[Sample]) -> None:
    group[0].train_metadata["score"] = torch.tensor(1.0)


def test_a_hook_writes_what_training_sees():
    batch = samples_to_batch(finish(told({}, {}), hook=counted))
    assert batch.metadata["size"].tolist() == [2.0, 2.0]


def test_what_a_checkpoint_could_not_hold_is_refused_at_its_group_and_not_at_the_checkpoint():
    with pytest.raises(UsageError, match=r"sample 0/1: train_metadata\['seen'\] cannot be written as JSON .*set"):
        finish(told({}, {}), hook=a_set)
    with pytest.raises(UsageError, match=r"train_metadata\['score'\].*Tensor.*a tensor's is \.item\(\)"):
        finish(told({}, {}), hook=a_tensor)
    with pytest.raises(UsageError, match=r"train_metadata\[3\] has a key that is no text"):
        finish(told({3: 1.0}))
    with pytest.raises(ContractViolation, match=r"train_metadata\['seen'\] cannot be written as JSON"):
        check_group_hook(f"{HERE}a_set", groups=[example_group(2)])


async def async_reward(sample: Sample, text: str) -> float:
    sample.train_metadata["letters"] = len(text)
    return 1.0


def plain_reward(sample: Sample, text: str) -> float:
    sample.train_metadata["letters"] = len(text)
    return 1.0


def scored_by(function: str, group: list[Sample]) -> list[Sample]:
    async def run() -> None:
        pool = RewardPool(HERE + function, workers=1, timeout=60.0)
        try:
            assert await Scorer(pool, lambda ids: "x" * len(ids)).finish(group) is None
        finally:
            await pool.close()

    asyncio.run(run())
    return group


def test_an_async_reward_writes_it_and_what_a_plain_one_writes_is_lost_with_its_copy():
    assert [one.train_metadata for one in scored_by("async_reward", told({}, {}))] == [{"letters": 1}, {"letters": 2}]
    assert [one.train_metadata for one in scored_by("plain_reward", told({}, {}))] == [{}, {}]


def test_what_is_written_of_the_last_sample_of_an_episode_holds_for_all_of_them():
    group = told({"own": 1}, {})
    for number, one in enumerate(group):
        one.index, one.trajectory = 0, number
    scored_by("async_reward", group)
    assert [one.train_metadata for one in group] == [{"letters": 2, "own": 1}, {"letters": 2}]


def test_a_sample_that_starts_over_forgets_it():
    [one] = told({"a": 1})
    one.clear()
    assert one.train_metadata == {}


# -- agents


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, (None, {})),
        (0.5, (0.5, {})),
        ([1, 0], ([1.0, 0.0], {})),
        ({"reward": True, "train_metadata": {"tools": 3}}, (1.0, {"tools": 3})),
        ({"reward": [1, 2]}, ([1.0, 2.0], {})),
        ({"train_metadata": {"tools": 3}}, (None, {"tools": 3})),
    ],
)
def test_what_an_agent_returns_is_a_reward_or_a_reward_and_what_it_tells_training(value, expected):
    assert parted(result_of(value)) == expected
    assert result_of(result_of(value)) == result_of(value)  # a worker on another host, then the trainer


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"rewards": 1.0}, "an object with 'rewards'; it may have reward and train_metadata"),
        ({"train_metadata": 3}, "train_metadata 3, expected an object"),
        ({"train_metadata": {1: 2}}, "expected an object"),
        ({"train_metadata": {"a": {1}}}, "cannot be written as JSON"),
        ({"train_metadata": {"a": float("inf")}}, "cannot be written as JSON"),
        ({"reward": "much"}, "expected a number"),
    ],
)
def test_what_is_neither_fails_the_episode(value, message):
    with pytest.raises(ValueError, match=message):
        result_of(value)


def test_every_trajectory_of_an_episode_has_what_the_agent_told_and_its_own_copy():
    record = {"trajectories": [trajectory("01"), trajectory("001")]}
    result = {"reward": 1.0, "train_metadata": {"tools": 3}}
    first, second = samples_of(record, Sample(0, 0, 0, [1]), result=result, max_tokens=9)
    first.train_metadata["tools"] = 4
    assert (second.train_metadata, second.episode_reward) == ({"tools": 3}, 1.0)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"reward": 1, "train_metadata": {"a": 2}, "log": "x"}', (1.0, {"a": 2})),
        ('{"train_metadata": {"a": 2}}', (None, {"a": 2})),
        ('{"reward": 1, "log": "x"}', (1.0, {})),
        ('{"log": "x"}', (None, {})),
    ],
)
def test_the_last_line_of_a_command_may_tell_it(line, expected):
    task = AgentTask("u", "u", "k", "m", {}, 60.0, 0)
    assert parted(asyncio.run(CommandAgents(["echo", line]).run(task))) == expected


def test_a_command_whose_metadata_is_none_has_failed():
    agents = CommandAgents(["echo", '{"reward": 1, "train_metadata": [2]}'])
    with pytest.raises(AgentFailed, match="its result: .*expected an object"):
        asyncio.run(agents.run(AgentTask("u", "u", "k", "m", {}, 60.0, 0)))


# -- files and people


def test_dumps_keep_it_and_name_sample_field_and_key_of_what_they_cannot(tmp_path):
    samples = told({"a": 1, "nested": {"why": ["x", None]}}, {})
    write_dump(tmp_path, step=0, seed=0, samples=samples)
    assert read_dump(tmp_path, 0).samples == samples
    samples[1].train_metadata = {"fine": 1, "bad": float("nan")}
    with pytest.raises(DumpError, match=r"step 1: sample 0/1: train_metadata\['bad'\] cannot be written as JSON"):
        write_dump(tmp_path, step=1, seed=0, samples=samples)


def test_people_see_it_beside_the_answer():
    [one] = told({"why": "too long"})
    one.status = SampleStatus.COMPLETED
    console = Console(record=True, width=100)
    console.print(sample_view(sample_record(one, None), "1 of 1", all_tokens=False, terminal=False))
    assert 'train_metadata:\n{"why": "too long"}' in console.export_text()
