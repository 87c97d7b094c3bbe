"""Credit per turn against plain loops; what environments' steps and agents' lists of rewards become."""

from __future__ import annotations

import asyncio
import statistics
from typing import Any

import pytest
import torch

from rltool.agents.outcome import AgentFailed, reward_of
from rltool.agents.recorded import samples_of
from rltool.algorithms.gae import gae
from rltool.algorithms.ragged import at_last_loss_token
from rltool.algorithms.shaping import estimate_advantages, with_advantages
from rltool.config.algorithm import AlgorithmConfig
from rltool.engines.types import VersionSpan
from rltool.rollout.batching import samples_to_batch
from rltool.rollout.measure.dump import read_dump, write_dump
from rltool.rollout.rewards.scoring import Scorer
from rltool.rollout.sample import Sample, SampleStatus, TurnReward

CREDIT = {"credit": "turn"}


def sample(group: int, index: int, mask: str, *earned: float, final: float = 0.0, first: int = 0, number: int = 0):
    """mask: of the response, whose stretches of 1 are the turns; earned: by each; first: number of the first turn."""
    made = Sample(group, index, 0, [1, 2], response_ids=list(range(len(mask))), response_mask=[int(m) for m in mask])
    made.response_logprobs = [-0.5 * m for m in made.response_mask]
    made.status, made.trajectory = SampleStatus.COMPLETED, number
    starts = [i for i, m in enumerate(mask) if m == "1" and (i == 0 or mask[i - 1] == "0")]
    ends = [i + 1 for i, m in enumerate(mask) if m == "1" and (i + 1 == len(mask) or mask[i + 1] == "0")]
    made.turn_rewards = [
        TurnReward(first + k, start, end, reward)
        for k, (start, end, reward) in enumerate(zip(starts, ends, earned, strict=True))
    ]
    made.versions = [VersionSpan("run:0:1", start, end) for start, end in zip(starts, ends, strict=True)]
    made.reward = sum(earned) + final
    return made


def ragged() -> list[Sample]:
    """Groups of 3, 2 and 1 episodes, shuffled, of one to three turns of unequal length."""
    return [
        sample(4, 0, "110111011", 0.5, -1.0, 0.25, final=1.0),
        sample(9, 0, "1001", 0.0, 0.5),
        sample(4, 1, "1111", 0.75),
        sample(7, 0, "101", 2.0, 3.0),
        sample(9, 1, "110", 0.25, final=-0.5),
        sample(4, 2, "011001", -0.25, 0.125, final=0.5),
    ]


def plain(samples: list[Sample], gamma: float, *, divide: str | None, token_rewards: Any = None) -> list[list[float]]:
    """Per sample and response token, by the formulas in words: each turn's discounted reward-to-go, the rest of the
    reward at the end, minus the mean of all turns of the group, divided by their standard deviation."""
    returns: list[list[float]] = []
    for number, made in enumerate(samples):
        earned = [turn.reward for turn in made.turn_rewards]
        earned[-1] += made.reward - sum(earned)
        if token_rewards is not None:
            own = token_rewards[number][len(made.prompt_ids) :]
            earned = [r + float(own[t.start : t.end].sum()) for r, t in zip(earned, made.turn_rewards, strict=True)]
        returns.append([sum(gamma ** (j - k) * earned[j] for j in range(k, len(earned))) for k in range(len(earned))])
    every = [value for values in returns for value in values]
    found = []
    for made, values in zip(samples, returns, strict=True):
        group = [v for other, vs in zip(samples, returns, strict=True) if other.group_id == made.group_id for v in vs]
        episodes = sum(other.group_id == made.group_id for other in samples)
        over = {"group": group, "batch": every}.get(divide or "")
        scale = statistics.stdev(over) + 1e-6 if over is not None and len(over) > 1 else 1.0
        tokens = [0.0] * len(made.response_ids)
        for turn, value in zip(made.turn_rewards, values, strict=True):
            advantage = (value - statistics.fmean(group)) / scale if episodes > 1 else 0.0
            tokens[turn.start : turn.end] = [advantage] * (turn.end - turn.start)
        found.append([0.0] * len(made.prompt_ids) + tokens)
    return found


def flat(values: list[list[float]]) -> torch.Tensor:
    return torch.tensor([value for sample in values for value in sample])


@pytest.mark.parametrize("gamma", [1.0, 0.4, 0.0])
@pytest.mark.parametrize("divide", ["group", "batch", None])
def test_grpo_of_turns_equals_a_plain_loop(gamma, divide):
    samples = ragged()
    settings = {"turn_gamma": gamma, "normalize_std": divide is not None, "normalize_std_over": divide or "group"}
    found = estimate_advantages(samples_to_batch(samples), AlgorithmConfig(advantage=CREDIT | settings))
    torch.testing.assert_close(found, flat(plain(samples, gamma, divide=divide)), rtol=1e-5, atol=1e-6)
    assert found.abs().max() > 0.3


