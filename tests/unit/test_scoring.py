"""The limit of failed rewards, and what a group keeps when it is exceeded."""

from __future__ import annotations

import asyncio

from rltool.rollout.reward_pool import RewardFailure
from rltool.rollout.sample import Sample, SampleStatus
from rltool.rollout.scoring import Scorer


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


def scorer(rewards, **settings):
    return Scorer(rewards, lambda ids: "", **{"max_failure_fraction": 0.1, "batch_samples": 32, **settings})


def test_one_failure_is_of_a_batch_though_little_was_scored_since_the_last_one():
    judged = scorer(Rewards((4, 0)))
    for number in range(4):
        assert asyncio.run(judged.finish(group(number))) is None
    assert judged.take_stats().scored == 32
    assert asyncio.run(judged.finish(group(4))) is None
    stats = judged.take_stats()
    assert (stats.failed, stats.scored) == (1, 8), "an eighth of what was scored, a 32nd of a batch"
