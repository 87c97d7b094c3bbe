"""Advantages, corrections, rewards and reductions against loops that follow the papers."""

import pytest
import torch

from examples import algorithms
from rltool.algorithms import corrections, ragged
from rltool.algorithms.advantages import (
    distillation_advantages,
    gdpo_advantages,
    group_advantages,
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
    rloo_advantages,
    whiten,
)
from rltool.algorithms.batch import TrainBatch
from rltool.algorithms.contracts import example_batch
from rltool.algorithms.gae import gae, value_loss
from rltool.algorithms.shaping import (
    overlong_reward,
    response_lengths,
    token_loss_weights,
    with_advantages,
    with_corrections,
)
from rltool.config.algorithm import AlgorithmConfig
from tests import plain_algorithms as plain

LONGEST = 6
CLIP_COV = {"kind": "own", "function": "examples.algorithms:clip_cov"}
EXAMPLES = ("examples.algorithms:gpg", "examples.algorithms:opo")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"advantage": {"normalize_std": False}},
        {"advantage": "rloo"},
        {"advantage": "reinforce_pp"},
        {"advantage": {"kind": "reinforce_pp", "gamma": 0.9}, "whiten_advantages": False},
        {"advantage": {"kind": "reinforce_pp_baseline", "gamma": 0.7}},
        {"advantage": "distill"},
        {"advantage": "rloo", "whiten_advantages": True},
        {"overlong_buffer": 3, "overlong_penalty": 0.7},
        {"advantage": "examples.algorithms:gpg"},
        {"advantage": "gdpo"},
        {"advantage": "remax"},
        {"advantage": "remax", "reward_clip": (-0.5, 0.6)},
        {"advantage": "examples.algorithms:opo"},
        {"advantage": {"normalize_std_over": "batch"}},
        {"advantage": {"normalize_std": False}, "reward_clip": (-0.5, 0.6), "overlong_buffer": 3},
        {"distill_coef": 0.3},
        {"advantage": {"kind": "reinforce_pp", "gamma": 0.9}, "distill_coef": 0.3},
        *(
            {"advantage": name, "kl": {"kind": "reward", "coef": 0.3, "estimator": k}}
            for name in ("grpo", "rloo", "remax", "reinforce_pp", "reinforce_pp_baseline", *EXAMPLES)
            for k in ("k1", "k2", "k3")
        ),
    ],
    ids=str,
)  # fmt: skip
def test_advantages_equal_a_plain_loop(settings):
    batch, algorithm = example_batch().replace(token_rewards=None), AlgorithmConfig(**settings)
    found, _ = with_advantages(batch, algorithm, max_response_tokens=LONGEST)
    expected = plain.advantages(batch, algorithm, LONGEST)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(found.advantages, expected, rtol=1e-5, atol=1e-6)


def test_group_estimators_equal_plain_numbers_in_float64():
    rewards = torch.tensor([1.0, 0.25, 0.1, 0.1, 0.1, -2.0, 0.75], dtype=torch.float64)
    groups = torch.tensor([3, 3, 8, 8, 8, 3, 5])
    centred = [1.25, 0.5, 0.0, 0.0, 0.0, -1.75, 0.0]
    std = float(rewards.std()) + 1e-6
    found = group_advantages(rewards, groups, normalize_std=True, std_over="batch")
    expected = torch.tensor([value / std for value in centred], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-8)


def of_whole_samples(rewards, groups, lengths) -> TrainBatch:
    """A prompt of one token each, and a response of the rest."""
    mask = torch.cat([torch.tensor([0.0] + [1.0] * (n - 1)) for n in lengths])
    return TrainBatch(
        tokens=torch.zeros(len(mask), dtype=torch.int64), lengths=torch.tensor(lengths), loss_mask=mask,
        rewards=torch.tensor(rewards), group_ids=torch.tensor(groups), loss_weights=mask,
    )  # fmt: skip