def test_tokens_without_a_loss_have_no_advantage_and_count_in_the_baseline_all_the_same():
    samples = ragged()
    expected = flat(plain(samples, 1.0, divide="group"))
    samples[0].remove_sample = True
    batch = samples_to_batch(samples)
    found = estimate_advantages(batch, AlgorithmConfig(advantage=CREDIT))
    torch.testing.assert_close(found, expected * batch.loss_mask, rtol=1e-5, atol=1e-6)
    assert not bool(found[: int(batch.lengths[0])].any())


def test_a_penalty_per_token_is_part_of_its_turn():
    samples = ragged()
    batch = samples_to_batch(samples)
    penalty = -0.1 * torch.rand(len(batch.tokens), generator=torch.Generator().manual_seed(3)) * batch.sampled
    algorithm = AlgorithmConfig(advantage=CREDIT | {"turn_gamma": 0.5})
    found = estimate_advantages(batch.replace(token_rewards=penalty), algorithm)
    own = penalty.split(batch.lengths.tolist())
    torch.testing.assert_close(
        found, flat(plain(samples, 0.5, divide="group", token_rewards=own)), rtol=1e-5, atol=1e-6
    )


def test_what_clipping_takes_off_the_reward_is_taken_off_the_end():
    samples = ragged()
    batch, _ = with_advantages(
        samples_to_batch(samples), AlgorithmConfig(advantage=CREDIT, reward_clip=(-0.1, 0.5)), max_response_tokens=9
    )
    for made in samples:
        made.reward = min(max(made.reward or 0.0, -0.1), 0.5)
    torch.testing.assert_close(batch.advantages, flat(plain(samples, 1.0, divide="group")), rtol=1e-5, atol=1e-6)
    assert batch.turns is None and batch.turn_rewards is None  # no rank needs them


def test_where_only_the_end_is_rewarded_each_turn_has_the_whole_reward():
    samples = [sample(1, 0, "1011", 0.0, 0.0, final=1.0), sample(1, 1, "1101", 0.0, 0.0)]
    undivided = {"normalize_std": False}
    found = estimate_advantages(samples_to_batch(samples), AlgorithmConfig(advantage=CREDIT | undivided))
    whole = estimate_advantages(samples_to_batch(samples), AlgorithmConfig(advantage={"normalize_std": False}))
    torch.testing.assert_close(found, whole)
    assert found.max() == 0.5


def test_by_default_credit_is_the_episode_s():
    samples = ragged()
    found = estimate_advantages(samples_to_batch(samples), AlgorithmConfig(advantage={"normalize_std": False}))
    means = {4: (0.75 + 0.75 + 0.375) / 3, 9: 0.125, 7: 5.0}
    expected = [[0.0, 0.0, *(m * ((s.reward or 0.0) - means[s.group_id]) for m in s.response_mask)] for s in samples]
    torch.testing.assert_close(found, flat(expected), rtol=1e-5, atol=1e-6)


# -- episodes of several trajectories: the turns of one follow those of another in time


def branched() -> list[Sample]:
    """Turns 0 and 3 of the first episode in one trajectory, 1 and 2 in another."""
    samples = [
        sample(1, 0, "101", 1.0, 8.0),
        sample(1, 0, "1101", 2.0, 4.0, first=1, number=1),
        sample(1, 1, "11", 3.0),
    ]
    samples[0].turn_rewards[1] = TurnReward(3, 2, 3, 8.0)
    for made in samples[:2]:
        made.reward = 15.0
    return samples


def test_turns_of_another_trajectory_count_by_their_time():
    found = estimate_advantages(
        samples_to_batch(branched()), AlgorithmConfig(advantage=CREDIT | {"normalize_std": False, "turn_gamma": 0.5})
    )
    returns = [1 + 1 + 1 + 1, 2 + 2 + 2, 4 + 4, 8, 3]
    a, b, c, d, e = (value - statistics.fmean(returns) for value in returns)
    assert found.tolist() == pytest.approx([0, 0, a, 0, d, 0, 0, b, b, 0, c, 0, 0, e, e])


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_pp_of_turns_has_the_return_behind_each_token(gamma):
    """Across trajectories it is exact without a discount; within one it is with."""
    settings = AlgorithmConfig(advantage=CREDIT | {"kind": "reinforce_pp", "gamma": gamma}, whiten_advantages=False)
    found = estimate_advantages(samples_to_batch(branched()), settings)
    if gamma == 1.0:
        assert found.tolist() == pytest.approx([0, 0, 15, 0, 8, 0, 0, 14, 14, 0, 12, 0, 0, 3, 3])
    alone = estimate_advantages(samples_to_batch([sample(1, 0, "11001", 1.0, 2.0, final=4.0)]), settings)
    assert alone.tolist() == pytest.approx([0, 0, gamma + gamma**2 * 6, 1 + gamma * 6, 0, 0, 6])


