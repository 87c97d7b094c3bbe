"""Rollout-only: what it refuses, and what it writes."""

import pytest

from rltool.errors import UsageError
from rltool.rollout.dump import read_dump, write_dump
from rltool.rollout.manager import RolloutResult
from rltool.rollout.record import check_directory, check_settings, record_rollouts
from rltool.rollout.sample import Sample


def test_trainer_settings_typed_on_the_command_line_are_refused():
    with pytest.raises(UsageError, match=r"trainer.world_size \(--set\), weights.transport \(--set\)"):
        check_settings({"trainer.world_size": "--set", "weights.transport": "--set", "sampling.temperature": "--set"})


def test_trainer_settings_of_a_shared_file_are_told():
    assert check_settings({"trainer.world_size": "run.toml", "optimizer.lr": "run.toml", "steps": "--steps"}) == ["not used without a trainer: [optimizer], [trainer]"]
    assert check_settings({"sampling.temperature": "run.toml"}) == []


def test_a_directory_with_rollouts_is_not_mixed_with_new_ones(tmp_path):
    check_directory(tmp_path / "new")
    write_dump(tmp_path, step=2, seed=0, samples=[])
    with pytest.raises(UsageError, match="steps 2 to 2: give another --out"):
        check_directory(tmp_path)


def test_every_step_is_on_disk_when_it_is_reported(tmp_path):
    class Manager:
        def generate(self, step):
            return RolloutResult([Sample(step, 0, 0, [1])], {"rollout/reward_mean": 0.5}, 1.0)

    seen = []
    record_rollouts(Manager(), tmp_path, steps=3, seed=9, on_step=lambda step, result: seen.append(read_dump(tmp_path, step)))
    assert [(dump.step, dump.seed, dump.samples[0].group_id) for dump in seen] == [(0, 9, 0), (1, 9, 1), (2, 9, 2)]
    assert seen[0].info == {"metrics": {"rollout/reward_mean": 0.5}}