def test_gpg_and_opo_equal_plain_numbers():
    batch = of_whole_samples([1.0, 0.25, 0.1, 0.1, 0.1, -2.0, 0.75], [3, 3, 8, 8, 8, 3, 5], [5, 2, 3, 3, 6, 8, 4])
    found = algorithms.gpg(batch, AlgorithmConfig())
    torch.testing.assert_close(found, 7 / 3 * torch.tensor([1.25, 0.5, 0.0, 0.0, 0.0, -1.75, 0.0]))
    baseline = (4 * 1.0 + 1 * 0.25 + 7 * -2.0) / 12
    expected = torch.tensor([1 - baseline, 0.25 - baseline, 0, 0, 0, -2 - baseline, 0])
    torch.testing.assert_close(algorithms.opo(batch, AlgorithmConfig()), expected)


def test_gpg_of_groups_without_any_difference_is_zero_and_finite():
    batch = of_whole_samples([0.1, 0.1, 0.1, 5.0], [0, 0, 0, 1], [2, 2, 2, 2])
    assert algorithms.gpg(batch, AlgorithmConfig()).tolist() == [0.0] * 4


def test_clip_cov_draws_from_the_range_alone_and_never_more_than_its_share():
    """All candidates some time, as log-probabilities change in their last digits."""
    batch = example_batch().replace(token_rewards=None, group_ids=torch.tensor([0, 0, 0, 1, 1, 1, 1]))
    alone = algorithms.clip_cov(batch, AlgorithmConfig(advantage={**CLIP_COV, "options": {"low": 9.0, "high": 9.0}}))
    torch.testing.assert_close(alone * batch.loss_mask, plain.advantages(batch, AlgorithmConfig(), LONGEST))
    covariance = plain.covariances(batch, alone)
    inside = {t for t, value in covariance.items() if 0.02 < value < 1.0}
    clips = AlgorithmConfig(advantage={**CLIP_COV, "options": {"fraction": 0.2, "low": 0.02, "high": 1.0}})
    seen = set()
    for step in range(50):
        moved = batch.replace(old_logprobs=batch.old_logprobs * (1 + 1e-6 * step))
        dropped = (algorithms.clip_cov(moved, clips) != alone).nonzero().squeeze(-1).tolist()
        assert len(dropped) == int(0.2 * batch.num_loss_tokens) < len(inside)
        seen |= set(dropped)
    assert seen == inside
    least = AlgorithmConfig(advantage={**CLIP_COV, "options": {"low": 0.02, "high": 1.0}})
    assert int((algorithms.clip_cov(batch, least) != alone).sum()) == 1, "at least one where there is one"


def test_gdpo_tells_apart_what_has_one_sum_and_is_not_led_by_the_part_of_the_largest_range():
    parts = torch.tensor([[100.0, 0.0], [0.0, 0.0], [0.0, 1.0], [100.0, 1.0]])
    weights, groups = torch.ones(4, 2), torch.tensor([7, 7, 7, 7])
    ours = gdpo_advantages(parts, weights, groups)
    torch.testing.assert_close(ours, torch.tensor([0.0, -1.2247, 0.0, 1.2247]), atol=1e-3, rtol=0)
    summed = group_advantages(parts.sum(1), groups, normalize_std=True)
    assert summed[0] > 0.8 and summed[2] < -0.8, "of the sum the second part is one hundredth"
    doubled = gdpo_advantages(parts, torch.tensor([[1.0, 3.0]]).expand(4, 2), groups)
    assert doubled[2] > 0 > doubled[0], "weights decide which part counts more"


def test_gdpo_of_an_episode_of_several_samples_counts_it_once():
    parts, weights = torch.tensor([[1.0, 0.5], [0.0, 0.25], [1.0, 1.0], [0.0, 0.0]]), torch.ones(4, 2)
    groups = torch.tensor([0, 0, 1, 1])
    expected = gdpo_advantages(parts, weights, groups)
    batch = example_batch().select([0, 1, 2, 3, 5]).replace(
        reward_parts=parts[[0, 0, 1, 2, 3]], part_weights=torch.ones(5, 2), group_ids=groups[[0, 0, 1, 2, 3]],
        episode_ids=torch.tensor([0, 0, 1, 2, 3]), token_rewards=None,
    )  # fmt: skip
    found, _ = with_advantages(batch, AlgorithmConfig(advantage="gdpo"), max_response_tokens=LONGEST)
    starts = [(row > 0).nonzero()[0, 0] for row in batch.loss_mask.split(batch.lengths.tolist())]
    rows = [row[at] for row, at in zip(found.advantages.split(batch.lengths.tolist()), starts, strict=True)]
    torch.testing.assert_close(torch.stack(rows), expected[[0, 0, 1, 2, 3]])


