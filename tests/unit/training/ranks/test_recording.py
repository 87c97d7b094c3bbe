"""Profiles and memory snapshots: which steps they cover, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from rltool.config.sections import MonitorConfig
from rltool.config.train import TrainConfig
from rltool.errors import UsageError
from rltool.training.ranks.profiling import StepRecording, check_recording


class Trainer:
    def __init__(self):
        self.calls = []

    def start_profile(self):
        self.calls.append("profile")

    def stop_profile(self, directory, name):
        self.calls.append(name)
        return [directory / name]

    def start_memory(self):
        self.calls.append("memory")

    def stop_memory(self, directory, name):
        self.calls.append(name)
        return [directory / name]


def recording(**settings):
    trainer, said = Trainer(), []
    return trainer, StepRecording(MonitorConfig(**settings), trainer, Path("p"), said.append), said


def run(record, trainer, steps):
    for step in steps:
        with record.around(step):
            trainer.calls.append(step)


def test_steps_from_a_to_b_exclusive_are_profiled():
    trainer, record, said = recording(profile_steps="1:3")
    run(record, trainer, range(4))
    assert trainer.calls == [0, "profile", 1, 2, "steps_1_to_2", 3] and said == ["profile: p/steps_1_to_2"]


def test_one_step_of_memory():
    trainer, record, _ = recording(memory_snapshot=1)
    run(record, trainer, range(3))
    assert trainer.calls == [0, "memory", 1, "memory_step_1", 2]


def test_a_step_that_fails_still_writes_what_was_recorded():
    trainer, record, _ = recording(profile_steps="0:9", memory_snapshot=1)
    run(record, trainer, [0])
    with pytest.raises(RuntimeError), record.around(1):
        raise RuntimeError
    record.close()
    assert trainer.calls == ["profile", 0, "memory", "memory_step_1", "steps_0_to_1"]


def test_a_run_that_ends_early_writes_its_profile_once():
    trainer, record, _ = recording(profile_steps="0:9")
    run(record, trainer, [0, 1])
    record.close()
    record.close()
    assert trainer.calls == ["profile", 0, 1, "steps_0_to_1"]


@pytest.mark.parametrize("text", ["3:3", "4:2", "x", "1", "1:2:3", "-1:2"])
def test_what_names_no_steps_is_refused(text):
    with pytest.raises(ValidationError):
        MonitorConfig(profile_steps=text)


def check(device="cpu", first=0, **monitor):
    check_recording(TrainConfig.model_validate({"model": {"path": "m"}, "steps": 5, "monitor": monitor}), device, first)


def test_a_memory_snapshot_without_cuda_and_steps_outside_the_run_are_refused():
    with pytest.raises(UsageError, match="use --profile-steps there"):
        check(memory_snapshot=1)
    with pytest.raises(UsageError, match="--profile-steps.*steps 3 to 6 are not all among.*0 to 4"):
        check(profile_steps="3:7")
    with pytest.raises(UsageError, match="2 to 4"):
        check(profile_steps="1:3", first=2)
    with pytest.raises(UsageError, match="--memory-snapshot"):
        check(device="cuda", memory_snapshot=5)
    check(profile_steps="0:5")
    check(device="cuda", memory_snapshot=4, first=4)
