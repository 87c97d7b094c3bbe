"""The benchmarks that docs/benchmarks.md has its numbers from, at their smallest: they run, and print what they say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from rltool.processes.run_directory import open_run
from rltool.processes.state import read_states
from tests.e2e.job import REPOSITORY

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(600)]

SECONDS = 400.0


def benchmark(*words: str) -> list[dict[str, Any]]:
    """Its lines. It must end by itself and leave no child."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=REPOSITORY, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, f"{words} ended with {done.returncode}:\n{done.stdout}\n{done.stderr[-4000:]}"
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_weight_syncs_are_timed_phase_by_phase_staged_and_not_and_bring_the_same_values(tmp_path: Path):
    lines = benchmark(
        "benchmarks.weight_sync", "--size", "tiny", "--cpu", "--engines", "plugin", "--backends", "gloo", "disk",
        "--staged", "--rounds", "3", "--work", str(tmp_path),
    )  # fmt: skip
    phases = {
        "gloo": {"pause", "begin", "transfer", "finish", "resume"},
        "gloo, staged": {"prefetch", "update", "finish"},
        "disk": {"pause", "begin", "transfer", "finish", "resume"},
    }
    rounds = [line for line in lines if "round" in line]
    assert [(line["backend"], line["round"]) for line in rounds] == [(name, n) for name in phases for n in range(3)]
    for line in rounds:
        taken = {name: line[name] for name in phases[line["backend"]]}
        assert all(seconds > 0 for seconds in taken.values())
        taken.pop("prefetch", None)  # before the pause
        assert sum(taken.values()) <= line["total"] + 0.001, "they follow each other; each is rounded"
        assert line["gb_per_second"] > 0
        assert line["host_bytes"] > 0 == line["device_bytes"], "the trainer is on the CPU"
    assert [line["backend"] for line in lines if "median_of" in line] == list(phases)
    compared = [line for line in lines if "same_over_all_backends" in line]
    assert [line["backend"] for line in compared] == list(phases)
    assert all(line["same_over_all_backends"] and line["logprobs"] == compared[0]["logprobs"] for line in compared)


def test_adapters_are_timed_from_publishing_to_the_first_token_in_parts():
    lines = benchmark(
        "benchmarks.adapter_sync", "--size", "tiny", "--cpu", "--rank", "4", "--load", "2", "--rounds", "4", "--",
        "--max-num-batched-tokens", "2048",
    )  # fmt: skip
    [median] = [line for line in lines if "median_of" in line]
    for line in [line for line in lines if line.get("round")] + [median]:
        assert line["in_flight_meanwhile"] == 2 and line["send"] > 0 and line["decode_step_after"] > 0
        assert line["known_first_token"] > 0 and line["known_engine_first_token"] > 0
        if line is not median:
            assert abs(line["publish"] + line["first_token"] - line["publish_to_first_token"]) < 0.001, "rounded"
            assert 0 <= line["http"] < line["first_token"]
            assert line["queued"] + line["prefill"] <= line["engine_first_token"] + 0.001


def test_the_generation_path_is_compared_with_a_bare_client(tmp_path: Path):
    [line] = benchmark(
        "benchmarks.rollout_path", "--work", str(tmp_path), "--prompts", "4", "--n", "2", "--tokens", "16",
        "--rounds", "2",
    )  # fmt: skip
    assert line["samples"] == 8 and line["of_bare"].keys() == {"data plane", "router"}
    assert line["tokens_per_second"].keys() == {"bare", "data plane", "router"}
    assert all(rate > 0 for rate in (*line["tokens_per_second"].values(), *line["of_bare"].values()))
    assert read_states(open_run("engines", create=False, root=tmp_path / "runs")) == [], "its engine and router ended"
