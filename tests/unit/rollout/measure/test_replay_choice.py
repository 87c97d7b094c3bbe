"""Which recorded steps and groups a replay takes, and what a benchmark of engines says at its end."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from rltool.cli import load_command
from rltool.config.train import TrainConfig
from rltool.errors import UsageError
from rltool.rollout.measure.dump import write_dump
from rltool.rollout.measure.replay_choice import chosen_steps, subsample
from rltool.rollout.sample import Sample, SampleStatus
from rltool.training.engine_benchmark import Totals
from rltool.training.sources import RecordedRollouts


def samples(groups, size=2, reward=0.0):
    return [
        Sample(
            g, i, 0, [1, 2], response_ids=[3, 4], response_mask=[1, 1], response_logprobs=[-0.5, -0.5],
            reward=reward + g, status=SampleStatus.COMPLETED,
        )
        for g in range(groups)
        for i in range(size)
    ]  # fmt: skip


@pytest.mark.parametrize(("text", "steps"), [("2:4", [2, 3]), ("0:1", [0]), ("3,1", [3, 1]), ("2", [2])])
def test_steps_are_a_range_or_a_list(text, steps):
    assert chosen_steps(text, [0, 1, 2, 3]) == steps


@pytest.mark.parametrize("text", ["4:6", "2:2", "x", "1-2", "", "3,9"])
def test_steps_that_are_not_there_are_refused(text):
    with pytest.raises(UsageError, match="--recorded-steps"):
        chosen_steps(text, [0, 1, 2, 3])


def test_a_subsample_has_whole_groups_and_a_larger_one_all_of_a_smaller_one():
    found = {share: {s.group_id for s in subsample(samples(20), share, seed=3)} for share in (0.01, 0.25, 0.5, 1.0)}
    assert [len(groups) for groups in found.values()] == [1, 5, 10, 20]
    assert found[0.01] < found[0.25] < found[0.5]
    part = subsample(samples(20), 0.25, seed=3)
    assert len(part) == 10 and [s.group_id for s in part] == sorted(s.group_id for s in part)
    assert {s.group_id for s in subsample(samples(20), 0.25, seed=4)} != found[0.25]
    with pytest.raises(ValueError, match="share 0"):
        subsample(samples(2), 0, seed=0)


def test_a_replay_trains_on_the_chosen_steps_and_groups(tmp_path):
    for step in range(4):
        write_dump(tmp_path, step=step, seed=0, samples=samples(8, reward=100.0 * step))
    config = TrainConfig.model_validate({"model": {"path": "m"}, "monitor": {"samples_per_step": 2}})
    source = RecordedRollouts(config, tmp_path, steps=(3, 1), share=0.5)
    first, second = source.next_batch(0), source.next_batch(1)
    assert first.batch.num_samples == second.batch.num_samples == 8 == first.metrics["rollout/samples"]
    assert [record.tokens for record in first.kept.values()] == [("<3>", "<4>")] * 2, "m has no tokenizer"
    assert first.batch.rewards.min() >= 300 and 100 <= second.batch.rewards.min() < 200


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--fake-data", "--recorded-steps", "0:1"], "choose from --rollouts"),
        (["--fake-data", "--subsample", "0.5"], "choose from --rollouts"),
        (["--rollouts", "DUMPS", "--subsample", "0"], "leaves nothing"),
        (["--rollouts", "DUMPS", "--recorded-steps", "1:3"], "step 2 is not there"),
        (["--rollouts", "DUMPS", "--recorded-steps", "0:2", "--steps", "3"], "has with --recorded-steps 2 recorded"),
    ],
)  # fmt: skip
def test_options_that_contradict_each_other_are_refused(tmp_path, options, said):
    for step in range(2):
        write_dump(tmp_path / "d", step=step, seed=0, samples=samples(2))
    config = tmp_path / "run.toml"
    config.write_text(f"[model]\npath = {json.dumps(str(tmp_path))}\n")
    words = ["train-only", "--config", str(config), *(str(tmp_path / "d") if o == "DUMPS" else o for o in options)]
    ended = CliRunner().invoke(load_command("debug"), words)
    assert isinstance(ended.exception, UsageError) and said in str(ended.exception)


def test_totals_are_over_all_rollouts():
    totals = Totals()
    assert totals.lines(gpus=1) == []
    for _ in range(2):
        totals.add({"rollout/samples": 4.0, "rollout/sampled_tokens": 600.0, "rollout/prefix_cache_hit_rate": 0.5}, 1.5)
    totals.pauses += [0.1, 0.3]
    assert totals.lines(gpus=2) == [
        "engines: 1,200 tokens of 8 samples in 3.00 s: 400 tokens/s, 200 per GPU or worker; 150.0 tokens a sample",
        "prefix cache: 50.0% of prompt tokens were in it",
        "simulated syncs: 2, 0.200 s each, 0.300 s at most",
    ]
