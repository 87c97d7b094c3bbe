"""Stale and masked tokens on their way to the loss: which old policy, which forward pass, which baseline."""

from __future__ import annotations

import math

import pytest
import torch

from rltool.algorithms.batch import TrainBatch
from rltool.algorithms.contracts import example_batch
from rltool.algorithms.shaping import (
    needs_old_logprobs_pass,
    optimizer_step_samples,
    with_advantages,
    with_corrections,
    with_loss_weights,
    with_old_logprobs,
)
from rltool.algorithms.staleness import mask_older_than
from rltool.config.algorithm import AlgorithmConfig
from rltool.config.loader import load_config
from rltool.config.train import TrainConfig
from rltool.megatron.loss import loss_rows, micro_batch_loss
from rltool.templates import template_text
from tests import plain_algorithms as plain

LONGEST = 6


def configured(*sets: str) -> TrainConfig:
    return load_config(TrainConfig, [], ["model.path=model", *sets]).config


def stale_batch() -> TrainBatch:
    """The example at step 2: tokens of steps 0, 1 and 2 in turn, whose log-probabilities are the farther from the
    trainer's the older they are."""
    batch = example_batch().replace(token_rewards=None)
    ages = torch.arange(len(batch.tokens)) % 3
    generator = torch.Generator().manual_seed(11)
    drift = (0.02 + 0.4 * ages) * torch.randn(len(ages), generator=generator)
    return batch.replace(
        token_versions=torch.where(batch.loss_mask > 0, 2 - ages, -1),
        rollout_logprobs=(batch.old_logprobs + drift) * batch.loss_mask,
    )


# Decoupled PPO.


def decoupled(tmp_path, *sets: str) -> AlgorithmConfig:
    file = tmp_path / "decoupled.toml"
    file.write_text(template_text("algorithms/decoupled_ppo"))
    return load_config(TrainConfig, [file], ["model.path=model", *sets]).config.algorithm


@pytest.mark.parametrize("clip", [0.2, 0.05])
def test_decoupled_ppo_equals_equation_5_in_value_and_gradient(tmp_path, clip):
    algorithm = decoupled(tmp_path, f"algorithm.objective.clip_low={clip}", f"algorithm.objective.clip_high={clip}")
    batch = with_old_logprobs(stale_batch(), algorithm, example_batch().old_logprobs)
    batch, _ = with_advantages(batch, algorithm, max_response_tokens=LONGEST)
    batch, metrics = with_corrections(batch, algorithm)
    batch = with_loss_weights(batch, algorithm, max_response_tokens=LONGEST)
    noise = torch.randn(len(batch.tokens), generator=torch.Generator().manual_seed(5))
    logprobs, again = ((batch.old_logprobs + 0.5 * noise).requires_grad_() for _ in range(2))
    rows = loss_rows(batch)
    found, sums = micro_batch_loss(batch, rows, logprobs[rows], torch.zeros(len(rows)), algorithm)
    found = found / batch.num_loss_tokens
    found.backward()
    expected = plain.decoupled_ppo_loss(batch, example_batch().old_logprobs, batch.advantages, again, clip)
    expected.backward()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logprobs.grad, again.grad, rtol=1e-5, atol=1e-7)
    assert sums["clip_fraction"] > 0 and metrics["train/is_truncated_fraction"] == 0
    assert float(batch.is_weights.max()) > 2.0, "a cap of 2 would have cut this weight"
    # The clip is around the proximal policy: the behaviour policy as the old one has another gradient.
    other = with_old_logprobs(batch, AlgorithmConfig(old_logprobs="rollout"), None).replace(is_weights=None)
    coupled = logprobs.detach().requires_grad_()
    clipped = AlgorithmConfig(objective={"clip_low": clip, "clip_high": clip})
    value, _ = micro_batch_loss(other, rows, coupled[rows], torch.zeros(len(rows)), clipped)
    (value / batch.num_loss_tokens).backward()
    assert (coupled.grad - logprobs.grad).abs().max() > 1e-2


