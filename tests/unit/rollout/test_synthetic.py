"""Synthetic rollouts: a function of seed and step, with the lengths of real ones."""

from __future__ import annotations

import numpy as np
import pytest

from rltool.config.train import TrainConfig
from rltool.rollout.batching import samples_to_batch
from rltool.rollout.measure.dump import read_dump, write_dump
from rltool.rollout.sample import SampleStatus
from rltool.rollout.synthetic import synthetic_samples
from rltool.training.sources import FakeRollouts, RecordedRollouts
from tests.tiny_models import VOCAB_SIZE, write_tiny_qwen2

SIZES = {
    "num_prompts": 64,
    "samples_per_prompt": 8,
    "max_prompt_tokens": 256,
    "max_response_tokens": 1024,
    "vocab_size": 120,
}


def test_the_same_seed_and_step_give_the_same_samples_and_others_do_not():
    first = synthetic_samples(3, seed=1, **SIZES)
    assert synthetic_samples(3, seed=1, **SIZES) == first
    for step, seed in ((4, 1), (3, 2)):
        assert synthetic_samples(step, seed=seed, **SIZES)[0].response_ids != first[0].response_ids


def test_lengths_have_a_long_tail_and_keep_the_limits():
    samples = synthetic_samples(0, seed=0, **SIZES)
    lengths = np.array([len(sample.response_ids) for sample in samples])
    assert lengths.min() >= 1 and lengths.max() == 1024 and max(len(sample.prompt_ids) for sample in samples) <= 256
    assert lengths.mean() > 1.3 * np.median(lengths), "the mean of a long tail is far above the median"
    assert 130 < np.median(lengths) < 220 and 0.01 < (lengths == 1024).mean() < 0.1
    assert [sample.status == SampleStatus.TRUNCATED for sample in samples] == (lengths == 1024).tolist()


def test_samples_of_a_group_share_their_prompt_and_differ_in_reward():
    samples = synthetic_samples(2, seed=0, **SIZES)
    groups = [samples[i : i + 8] for i in range(0, len(samples), 8)]
    assert all(len({(sample.group_id, tuple(sample.prompt_ids)) for sample in group}) == 1 for group in groups)
    assert sum(len({sample.reward for sample in group}) == 2 for group in groups) > 32, (
        "groups with equal rewards teach nothing"
    )
    ids = {token for sample in samples for token in sample.response_ids}
    assert min(ids) == 0 and max(ids) == 119
    assert all(value <= 0 for sample in samples for value in sample.response_logprobs)


@pytest.mark.parametrize("limit", [1, 2])
def test_tiny_limits_work(limit):
    samples = synthetic_samples(0, seed=0, **{**SIZES, "max_prompt_tokens": limit, "max_response_tokens": limit})
    assert samples_to_batch(samples).num_samples == 512


def test_a_recorded_run_on_synthetic_data_replays_bit_by_bit(tmp_path):
    model = write_tiny_qwen2(tmp_path / "model", tied=True)
    config = TrainConfig.model_validate(
        {"model": {"path": model}, "rollout": {"prompts_per_step": 4, "samples_per_prompt": 2}}
    )
    fake = FakeRollouts(config, tmp_path / "record")
    live = [fake.next_batch(step).batch for step in range(2)]
    replayed = [RecordedRollouts(config, tmp_path / "record").next_batch(step).batch for step in range(2)]
    for a, b in zip(live, replayed, strict=True):
        assert a.tokens.equal(b.tokens) and a.rollout_logprobs.equal(b.rollout_logprobs) and a.rewards.equal(b.rewards)
    assert int(live[0].tokens.max()) < VOCAB_SIZE and not live[0].tokens.equal(live[1].tokens)


def test_a_dump_of_synthetic_samples_comes_back_equal(tmp_path):
    samples = synthetic_samples(5, seed=0, **{**SIZES, "num_prompts": 2})
    write_dump(tmp_path, step=5, seed=0, samples=samples)
    assert read_dump(tmp_path, 5).samples == samples
