"""Tokens picked by entropy or covariance, ranked over all samples of a rollout."""

from __future__ import annotations

import statistics

import pytest
import torch

from rltool.algorithms.batch import TrainBatch
from rltool.algorithms.contracts import example_batch
from rltool.algorithms.token_selection import covariances, kl_cov, top_entropy, with_selected_tokens
from rltool.config.algorithm import AlgorithmConfig
from tests import plain_algorithms as plain


def rollout() -> TrainBatch:
    """The example with advantages and entropies per token; an environment's tokens have wild ones."""
    batch, generator = example_batch(), torch.Generator().manual_seed(31)
    noise = torch.randn(2, len(batch.tokens), generator=generator)
    wild = 100 * (1 - batch.loss_mask)
    return batch.replace(advantages=noise[0] + wild, old_entropies=noise[1].abs() + wild)


def selected(settings: dict) -> tuple[TrainBatch, dict[str, float]]:
    return with_selected_tokens(rollout(), AlgorithmConfig(**settings))


@pytest.mark.parametrize("fraction", [0.01, 0.2, 0.5, 0.99])
def test_the_tokens_of_highest_entropy_are_those_at_or_above_the_quantile(fraction):
    batch = rollout()
    chosen = batch.loss_mask > 0
    threshold = torch.quantile(batch.old_entropies[chosen].double(), 1 - fraction)
    expected = chosen & (batch.old_entropies.double() >= threshold)
    assert torch.equal(top_entropy(batch.old_entropies, batch.loss_mask, fraction=fraction), expected.float())
    assert expected.any() and not expected[chosen].all()


def test_a_whole_number_of_tokens_is_not_lost_to_rounding_and_ties_are_in():
    mask = torch.ones(11)
    assert top_entropy(torch.arange(11.0), mask, fraction=0.3).tolist() == [0.0] * 7 + [1.0] * 4
    assert top_entropy(torch.ones(11), mask, fraction=0.3).sum() == 11
    assert top_entropy(torch.ones(3), torch.zeros(3), fraction=0.3).sum() == 0


def test_tokens_that_differ_by_rounding_alone_are_chosen_together():
    """The first token of four samples of one prompt, at the threshold: one of them went to another rank."""
    entropies = torch.tensor([4.40, 4.41, 4.6, 4.6, 4.6, 4.6, 4.65, 4.66])
    rounded = entropies.clone()
    rounded[3] -= 1e-6
    chosen = [top_entropy(values, torch.ones(8), fraction=0.5).tolist() for values in (entropies, rounded)]
    assert chosen == [[0.0] * 2 + [1.0] * 6] * 2


def test_tokens_of_low_entropy_have_no_policy_loss_and_stay_in_the_divisor():
    found, metrics = selected({"entropy": {"kind": "high_entropy", "fraction": 0.3}})
    assert torch.equal(found.is_weights, top_entropy(found.old_entropies, found.loss_mask, fraction=0.3))
    assert found.num_loss_tokens == rollout().num_loss_tokens
    assert metrics["train/top_entropy_fraction"] == pytest.approx(float(found.is_weights.sum()) / found.num_loss_tokens)


def test_covariances_equal_a_plain_loop_and_average_to_the_covariance():
    batch = rollout()
    found = covariances(batch.old_logprobs, batch.advantages, batch.loss_mask)
    expected = plain.covariances(batch, batch.advantages)
    assert not found[batch.loss_mask == 0].any()
    for t, value in expected.items():
        assert found[t].item() == pytest.approx(value, abs=1e-8)
    chosen = batch.loss_mask > 0
    pair = torch.stack([batch.old_logprobs[chosen], batch.advantages[chosen]]).double()
    assert statistics.fmean(expected.values()) == pytest.approx(float(torch.cov(pair, correction=0)[0, 1]))


def test_kl_cov_takes_the_highest_of_all_samples():
    found, _ = selected({"entropy": {"kind": "kl_cov", "fraction": 0.25, "coef": 0.5}})
    expected = plain.covariances(rollout(), rollout().advantages)
    highest = sorted(expected, key=lambda t: -expected[t])[: int(0.25 * len(expected))]
    assert len(highest) > 2 and found.is_weights is None
    assert found.kl_cov_coefs.nonzero().squeeze(-1).tolist() == sorted(highest)
    assert set(found.kl_cov_coefs[highest].tolist()) == {0.5}


def test_at_least_one_token_is_picked_where_there_is_one():
    mask = torch.ones(4)
    covariance = torch.tensor([0.0, 2.0, 0.0, 9.0], dtype=torch.float64)
    assert kl_cov(covariance, mask, fraction=1e-4).tolist() == [0, 0, 0, 1]
    assert kl_cov(covariance, torch.zeros(4), fraction=0.5).sum() == 0


def test_what_is_left_out_keeps_out_beside_importance_weights():
    corrected = rollout().replace(is_weights=1.5 * rollout().loss_mask)
    algorithm = AlgorithmConfig(is_weights="token", entropy={"kind": "high_entropy", "fraction": 0.5})
    found, _ = with_selected_tokens(corrected, algorithm)
    assert set(found.is_weights.tolist()) == {0.0, 1.5}
    assert with_selected_tokens(corrected, AlgorithmConfig()) == (corrected, {})


def test_what_the_choice_needs_is_named_when_it_is_missing():
    for kind, name in (("high_entropy", "old_entropies"), ("kl_cov", "old_logprobs")):
        algorithm = AlgorithmConfig(entropy=kind)
        with pytest.raises(ValueError, match=f"TrainBatch.{name} is None"):
            with_selected_tokens(rollout().replace(**{name: None}), algorithm)


def test_no_choice_is_lost_when_samples_are_taken_apart():
    """What one optimizer step gets of the whole rollout's ranking."""
    for name, kind in (("is_weights", "high_entropy"), ("kl_cov_coefs", "kl_cov")):
        found, _ = selected({"entropy": {"kind": kind, "fraction": 0.25}})
        parts = [getattr(found.select([i]), name) for i in range(found.num_samples)]
        assert torch.equal(torch.cat(parts), getattr(found, name))
    assert float(found.kl_cov_coefs.sum()) == int(0.25 * found.num_loss_tokens)