def test_gae_sees_the_rewards_of_turns_where_they_were_earned():
    samples = ragged()
    batch = samples_to_batch(samples)
    values = torch.rand(len(batch.tokens), generator=torch.Generator().manual_seed(5)) * batch.loss_mask
    estimator = CREDIT | {"kind": "gae", "gamma": 0.9, "gae_lambda": 0.8}
    settings = AlgorithmConfig(advantage=estimator, whiten_advantages=False)
    found, _ = with_advantages(batch.replace(values=values), settings, max_response_tokens=9)
    rest = torch.tensor([(s.reward or 0.0) - s.earned for s in samples])
    rewards = batch.turn_rewards + at_last_loss_token(rest, batch.lengths, batch.loss_mask)
    expected, targets = gae(rewards, values, batch.lengths, batch.loss_mask, gamma=0.9, lam=0.8)
    torch.testing.assert_close(found.advantages, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.value_targets, targets, rtol=1e-5, atol=1e-5)


# -- the batch


def test_a_batch_of_single_turns_has_none():
    samples = [sample(1, 0, "111", 0.0), sample(1, 1, "11", 0.0)]
    for made in samples:
        made.turn_rewards = []
    assert samples_to_batch(samples).turns is None


def test_turns_that_nobody_spoke_of_are_the_stretches_of_the_mask():
    samples = branched()
    for made in samples:
        made.turn_rewards = []
    batch = samples_to_batch(samples)
    assert batch.turns.tolist() == [-1, -1, 0, -1, 1, -1, -1, 2, 2, -1, 3, -1, -1, 0, 0]
    assert not bool(batch.turn_rewards.any())


def test_turns_that_leave_sampled_tokens_out_are_refused():
    made = sample(1, 0, "1011", 0.0, 1.0)
    made.turn_rewards = made.turn_rewards[:1]
    with pytest.raises(ValueError, match="do not cover the tokens that the policy sampled"):
        samples_to_batch([made])
    made.turn_rewards = [TurnReward(0, 0, 5, 1.0)]
    with pytest.raises(ValueError, match="does not fit a response of 4 tokens"):
        made.validate()


def test_a_dump_keeps_the_rewards_of_turns(tmp_path):
    write_dump(tmp_path, step=0, seed=1, samples=ragged())
    assert [made.turn_rewards for made in read_dump(tmp_path, 0).samples] == [made.turn_rewards for made in ragged()]


# -- where they come from


class Rewards:
    async def score(self, samples, texts):
        return [10.0] * len(samples)


def test_a_sample_s_reward_is_what_its_turns_earned_and_what_came_at_the_end():
    samples = [*branched(), sample(2, 0, "1", 0.5), sample(2, 1, "1", 0.5)]
    for made, final in zip(samples, [0.25, 0.25, 0.0, None, 1.0], strict=True):
        made.reward, made.episode_reward = None, final
    assert asyncio.run(Scorer(Rewards(), lambda ids: "").finish(samples)) is None
    assert [made.reward for made in samples] == [15.25, 15.25, 3.0, 10.5, 1.5]


def record(*turns: tuple[int, int], masks: tuple[str, ...]) -> dict[str, Any]:
    """turns: (trajectory, end) in order of time."""
    trajectories = [
        {
            "token_ids": list(range(len(mask))),
            "loss_mask": [int(m) for m in mask],
            "logprobs": [0.0] * len(mask),
            "versions": [],
            "finish_reasons": ["stop"],
        }
        for mask in masks
    ]
    return {"trajectories": trajectories, "turns": [{"trajectory": t, "end": end} for t, end in turns]}


def test_an_agent_s_list_of_rewards_belongs_to_its_turns():
    """Two turns of the first trajectory follow each other without a token between them."""
    session = record((0, 3), (1, 2), (0, 5), (0, 7), masks=("0111101", "01"))
    pending = Sample(4, 0, 2, [1, 2])
    first, second = samples_of(session, pending, result=[1.0, 2.0, 3.0, 4.0], max_tokens=9)
    assert first.turn_rewards == [TurnReward(0, 0, 2, 1.0), TurnReward(2, 2, 4, 3.0), TurnReward(3, 5, 6, 4.0)]
    assert second.turn_rewards == [TurnReward(1, 0, 1, 2.0)] and first.episode_reward == second.episode_reward == 0.0
    with pytest.raises(AgentFailed, match="returned 2 rewards, one for each turn, but its session has 4 turns"):
        samples_of(session, pending, result=[1.0, 2.0], max_tokens=9)


def test_what_an_agent_may_return():
    assert (reward_of(None), reward_of(True), reward_of((1, 0.5))) == (None, 1.0, [1.0, 0.5])
    with pytest.raises(ValueError, match="expected a number"):
        reward_of([1.0, "much"])
