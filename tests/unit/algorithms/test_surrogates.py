"""Single surrogates of the policy objective in float64 against plain torch, value and gradient; what each is for."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from rltool.algorithms.contracts import example_tokens
from rltool.algorithms.losses import (
    LossTokens,
    cispo_loss,
    off_policy_sequence_mask,
    ppo_loss,
    sapo_loss,
    sequence_log_ratio,
)
from rltool.algorithms.objective import policy_objective, policy_token_losses
from rltool.config.algorithm import AlgorithmConfig
from tests import plain_algorithms as plain

SAMPLES = [4, 1, 3, 6]


def tokens_of_samples(*, per_sample: bool, spread: float = 0.3) -> tuple[torch.Tensor, LossTokens]:
    """(log-probabilities, the rest) of 14 loss tokens in float64; advantages of whole samples or of single tokens."""
    generator = torch.Generator().manual_seed(21)
    noise = lambda n: torch.randn(n, generator=generator, dtype=torch.float64)  # noqa: E731
    sample = torch.arange(len(SAMPLES)).repeat_interleave(torch.tensor(SAMPLES))
    old = -1.5 + 0.5 * noise(len(sample))
    advantages = noise(len(SAMPLES))[sample] if per_sample else noise(len(sample))
    rest = LossTokens(
        old_logprobs=old,
        advantages=advantages,
        sample=sample,
        num_samples=len(SAMPLES),
        entropy=noise(len(sample)).abs(),
        rollout_logprobs=old + 0.1 * noise(len(sample)),
    )
    return (old + spread * noise(len(sample))).requires_grad_(), rest


def gradient(loss: torch.Tensor, logprobs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad((loss * weights).sum(), logprobs, retain_graph=True)[0]


def plain_token_losses(logprobs: torch.Tensor, tokens: LossTokens, a: AlgorithmConfig) -> torch.Tensor:
    """Token by token, in the form of GSPO-token (Zheng et al. 2025, eq. 14) where a ratio is a sample's."""
    losses = []
    for i in range(tokens.num_samples):
        own = (tokens.sample == i).nonzero().squeeze(-1).tolist()
        new, old = [logprobs[t] for t in own], [tokens.old_logprobs[t] for t in own]
        given = [float(tokens.advantages[t]) for t in own]
        for t, (p, q, advantage) in enumerate(zip(new, old, given, strict=True)):
            ratio = torch.exp(p - q)
            if plain.example(a.objective) == "gmpo":
                # The gradient of a token is its own share of the geometric mean, times the tokens of its sample.
                detached = [x.detach() for x in new]
                detached[t] = p
                mean = plain.geometric_mean_of_clipped(detached, old, given, a)
                ratio = mean.detach() + len(own) * (mean - mean.detach())
            elif getattr(a.objective, "ratio", "token") == "sequence":
                s = math.exp(sum(float(x.detach()) - float(y) for x, y in zip(new, old, strict=True)) / len(own))
                ratio = s * torch.exp(p) / torch.exp(p.detach())
            losses.append(plain.surrogate(p, ratio, advantage, a))
    return torch.stack(losses)


SETTINGS = [
    {},
    {"objective": {"clip_low": 0.1, "clip_high": 0.15, "dual_clip": 1.2}},
    {"objective": {"clip_low": 1.0, "clip_high": math.inf}},
    {"objective": {"kind": "cispo", "clip_low": 0.1, "clip_high": 0.1}},
    {"objective": "sapo"},
    {"objective": {"kind": "sapo", "temperature_pos": 3.0, "temperature_neg": 0.5}},
    plain.gmpo(0.3297, 0.4918),
    plain.gmpo(0.05, 0.1),
    plain.gmpo(1.0, math.inf),
    {"objective": "reinforce"},
    {"objective": {"ratio": "sequence", "clip_low": 0.02, "clip_high": 0.03}},
    {"objective": {"kind": "cispo", "ratio": "sequence"}},
]


