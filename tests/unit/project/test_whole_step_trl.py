"""What benchmarks/whole_step.py configures, and whole_step_trl.py makes of its trainer's output."""

from __future__ import annotations

import argparse
import json
import tomllib

import pytest

from benchmarks.whole_step import colocated, configuration
from benchmarks.whole_step_trl import medians, step_lines, table
from rltool.config.train import TrainConfig

STEPS = [{"step": seconds, "generate": seconds / 4, "response_tokens": 10.0} for seconds in (90.0, 4.0, 8.0, 6.0)]


def test_steps_and_versions_are_told_from_other_output():
    text = "".join(f"step {i} {json.dumps(step)}\nsteps are fun\n" for i, step in enumerate(STEPS, 1))
    assert step_lines(text) == (STEPS, {})
    assert step_lines(text + 'versions {"trl": "1.16.0"}\n') == (STEPS, {"trl": "1.16.0"})


def test_medians_leave_the_first_steps_out():
    found = medians(STEPS, 1, samples=12)
    assert (found["step"], found["measured_steps"]) == (6.0, 3)
    assert found["tokens/s"] == 12 * 10 / 6
    assert found["tokens/s while generating"] == 12 * 10 / 1.5


def test_nothing_to_measure_is_an_error():
    with pytest.raises(ValueError, match="4 steps ended, of which 4"):
        medians(STEPS, 4, samples=12)


def test_the_table_has_a_dash_where_nothing_was_measured():
    header, rule, row = table({"bfloat16": {"step": 6.0}}).splitlines()
    assert header.count("|") == rule.count("|") == row.count("|")
    assert row.startswith("| bfloat16 | 6 | - |")


@pytest.mark.parametrize("engines", [1, 2])
def test_the_colocated_side_is_a_configuration_of_a_run(tmp_path, engines):
    args = argparse.Namespace(
        trainer_gpus="0", engines_per_gpu=engines, response_tokens=512, engine_args="", steps=5, old_logprobs="trainer",
        tokens=16384, prompts=64, samples=8, verify_tolerance=0.2,
    )  # fmt: skip
    text = configuration(args, tmp_path, tmp_path / "prompts.jsonl", 0) + colocated(args)
    made = TrainConfig.model_validate(tomllib.loads(text))
    [group] = made.engines.groups
    assert made.engines.shares_gpus and (group.count, group.engines_per_gpu) == (engines, engines)
