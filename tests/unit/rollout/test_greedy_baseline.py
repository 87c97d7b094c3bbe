"""ReMax's baseline: a greedy response to each prompt, sampled and scored once its group is complete."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from rltool.config.train import TrainConfig
from rltool.engines.types import Completion
from rltool.rollout.batching import samples_to_batch
from rltool.rollout.data import Prompt
from rltool.rollout.groups import Group, new_samples
from rltool.rollout.rewards.pool import RewardFailure
from rltool.rollout.rewards.scoring import Scorer
from rltool.rollout.sample import SampleStatus
from rltool.rollout.serving.model_clients import Models
from rltool.training.manager.work import Planes, PolicyModel, RolloutWork

PROMPT = Prompt(index=0, prompt_ids=(7, 8), text="a", label="b")


class Plane:
    """Greedy requests get token 5, others token 3."""

    def __init__(self):
        self.asked = []

    async def generate(self, request, *, group):
        self.asked.append((request.sampling.temperature, request.n, group))
        token = 5 if request.sampling.temperature == 0 else 3
        return [Completion((token,), (-0.5,), "stop") for _ in range(request.n)]


class Rewards:
    """A response is worth its token."""

    def __init__(self, failing=()):
        self.failing = failing

    async def score(self, samples, texts):
        return [RewardFailure("no") if text in self.failing else float(text) for text in texts]


def finished(advantage, failing=()):
    """(why the group is dropped, its samples, the plane) of a group of two, generated and finished."""
    config = TrainConfig(model={"path": "m"}, algorithm={"advantage": advantage})
    plane, scorer = Plane(), Scorer(Rewards(failing), lambda ids: " ".join(map(str, ids)))
    work = RolloutWork(
        config, Planes(plane), scorer, PolicyModel(SimpleNamespace(stop_ids=()), 9, False), None, models=Models()
    )
    group = Group(4, PROMPT, new_samples(4, PROMPT, count=2, run_seed=0))

    async def run():
        await work.generate(group, lambda: False)
        return await work.finish(group)

    return asyncio.run(run()), group.samples, plane


def test_every_sample_gets_the_reward_of_one_greedy_response():
    reason, samples, plane = finished("remax")
    assert reason is None and plane.asked == [(1.0, 2, 4), (0.0, 1, 4)]
    assert [(sample.reward, sample.baseline_reward) for sample in samples] == [(3.0, 5.0)] * 2
    assert samples_to_batch(samples).baselines.tolist() == [5.0, 5.0]
    samples[0].baseline_reward = None
    with pytest.raises(ValueError, match="baseline reward: 1 of 2 samples have it"):
        samples_to_batch(samples)


def test_no_other_estimator_pays_for_one():
    reason, samples, plane = finished("grpo")
    assert reason is None and plane.asked == [(1.0, 2, 4)] and samples[0].baseline_reward is None
    assert samples_to_batch(samples).baselines is None


def test_a_group_whose_baseline_cannot_be_scored_is_dropped():
    reason, samples, _ = finished("remax", failing=("5",))
    assert reason == "reward_failed" and all(sample.status is SampleStatus.COMPLETED for sample in samples)