@pytest.mark.parametrize("per_sample", [True, False], ids=["per sample", "per token"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_value_and_gradient_equal_plain_torch(settings, per_sample):
    algorithm = AlgorithmConfig(**settings)
    logprobs, tokens = tokens_of_samples(per_sample=per_sample)
    found = policy_objective(logprobs, tokens, algorithm).loss
    expected = plain_token_losses(logprobs, tokens, algorithm)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-8)
    for seed in range(3):
        weights = torch.rand(len(logprobs), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        theirs = gradient(expected, logprobs, weights)
        torch.testing.assert_close(gradient(found, logprobs, weights), theirs, rtol=0, atol=1e-8)
        assert theirs.abs().max() > 1e-2


@pytest.mark.parametrize("settings", [{"objective": {"ratio": "sequence"}}, plain.gmpo(0.1, 0.2)])
def test_where_advantages_are_per_sample_the_token_form_is_the_papers_objective(settings):
    """GSPO's eq. 5 and GMPO's algorithm 1 as written: one ratio a sample, whose gradient goes to all of its tokens."""
    algorithm = AlgorithmConfig(**settings)
    logprobs, tokens = tokens_of_samples(per_sample=True)
    total = torch.zeros((), dtype=torch.float64)
    for i in range(tokens.num_samples):
        own = (tokens.sample == i).nonzero().squeeze(-1)
        new, old = logprobs[own], tokens.old_logprobs[own]
        advantage = float(tokens.advantages[own[0]])
        if plain.example(algorithm.objective) == "gmpo":
            ratio = plain.geometric_mean_of_clipped(list(new), list(old), [advantage] * len(own), algorithm)
        else:
            ratio = torch.exp((new - old).mean())
        total = total + plain.surrogate(new[0], ratio, advantage, algorithm)
    each = torch.tensor([1.0 / SAMPLES[i] for i in tokens.sample.tolist()], dtype=torch.float64)
    loss = policy_objective(logprobs, tokens, algorithm).loss
    torch.testing.assert_close((loss * each).sum(), total, rtol=0, atol=1e-8)
    (expected,) = torch.autograd.grad(total, logprobs)
    torch.testing.assert_close(gradient(loss, logprobs, each), expected, rtol=0, atol=1e-8)


def test_two_tokens_of_a_sample_with_opposite_advantages_do_not_cancel_under_a_sequence_ratio():
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    log_ratio = sequence_log_ratio(logprobs - logprobs.detach(), torch.tensor([0, 0]), 1)
    ppo_loss(log_ratio, torch.tensor([1.0, -1.0]), clip_low=0.2, clip_high=0.2).loss.mean().backward()
    assert logprobs.grad.tolist() == [-0.5, 0.5]


@pytest.mark.parametrize("settings", [{"objective": {"ratio": "sequence"}}, plain.gmpo(0.3297, 0.4918)])
def test_a_token_weight_of_zero_masks_its_token_under_a_ratio_of_samples(settings):
    logprobs, tokens = tokens_of_samples(per_sample=True)
    weights = torch.tensor([float(t % 3 > 0) for t in range(len(logprobs))], dtype=torch.float64)
    loss, _ = policy_token_losses(logprobs, tokens, weights, AlgorithmConfig(**settings))
    loss.sum().backward()
    assert not logprobs.grad[weights == 0].any() and logprobs.grad[weights > 0].any()


@pytest.mark.parametrize("settings", [{"objective": "sapo"}, {"objective": "reinforce"}])
def test_gradients_of_smooth_surrogates_are_those_of_their_values(settings):
    logprobs, tokens = tokens_of_samples(per_sample=False)
    assert torch.autograd.gradcheck(
        lambda p: policy_objective(p, tokens, AlgorithmConfig(**settings)).loss, logprobs, atol=1e-6
    )


# What each is for.


def test_dual_clip_ends_the_pull_of_a_bad_token_that_became_far_likelier():
    log_ratio = torch.tensor([2.0, 2.0, 0.1], requires_grad=True)
    result = ppo_loss(log_ratio, torch.tensor([-1.0, 1.0, -1.0]), clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    result.loss.sum().backward()
    assert result.loss[0] == 3.0 and log_ratio.grad[0] == 0
    assert result.dual_clipped.tolist() == [1, 0, 0] and result.clipped.tolist() == [0, 1, 0]
    assert log_ratio.grad[2] > 0


def test_cispo_keeps_the_gradient_where_ppo_clips_it():
    logprobs = torch.tensor([1.0], requires_grad=True)
    ppo_loss(logprobs - torch.zeros(1), torch.ones(1), clip_low=0.2, clip_high=0.2).loss.backward()
    assert logprobs.grad.item() == 0
    result = cispo_loss(logprobs, logprobs - torch.zeros(1), torch.ones(1), clip_low=0.2, clip_high=0.2)
    result.loss.backward()
    assert logprobs.grad.item() == pytest.approx(-1.2) and result.clipped.item() == 1


def test_a_sequence_ratio_is_the_geometric_mean_and_wild_tokens_stay_finite():
    log_ratio = torch.tensor([0.1, 0.3, -0.5], requires_grad=True)
    found = sequence_log_ratio(log_ratio, torch.tensor([0, 0, 2]), 3)
    torch.testing.assert_close(found.detach(), torch.tensor([0.2, 0.2, -0.5]))
    for objective, ratio in (("ppo", "token"), ("ppo", "sequence"), ("cispo", "token")):
        logprobs, tokens = example_tokens()
        loss = policy_objective(logprobs, tokens, AlgorithmConfig(objective={"kind": objective, "ratio": ratio})).loss
        loss.sum().backward()
        assert torch.isfinite(loss).all() and torch.isfinite(logprobs.grad).all()


def test_the_pull_of_sapo_is_ppos_at_a_ratio_of_one_and_fades_faster_for_bad_tokens():
    log_ratio = torch.tensor([0.0, 0.0, 1.0, 1.0], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    sapo_loss(log_ratio, advantages, temperature_pos=1.0, temperature_neg=1.05).loss.sum().backward()
    good, bad = log_ratio.grad[2].item(), log_ratio.grad[3].item()
    assert log_ratio.grad[:2].tolist() == [-1.0, 1.0]
    assert 0 < bad < -good < math.e


def test_gmpo_clips_a_token_on_the_side_where_its_advantage_pulls_and_nowhere_else():
    logprobs = torch.tensor([1.0, -1.0, 1.0, -1.0], requires_grad=True)
    advantages, sample = torch.tensor([1.0, 1.0, -1.0, -1.0]), torch.tensor([0, 0, 1, 1])
    zeros = torch.zeros(4)
    tokens = LossTokens(old_logprobs=zeros, advantages=advantages, sample=sample, num_samples=2, entropy=zeros)
    loss = policy_objective(logprobs, tokens, AlgorithmConfig(objective="examples.algorithms:gmpo")).loss
    loss.sum().backward()
    assert (logprobs.grad != 0).tolist() == [False, True, True, False]
    ratio = torch.tensor([-0.3, -0.3, 0.3, 0.3]).exp()
    torch.testing.assert_close(loss.detach(), -ratio * advantages, rtol=1e-4, atol=0)


@pytest.mark.parametrize("per_sample", [True, False], ids=["per sample", "per token"])
def test_off_policy_samples_with_a_negative_advantage_have_no_loss_and_no_gradient(per_sample):
    logprobs, tokens = tokens_of_samples(per_sample=per_sample)
    shift = torch.tensor([0.4, -0.4, 0.0, 0.4], dtype=torch.float64)[tokens.sample]
    tokens = dataclasses.replace(tokens, rollout_logprobs=logprobs.detach() + shift + 0.01 * tokens.entropy)
    algorithm = AlgorithmConfig(off_policy_mask_threshold=0.05)
    found, values = policy_token_losses(logprobs, tokens, None, algorithm)
    alone = policy_objective(logprobs, tokens, AlgorithmConfig()).loss
    expected = torch.ones(len(logprobs), dtype=torch.float64)
    for i in range(tokens.num_samples):
        own = tokens.sample == i
        divergence = (tokens.rollout_logprobs - logprobs.detach())[own].mean()
        expected[own & (tokens.advantages < 0)] = float(divergence <= 0.05)
    assert 0 < expected.mean() < 1
    torch.testing.assert_close(found, alone * expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(values["off_policy_masked_fraction"], 1 - expected)
    weights = torch.ones_like(expected)
    torch.testing.assert_close(
        gradient(found, logprobs, weights), gradient(alone, logprobs, expected), rtol=0, atol=1e-12
    )
    mask = off_policy_sequence_mask(
        logprobs, tokens.rollout_logprobs, tokens.advantages.abs(), tokens.sample, tokens.num_samples, threshold=0.05
    )
    assert bool(mask.all()) and not mask.requires_grad, "good samples stay, however far off"


def test_kl_cov_adds_the_distance_to_the_old_policy_at_the_chosen_tokens():
    logprobs, tokens = tokens_of_samples(per_sample=False)
    coefs = 0.7 * (torch.arange(len(logprobs)) % 4 == 0).double()
    algorithm = AlgorithmConfig(entropy={"kind": "kl_cov", "fraction": 0.3})
    found, _ = policy_token_losses(logprobs, dataclasses.replace(tokens, kl_cov_coefs=coefs), None, algorithm)
    alone, _ = policy_token_losses(logprobs, tokens, None, AlgorithmConfig())
    difference = logprobs - tokens.old_logprobs
    torch.testing.assert_close(found, alone + coefs * difference.abs(), rtol=0, atol=1e-12)
    ones = torch.ones(len(logprobs), dtype=torch.float64)
    expected = gradient(alone, logprobs, ones) + coefs * difference.detach().sign()
    torch.testing.assert_close(gradient(found, logprobs, ones), expected, rtol=0, atol=1e-12)


def test_weights_that_came_with_the_batch_take_the_place_of_the_configured_ones():
    logprobs, tokens = tokens_of_samples(per_sample=True)
    tokens = dataclasses.replace(tokens, ref_logprobs=tokens.old_logprobs - 0.3)
    ones = torch.ones(len(logprobs), dtype=torch.float64)
    configured = AlgorithmConfig(kl={"kind": "loss", "coef": 0.1}, entropy={"kind": "bonus", "coef": 0.2})
    adapted = dataclasses.replace(tokens, kl_coefs=0.3 * ones, entropy_coefs=0.0 * ones)
    found, _ = policy_token_losses(logprobs, adapted, None, configured)
    expected, _ = policy_token_losses(logprobs, tokens, None, AlgorithmConfig(kl={"kind": "loss", "coef": 0.3}))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
