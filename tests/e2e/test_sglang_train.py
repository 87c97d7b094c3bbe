"""SGLang by commands: `rltool serve-engines --engine sglang`, trainings against it without a router, `rltool stop`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from rltool.processes.ports import FREE_RANGE
from rltool.processes.run_directory import RunDirectory, open_run
from rltool.processes.state import read_states
from rltool.processes.stop import process_tree
from tests.e2e.engines import running, sglang_python
from tests.e2e.job import DEADLINE, Job, write_job

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

EQUAL = 1e-4
"""Mean absolute difference of fp32 log-probabilities, SGLang's kernels against Megatron's; measured 1e-5."""
ENGINES = "engines"


@pytest.fixture
def job(tmp_path: Path, tiny_untied_dir: Path) -> Iterator[Job]:
    """A job whose engines a run of their own has; whatever a failed test leaves of it is killed."""
    job = write_job(tmp_path, tiny_untied_dir, f"@{tmp_path}/runs/{ENGINES}/endpoints.json")
    try:
        yield job
    finally:
        if (job.runs / ENGINES).exists():
            for process in processes_of(open_run(ENGINES, create=False, root=job.runs)):
                process.kill()


def processes_of(run: RunDirectory) -> list[psutil.Process]:
    return [process for state in read_states(run) for process in process_tree(state)]


def rltool(job: Job, *words: str) -> str:
    argv = [sys.executable, "-m", "rltool", *words, "--run", ENGINES]
    done = subprocess.run(
        argv, env=job.environment(), capture_output=True, text=True, timeout=DEADLINE, cwd=job.root
    )  # fmt: skip
    assert done.returncode == 0, f"{words} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.mark.parametrize("transport", ["gloo", pytest.param("disk", marks=pytest.mark.long)])
def test_an_sglang_is_served_trained_against_and_stopped(job, transport):
    python = str(sglang_python())
    serve = ["serve-engines", str(job.model), "--engine", "sglang", "--engine-python", python, "--device", "cpu"]
    run = open_run(ENGINES, create=True, root=job.runs)
    run.ensure_key().write_text("-a-key-that-begins-like-a-flag")
    rltool(job, *serve, "--max-model-len", "64", "--detach")
    family = processes_of(run)
    assert len(family) >= 4, "the watcher, SGLang's server, its scheduler and its detokenizer"
    [meets] = {
        int(port) for process in family for flag, port in pairwise(process.cmdline()) if flag == "--nccl-port"
    }
    open_there = [connection.laddr.port for process in family for connection in process.net_connections()]
    assert meets in FREE_RANGE and meets in open_there, "torch's store is where the plan has it"

    {"gloo": train_over_gloo, "disk": train_over_disk}[transport](job)

    rltool(job, "stop")
    assert running(family) == [] and read_states(run) == []


def train_over_gloo(job: Job) -> None:
    said = job("train", "gloo", sets=['weights.transport="gloo"', "eval.sets={}"])
    assert ", asked directly" in said and not (job.runs / "gloo" / "weights").exists()
    steps = job.steps("gloo")
    assert [record["step"] for record in steps] == [0, 1, 2]
    for record in steps:
        assert 0 < record["train/logprob_abs_diff_mean"] < EQUAL
        assert record["train/grad_norm"] > 0 and record["rollout/samples"] == 32
    versions = [record["weight_versions"] for record in steps]
    assert [int(found[0].rsplit(":", 1)[1]) for found in versions] == [0, 1, 2] and {len(v) for v in versions} == {1}


def train_over_disk(job: Job) -> None:
    off_policy = ["rollout.max_staleness=1", "optimizer_steps_per_rollout=1", 'algorithm.is_weights="token"']
    over_disk = ['weights.transport="disk"', 'weights.pause_mode="abort"', "eval.sets={}", "steps=3"]
    job("train", "disk", sets=[*over_disk, *off_policy])
    steps = job.steps("disk")
    assert len(steps) == 3 and max(record["rollout/staleness_max"] for record in steps) == 1
    for record in steps:
        assert 0 < record["weights/logprob_abs_diff_mean"] < EQUAL, "each sync compares the engine's values"
        assert record.get("train/logprob_abs_diff_mean", 0.0) < EQUAL and record["weights/failed_engines"] == 0
    assert list((job.runs / "disk" / "weights").glob("*/model.safetensors.index.json"))