def test_an_infinite_cap_survives_json():
    algorithm = AlgorithmConfig(is_weights={"kind": "token", "cap": math.inf})
    assert algorithm.model_dump(mode="json")["is_weights"]["cap"] == "inf"
    assert AlgorithmConfig(**algorithm.model_dump(mode="json")) == algorithm
    assert AlgorithmConfig.model_validate_json(algorithm.model_dump_json()) == algorithm
    assert AlgorithmConfig(is_weights="token").model_dump(mode="json")["is_weights"]["cap"] == 2.0
    unclipped = AlgorithmConfig(objective={"clip_low": 1.0, "clip_high": math.inf}, reward_clip=(-1.0, 1.0))
    assert AlgorithmConfig(**unclipped.model_dump(mode="json")) == unclipped


def test_the_policy_loss_of_a_current_token_is_corrected_by_little_and_of_a_stale_one_by_much():
    batch, _ = with_corrections(stale_batch(), AlgorithmConfig(is_weights={"kind": "token", "cap": math.inf}))
    off = (batch.is_weights - 1).abs()
    age = 2 - batch.token_versions
    assert off[(age == 0) & (batch.loss_mask > 0)].max() < 0.1 < off[(age == 2) & (batch.loss_mask > 0)].max()


@pytest.mark.parametrize("level", ["sequence", "geometric"])
def test_a_masked_stale_token_has_no_part_in_its_samples_ratio(level):
    """Its sample is weighed by the tokens that are trained on."""
    algorithm = AlgorithmConfig(is_weights={"kind": level, "cap": math.inf})
    masked, _ = mask_older_than(stale_batch(), 2, 1)
    before, _ = with_corrections(masked, algorithm)
    wild = masked.rollout_logprobs - 5.0 * (masked.sampled - masked.loss_mask)
    after, _ = with_corrections(masked.replace(rollout_logprobs=wild), algorithm)
    assert not torch.equal(wild, masked.rollout_logprobs)
    assert torch.equal(before.is_weights, after.is_weights)
    expected = [value for sample in plain.is_weight(masked, algorithm) for value in sample.values()]
    torch.testing.assert_close(after.is_weights[masked.loss_mask > 0], torch.tensor(expected))


# What a mask leaves alone.


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"overlong_buffer": 3},
        {"advantage": "rloo", "kl": {"kind": "reward", "coef": 0.2, "estimator": "k1"}},
        {
            "advantage": "reinforce_pp_baseline",
            "kl": {"kind": "reward", "coef": 0.2, "estimator": "k2"},
            "whiten_advantages": False,
        },
    ],
    ids=str,
)
def test_a_sample_without_a_loss_counts_in_its_groups_baseline_as_before(settings):
    algorithm, batch = AlgorithmConfig(**settings), example_batch().replace(token_rewards=None)
    longest = 5  # so that the masked sample, of three tokens in a group of three, has a length penalty
    in_loss = torch.tensor([1.0, 1, 1, 1, 1, 0, 1]).repeat_interleave(batch.lengths)
    masked = batch.replace(loss_mask=batch.loss_mask * in_loss, response_mask=batch.loss_mask)
    whole, _ = with_advantages(batch, algorithm, max_response_tokens=longest)
    found, _ = with_advantages(masked, algorithm, max_response_tokens=longest)
    assert (batch.loss_mask - masked.loss_mask).sum() == 3
    torch.testing.assert_close(found.advantages, whole.advantages * masked.loss_mask)
    forgotten, _ = with_advantages(masked.replace(response_mask=None), algorithm, max_response_tokens=longest)
    if settings.get("overlong_buffer") or settings.get("advantage") == "rloo":
        assert not torch.allclose(forgotten.advantages, found.advantages), (
            "length and penalty are those of sampled tokens"
        )


