"""Metrics under their stable names."""

import math

import pytest

from rltool.engines.types import VersionSpan
from rltool.rollout.measure.metrics import eval_metrics, rollout_metrics, zero_std_group_fraction
from rltool.rollout.sample import Sample, SampleStatus


def sample(group, length, reward, status=SampleStatus.COMPLETED, mask=None, version="v1"):
    mask = mask or [1] * length
    return Sample(group, 0, 0, [1], response_ids=[2] * length, response_mask=mask, response_logprobs=[0.0] * length,
                  versions=[VersionSpan(version, 0, length)], status=status, reward=reward)


def test_rollout_metrics():
    samples = [
        sample(0, 2, 1.0),
        sample(0, 4, 0.0, mask=[1, 0, 0, 1]),
        sample(1, 6, 0.5, SampleStatus.TRUNCATED, version="v2"),
        sample(1, 4, 0.5),
    ]
    metrics = rollout_metrics(samples, seconds=2.0, dropped={"reward_failed": 1, "aborted": 2})
    assert metrics["rollout/reward_mean"] == 0.5
    assert metrics["rollout/reward_std"] == pytest.approx(math.sqrt(0.125))
    assert metrics["rollout/response_length_mean"] == 4.0
    assert metrics["rollout/response_length_max"] == 6.0
    assert metrics["rollout/truncated_fraction"] == 0.25
    assert metrics["rollout/tokens_per_second"] == 7.0
    assert metrics["rollout/zero_std_group_fraction"] == 0.5
    assert (
        metrics["rollout/dropped"],
        metrics["rollout/dropped_reward_failed"],
        metrics["rollout/dropped_aborted"],
    ) == (3, 1, 2)
    assert metrics["rollout/samples"] == 4 and metrics["rollout/weight_versions"] == 2


def test_groups_of_any_size_count_once():
    samples = [sample(5, 1, 1.0), sample(9, 1, 0.0), sample(9, 1, 1.0), sample(9, 1, 0.0)]
    assert zero_std_group_fraction(samples) == 0.5


def test_a_sample_without_reward_is_an_error_and_not_a_zero():
    with pytest.raises(ValueError, match="0/0 has no reward"):
        rollout_metrics([sample(0, 1, None)], seconds=1.0, dropped={})


def test_evaluation_counts_a_failed_reward_as_wrong():
    metrics = eval_metrics("words", [sample(0, 1, 1.0), sample(1, 3, None, SampleStatus.FAILED)])
    assert metrics["eval/words/accuracy"] == 0.5
    assert metrics["eval/words/failed"] == 1
    assert metrics["eval/words/response_length_mean"] == 2.0


def test_recorded_samples_have_no_speed():
    metrics = rollout_metrics([sample(0, 1, 1.0)], seconds=None, dropped={})
    assert "rollout/tokens_per_second" not in metrics and metrics["rollout/reward_mean"] == 1.0