def test_the_baseline_of_reinforce_pp_counts_an_episode_of_several_samples_once():
    lengths, mask = torch.full((4,), 2), torch.tensor([0.0, 1.0] * 4)
    rewards, groups = torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.zeros(4, dtype=torch.int64)
    found = reinforce_pp_baseline_advantages(
        rewards, groups, None, lengths, mask, gamma=1.0, episode_ids=torch.tensor([5, 5, 5, 2])
    )
    assert found[mask > 0].tolist() == [0.5, 0.5, 0.5, -0.5], "two episodes: one passed, one failed"
    alone = reinforce_pp_baseline_advantages(rewards, groups, None, lengths, mask, gamma=1.0)
    assert alone[mask > 0].tolist() == [0.25, 0.25, 0.25, -0.75], "four episodes of a sample each"


@pytest.mark.parametrize("more", [{}, {"overlong_buffer": 3}, {"kl": {"kind": "reward", "coef": 0.3}}], ids=str)
def test_the_baseline_over_episodes_equals_a_plain_loop(more):
    episodes = torch.tensor([0, 1, 0, 2, 3, 4, 5])  # samples 0 and 2 of the group of three are one episode
    batch = example_batch().replace(token_rewards=None, episode_ids=episodes)
    algorithm = AlgorithmConfig(advantage="reinforce_pp_baseline", **more)
    found, _ = with_advantages(batch, algorithm, max_response_tokens=LONGEST)
    torch.testing.assert_close(found.advantages, plain.advantages(batch, algorithm, LONGEST), rtol=1e-5, atol=1e-6)


def test_gdpo_without_any_difference_is_zero_and_finite():
    found = gdpo_advantages(torch.full((4, 3), 0.1), torch.ones(4, 3), torch.tensor([0, 0, 0, 1]))
    assert found.abs().max() < 1e-4


def test_parts_and_weights_of_unequal_shape_are_refused():
    with pytest.raises(ValueError, match="equal matrices"):
        gdpo_advantages(torch.zeros(3, 2), torch.zeros(3, 1), torch.zeros(3, dtype=torch.int64))


def test_a_group_of_near_equal_rewards_stays_small_under_the_batchs_deviation():
    rewards, groups = torch.tensor([0.50, 0.51, 0.0, 1.0]), torch.tensor([0, 0, 1, 1])
    own = group_advantages(rewards, groups, normalize_std=True)
    batch = group_advantages(rewards, groups, normalize_std=True, std_over="batch")
    assert float(own[1]) == pytest.approx(float(own[3]), rel=1e-2) and batch[1] < 0.02 < batch[3]


def test_what_a_teacher_adds_is_not_whitened_with_the_rest():
    batch = example_batch().replace(token_rewards=None)
    alone, _ = with_advantages(batch, AlgorithmConfig(whiten_advantages=True), max_response_tokens=LONGEST)
    mixed, _ = with_advantages(
        batch, AlgorithmConfig(whiten_advantages=True, distill_coef=0.5), max_response_tokens=LONGEST
    )
    added = 0.5 * (batch.teacher_logprobs - batch.old_logprobs) * batch.loss_mask
    torch.testing.assert_close(mixed.advantages, alone.advantages + added)


def test_the_share_of_clipped_rewards_is_recorded():
    _, metrics = with_advantages(example_batch(), AlgorithmConfig(reward_clip=(-0.5, 0.6)), max_response_tokens=LONGEST)
    assert metrics["train/reward_clipped_fraction"] == pytest.approx(3 / 7)


