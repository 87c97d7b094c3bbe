"""Rollout-only: what it refuses. tests/contract/test_rollout_service.py runs it."""

import pytest

from rltool.errors import UsageError
from rltool.rollout.measure.dump import write_dump
from rltool.rollout.measure.record import check_directory, check_settings


def test_trainer_settings_typed_on_the_command_line_are_refused():
    with pytest.raises(UsageError, match=r"trainer.world_size \(--set\), weights.transport \(--set\)"):
        check_settings({"trainer.world_size": "--set", "weights.transport": "--set", "sampling.temperature": "--set"})


def test_trainer_settings_of_a_shared_file_are_told():
    assert check_settings({"trainer.world_size": "run.toml", "optimizer.lr": "run.toml", "steps": "--steps"}) == [
        "not used without a trainer: [optimizer], [trainer]"
    ]
    assert check_settings({"sampling.temperature": "run.toml"}) == []


def test_routing_that_is_to_be_replayed_is_recorded_without_a_trainer():
    assert check_settings({"algorithm.routing_replay": "--set"}) == []


def test_a_directory_with_rollouts_is_not_mixed_with_new_ones(tmp_path):
    check_directory(tmp_path / "new")
    write_dump(tmp_path, step=2, seed=0, samples=[])
    with pytest.raises(UsageError, match="steps 2 to 2: give another --out"):
        check_directory(tmp_path)