def test_a_masked_token_gets_no_gradient_and_its_numbers_reach_no_other():
    algorithm = AlgorithmConfig(
        kl={"kind": "loss", "coef": 0.1},
        entropy={"kind": "bonus", "coef": 0.1},
        is_weights={"kind": "token", "cap": math.inf},
        loss_reduction="sample",
    )
    gradients = []
    for wild in (0.0, 7.0):
        batch, metrics = mask_older_than(stale_batch(), 2, 1)
        assert metrics["rollout/tokens_masked_stale"] > 3
        hidden = batch.sampled - batch.loss_mask
        batch = batch.replace(rollout_logprobs=batch.rollout_logprobs - wild * hidden)
        batch, _ = with_advantages(batch, algorithm, max_response_tokens=LONGEST)
        batch, _ = with_corrections(batch, algorithm)
        batch = with_loss_weights(batch, algorithm, max_response_tokens=LONGEST)
        logprobs = (batch.old_logprobs + 0.1 + wild * hidden).requires_grad_()
        rows = loss_rows(batch)
        micro_batch_loss(batch, rows, logprobs[rows], torch.ones(len(rows)), algorithm)[0].backward()
        assert not logprobs.grad[hidden > 0].any() and logprobs.grad[batch.loss_mask > 0].all()
        gradients.append(logprobs.grad)
    assert torch.equal(*gradients)


# Forward passes.

SEVERAL = "optimizer_steps_per_rollout=2"
ENGINES = "algorithm.old_logprobs=rollout"


@pytest.mark.parametrize(
    ("sets", "needed"),
    [
        ([], False),
        ([SEVERAL], True),
        (["epochs_per_rollout=2"], True),
        (["algorithm.is_weights=token", "algorithm.is_mask=token"], False),
        (["algorithm.is_weights=token", SEVERAL], True),
        (["algorithm.is_weights=token", "algorithm.is_weights.normalize=true"], True),
        (["algorithm.is_weights=token", "algorithm.is_veto=1e-4"], True),
        (["algorithm.is_weights=sequence"], True),
        (["algorithm.is_mask=geometric"], True),
        (["algorithm.kl={kind='reward', coef=0.1}"], True),
        ([ENGINES], False),
        ([ENGINES, SEVERAL], False),
        ([ENGINES, "algorithm.kl={kind='reward', coef=0.1}"], False),
        (["algorithm.advantage=gae"], False),
        (["algorithm.advantage=gae", "critic.warmup_rollouts=1"], True),
        (["algorithm.advantage=gae", "critic.warmup_rollouts=1", ENGINES], True),
        (["algorithm.loss=sft"], False),
    ],
    ids=str,
)
def test_which_settings_cost_a_forward_pass_for_the_old_policy(sets, needed):
    assert needs_old_logprobs_pass(configured(*sets), 0) == needed


def test_after_its_warm_up_a_critic_asks_for_no_pass():
    assert not needs_old_logprobs_pass(configured("algorithm.advantage=gae", "critic.warmup_rollouts=1"), 1)


def test_the_old_policy_is_the_one_that_is_configured():
    batch, scored = example_batch().replace(old_logprobs=None), example_batch().old_logprobs
    trainer, engines = AlgorithmConfig(), AlgorithmConfig(old_logprobs="rollout")
    assert with_old_logprobs(batch, trainer, scored).old_logprobs is scored
    assert with_old_logprobs(batch, trainer, None).old_logprobs is None
    for given in (scored, None):
        assert with_old_logprobs(batch, engines, given).old_logprobs is batch.rollout_logprobs
    with pytest.raises(ValueError, match=r"TrainBatch\.rollout_logprobs is None"):
        with_old_logprobs(batch.replace(rollout_logprobs=None), engines, scored)


def test_optimizer_steps_share_out_the_groups_that_have_a_loss():
    batch = example_batch()  # groups 4, 9, 4, 2, 2, 4, 7; the last of group 2 is an empty response
    assert optimizer_step_samples(batch, 2) == [[0, 2, 3, 4, 5], [1, 6]]
    keep = torch.tensor([1.0, 0, 1, 0, 0, 1, 1]).repeat_interleave(batch.lengths)
    masked = batch.replace(loss_mask=batch.loss_mask * keep)
    for steps, expected in ((2, [[0, 1, 2, 5], [3, 4, 6]]), (4, [[0, 1, 2, 5], [3, 4, 6]])):
        found = optimizer_step_samples(masked, steps)
        assert found == expected
        assert all(masked.select(samples).num_loss_tokens > 0 for samples in found)