def test_rloo_is_zero_for_a_group_of_one_and_equal_rewards():
    assert rloo_advantages(torch.tensor([3.0, 1.0, 1.0]), torch.tensor([0, 1, 1])).tolist() == [0.0, 0.0, 0.0]


def test_rewards_and_groups_of_unequal_shape_are_refused():
    with pytest.raises(ValueError, match="equal vectors"):
        rloo_advantages(torch.zeros(3), torch.zeros(2, dtype=torch.int64))


def test_a_return_reaches_no_other_sample_and_skips_what_an_environment_inserted():
    lengths, mask = torch.tensor([3, 4]), torch.tensor([0, 1, 1, 0, 1, 0, 1], dtype=torch.float32)
    found = reinforce_pp_advantages(torch.tensor([1.0, 10.0]), None, lengths, mask, gamma=0.5)
    assert found.tolist() == [0, 0.5, 1.0, 0, 5.0, 0, 10.0]


def test_whitening_is_over_all_loss_tokens_and_leaves_the_others_zero():
    mask = torch.tensor([0, 1, 1, 1, 0], dtype=torch.float32)
    found = whiten(torch.tensor([99.0, 1.0, 2.0, 3.0, -99.0]), mask)
    torch.testing.assert_close(found, torch.tensor([0.0, -1.0, 0.0, 1.0, 0.0]))
    assert whiten(torch.tensor([5.0]), torch.ones(1)).tolist() == [0.0]


def test_whitening_per_rank_would_be_something_else():
    values, mask = torch.tensor([1.0, 2.0, 10.0, 30.0]), torch.ones(4)
    per_rank = torch.cat([whiten(values[:2], mask[:2]), whiten(values[2:], mask[2:])])
    assert not torch.allclose(whiten(values, mask), per_rank)


def test_distillation_pulls_up_what_the_teacher_finds_likelier():
    found = distillation_advantages(
        torch.tensor([-1.0, -1.0, 0.0]), torch.tensor([-0.5, -3.0, -9.0]), torch.tensor([1.0, 1.0, 0.0])
    )
    assert found.tolist() == [0.5, -2.0, 0.0]


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_mismatch_ratios_equal_a_plain_loop(level):
    batch = example_batch()
    found = corrections.mismatch_ratio(
        batch.old_logprobs, batch.rollout_logprobs, batch.lengths, batch.loss_mask, level=level
    )
    expected = torch.zeros_like(found)
    start = 0
    for length, ratios in zip(batch.lengths.tolist(), plain.mismatch_ratios(batch, level), strict=True):
        for t, ratio in ratios.items():
            expected[start + t] = ratio
        start += length
    torch.testing.assert_close(found, expected)


def test_a_ratio_of_a_long_sequence_does_not_overflow():
    ratio = corrections.mismatch_ratio(
        torch.zeros(1000), torch.full((1000,), -1.0), torch.tensor([1000]), torch.ones(1000), level="sequence"
    )
    assert torch.isfinite(ratio).all() and ratio[0] > 1e8
    with pytest.raises(ValueError, match="known: token, sequence, geometric"):
        corrections.mismatch_ratio(torch.zeros(1), torch.zeros(1), torch.tensor([1]), torch.ones(1), level="batch")


