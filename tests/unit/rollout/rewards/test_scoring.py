"""The limit of failed rewards, and what a group keeps when it is exceeded."""

from __future__ import annotations

import asyncio

import pytest

from rltool.errors import TrainingStopped
from rltool.rollout.rewards.pool import RewardFailure
from rltool.rollout.rewards.scoring import FailureLimit, Scorer
from rltool.rollout.sample import Sample, SampleStatus


def group(number=0, count=8):
    return [
        Sample(number, i, 0, [1], response_ids=[2], response_mask=[1], response_logprobs=[-1.0],
               status=SampleStatus.TRUNCATED if i == 1 else SampleStatus.COMPLETED)
        for i in range(count)
    ]  # fmt: skip


class Rewards:
    """failing: (group, index) of the samples whose reward fails."""

    def __init__(self, *failing):
        self.failing = set(failing)

    async def score(self, samples, texts):
        failed = [(sample.group_id, sample.index) in self.failing for sample in samples]
        return [RewardFailure("HTTP 503") if one else 1.0 for one in failed]


def scorer(rewards, *, fraction=0.1, **settings):
    return Scorer(rewards, lambda ids: "", may_fail=FailureLimit(fraction, batch_samples=32), **settings)


def test_one_failure_is_of_a_batch_though_little_was_scored_since_the_last_one():
    judged = scorer(Rewards((4, 0)))
    for number in range(4):
        assert asyncio.run(judged.finish(group(number))) is None
    assert judged.take_stats().scored == 32
    assert asyncio.run(judged.finish(group(4))) is None
    stats = judged.take_stats()
    assert (stats.failed, stats.scored) == (1, 8), "an eighth of what was scored, a 32nd of a batch"


class Together:
    """A reward of whole groups, whose server is down for the first calls."""

    def __init__(self, outages=1):
        self.outages = outages

    async def apply(self, samples, texts):
        self.outages -= 1
        if self.outages >= 0:
            raise ConnectionError("HTTP 503")
        for sample in samples:
            sample.reward = 0.5


STATUSES = [SampleStatus.COMPLETED, SampleStatus.TRUNCATED, *[SampleStatus.COMPLETED] * 6]


def test_samples_whose_failure_stopped_the_run_are_scored_again_once_rewards_work():
    rewards, samples = Rewards(*((0, i) for i in range(4))), group()
    with pytest.raises(TrainingStopped, match="4 of 8 samples failed: 4 x HTTP 503"):
        asyncio.run(scorer(rewards).finish(samples))
    assert [sample.status for sample in samples] == STATUSES
    rewards.failing.clear()
    assert asyncio.run(scorer(rewards).finish(samples)) is None
    assert [sample.reward for sample in samples] == [1.0] * 8


def test_a_group_whose_group_reward_stopped_the_run_keeps_its_samples():
    together, samples = Together(), group()
    with pytest.raises(TrainingStopped, match="8 of 8 samples failed.*HTTP 503"):
        asyncio.run(scorer(Rewards(), group_reward=together).finish(samples))
    assert [sample.status for sample in samples] == STATUSES
    assert asyncio.run(scorer(Rewards(), group_reward=together).finish(samples)) is None
    assert [sample.reward for sample in samples] == [0.5] * 8


def test_what_failed_while_it_was_generated_stays_failed():
    samples = group()
    samples[0].fail("agent: boom")
    with pytest.raises(TrainingStopped, match="agent: boom"):
        asyncio.run(scorer(Rewards(), fraction=0.0).finish(samples))
    assert [sample.status for sample in samples] == [SampleStatus.FAILED, *STATUSES[1:]]