@pytest.mark.parametrize(
    "settings",
    [
        {"is_weights": {"kind": "token", "cap": 1.05}},
        {"is_weights": {"kind": "sequence", "cap": 1.2}},
        {"is_weights": {"kind": "geometric", "cap": 1.01}},
        {"is_mask": {"kind": "token", "low": 0.93, "high": 1.05}},
        {"is_mask": {"kind": "sequence", "low": 0.9, "high": 1.1}},
        {"is_mask": {"kind": "geometric", "low": 0.95, "high": 1.02}},
        {"is_weights": {"kind": "token", "cap": 1.1}, "is_mask": {"kind": "token", "low": 0.9, "high": 1.1}},
        {"is_weights": {"kind": "token", "cap": 1.05, "floor": 0.95}},
        {"is_veto": 0.9},
    ],
    ids=str,
)
def test_corrections_and_their_metrics_equal_a_plain_loop(settings):
    batch, algorithm = example_batch(), AlgorithmConfig(**settings)
    found, metrics = with_corrections(batch, algorithm)
    expected = [value for sample in plain.is_weight(batch, algorithm) for value in sample.values()]
    torch.testing.assert_close(found.is_weights[batch.loss_mask > 0], torch.tensor(expected))
    assert not (found.is_weights * (1 - batch.loss_mask)).any()
    assert len(set(expected)) > 1, "the settings of this case must do something"
    if algorithm.is_mask.kind != "none":
        kept = plain.is_weight(batch, AlgorithmConfig(**{k: v for k, v in settings.items() if "mask" in k}))
        masked = [value == 0 for sample in kept for value in sample.values()]
        assert metrics["train/masked_fraction"] == pytest.approx(sum(masked) / len(masked))
        assert 0 < metrics["train/masked_fraction"] < 1
    if algorithm.is_weights.kind != "none":
        weights = plain.is_weight(batch, AlgorithmConfig(**{k: v for k, v in settings.items() if "mask" not in k}))
        values = [value for sample in weights for value in sample.values()]
        assert metrics["train/is_weight_mean"] == pytest.approx(sum(values) / len(values), rel=1e-5)
        assert 0 < metrics["train/is_truncated_fraction"] < 1
    if algorithm.is_veto is not None:
        assert metrics["train/vetoed_fraction"] == pytest.approx(expected.count(0.0) / len(expected))


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_normalised_weights_have_mean_one_and_keep_their_proportions(level):
    batch = example_batch()
    found, metrics = with_corrections(batch, AlgorithmConfig(is_weights={"kind": level, "cap": 1.2, "normalize": True}))
    before, _ = with_corrections(batch, AlgorithmConfig(is_weights={"kind": level, "cap": 1.2}))
    chosen = batch.loss_mask > 0
    proportion = found.is_weights[chosen] / before.is_weights[chosen]
    assert float(proportion.std()) < 1e-6 and abs(float(proportion[0]) - 1) > 1e-4
    weights, masks = (plain.cut(values, batch.lengths) for values in (found.is_weights, batch.loss_mask))
    first = torch.cat([own[mask > 0][:1] for own, mask in zip(weights, masks, strict=True)])
    mean = found.is_weights[chosen].mean() if level == "token" else first.mean()
    assert float(mean) == pytest.approx(1, rel=1e-6)
    assert metrics["train/is_weight_mean"] == pytest.approx(float(before.is_weights[chosen].mean()), rel=1e-6)
    expected = plain.is_weight(batch, AlgorithmConfig(is_weights={"kind": level, "cap": 1.2, "normalize": True}))
    torch.testing.assert_close(found.is_weights[chosen], torch.tensor([w for own in expected for w in own.values()]))


def test_weights_that_are_all_zero_stay_zero():
    nothing = corrections.self_normalised(torch.zeros(2), torch.tensor([2]), torch.ones(2), per_sample=False)
    assert nothing.tolist() == [0.0, 0.0]


def test_one_impossible_token_takes_its_whole_sample_out_and_no_other():
    ratio, lengths = torch.tensor([0.0, 1.0, 1e-5, 1.0, 0.0, 1.0, 1.0]), torch.tensor([4, 3])
    mask = torch.tensor([0, 1, 1, 1, 0, 1, 1], dtype=torch.float32)
    kept = corrections.without_impossible_tokens(ratio, lengths, mask, veto=1e-4)
    assert kept.tolist() == [0, 0, 0, 0, 1, 1, 1]
    batch = example_batch()
    wild = batch.rollout_logprobs.clone()
    wild[2] = batch.old_logprobs[2] + 12.0
    found, metrics = with_corrections(batch.replace(rollout_logprobs=wild), AlgorithmConfig(is_veto=1e-4))
    assert not found.is_weights[:3].any() and torch.equal(found.is_weights[3:], batch.loss_mask[3:])
    assert metrics["train/vetoed_fraction"] == pytest.approx(2 / 14)


def test_without_corrections_nothing_is_computed():
    batch = example_batch()
    assert with_corrections(batch, AlgorithmConfig()) == (batch, {})


def test_overlong_rewards_equal_the_paper_at_every_length():
    lengths = torch.arange(0, 25)
    expected = [plain.overlong(int(n), 20, 5) for n in lengths]
    found = overlong_reward(lengths, max_length=20, buffer=5)
    torch.testing.assert_close(found, torch.tensor(expected))
    assert found[15] == 0 and found[16] == pytest.approx(-0.2) and found[20] == -1 and found[24] == -1
    with pytest.raises(ValueError, match="within max_length"):
        overlong_reward(lengths, max_length=20, buffer=21)


def test_a_response_begins_at_the_first_sampled_token_and_may_be_empty():
    batch = example_batch()
    expected = [plain.response_length(batch, i) for i in range(batch.num_samples)]
    assert response_lengths(batch.lengths, batch.loss_mask).tolist() == expected and 0 in expected


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0)])
def test_gae_equals_the_double_sum(gamma, lam):
    batch = example_batch()
    rewards = batch.token_rewards + ragged.at_last_loss_token(batch.rewards, batch.lengths, batch.loss_mask).float()
    values = torch.randn(len(batch.tokens), generator=torch.Generator().manual_seed(3))
    found, targets = gae(rewards, values, batch.lengths, batch.loss_mask, gamma=gamma, lam=lam)
    expected = torch.zeros_like(found)
    start = 0
    for i, length in enumerate(batch.lengths.tolist()):
        own = [start + t for t in plain.loss_tokens(batch, i)]
        for t, value in zip(own, plain.gae(rewards[own].tolist(), values[own].tolist(), gamma, lam), strict=True):
            expected[t] = value
        start += length
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(targets, expected + values * batch.loss_mask)


def test_value_loss_takes_the_worse_of_clipped_and_plain():
    values, old, targets = torch.tensor([1.0, 1.0, 0.1]), torch.tensor([0.0, 0.0, 0.0]), torch.tensor([2.0, 0.0, 5.0])
    assert value_loss(values, old, targets, clip=0.2).tolist() == pytest.approx([0.5 * 1.8**2, 0.5, 0.5 * 4.9**2])
    assert value_loss(values, old, targets, clip=None).tolist() == pytest.approx([0.5, 0.5, 0.5 * 4.9**2])
    clipped = values.clone().requires_grad_()
    value_loss(clipped, old, targets, clip=0.2).sum().backward()
    assert clipped.grad[0] == 0, "moved further than the clip towards its target: no further pull"
    assert clipped.grad[1] == 1 and clipped.grad[2] == pytest.approx(-4.9)


@pytest.mark.parametrize("reduction", ["token", "sample", "group"])
def test_weights_of_a_mean_sum_to_the_loss_tokens_and_are_zero_elsewhere(reduction):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 20, (30,), generator=generator)
    mask = (torch.rand(int(lengths.sum()), generator=generator) < 0.5).float()
    weights = token_loss_weights(lengths, mask, reduction, group_ids=torch.randint(0, 9, (30,), generator=generator))
    assert weights.sum().item() == pytest.approx(mask.sum().item(), rel=1e-5)
    assert not (weights * (1 - mask)).any()


@pytest.mark.parametrize("reduction", ["token", "sample", "group", "constant"])
def test_a_batch_without_any_loss_token_has_finite_weights(reduction):
    weights = token_loss_weights(
        torch.tensor([2]), torch.zeros(2), reduction, group_ids=torch.tensor([0]), constant_length=4
    )
    assert weights.tolist() == [0.0, 0.0]


def test_a_reduction_that_is_unknown_or_lacks_its_input_is_refused():
    for reduction, message in (("mean", "known: token"), ("group", "group_ids"), ("constant", "constant_length")):
        with pytest.raises(ValueError, match=message):
            token_loss_weights(torch.tensor([1]), torch.ones(1), reduction)
