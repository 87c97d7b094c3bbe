"""`engines.mode = "colocate"` with real vLLM engines on the CPU, where a pause stands for sleep and gloo for CUDA IPC:
engines and trainer take turns, in processes of their own."""

from __future__ import annotations

import os
import signal

import pytest

from rltool.engines.endpoints import Endpoints
from rltool.processes.stop import GRACE_SECONDS
from tests.e2e.job import STOP_SECONDS
from tests.e2e.test_managed import alive_with, engines_of, job, started_anew, stop, wait_for

__all__ = ["job"]  # the fixture

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

ENGINES = (
    'engines.groups=[{name="main",count=2,engines_per_gpu=2,device="cpu",max_model_len=64},'
    '{name="judges",model="judge",device="cpu",max_model_len=64}]'
)
PARTS = ("wait", "sleep", "onload", "train", "samples", "reference", "offload", "sync", "eval")
"""time/NAME_seconds that are together the whole step (docs/metrics.md)."""
PARITY = 1e-4
"""Mean |log-probability difference| of trainer and engines, both in fp32: the run itself stops above it (write_job)."""


ADAPTERS = ["lora.rank=4", "optimizer.lr=0.002", 'weights.lora_sync="adapter"']


@pytest.mark.parametrize("adapters", [[], pytest.param(ADAPTERS, marks=pytest.mark.long)], ids=["weights", "adapters"])
def test_an_engine_and_the_trainer_take_turns_and_agree(adapters, job):
    sets = [
        'engines.mode="colocate"', 'engines.groups=[{name="main",device="cpu",max_model_len=64}]', "eval.sets={}",
        "optimizer_steps_per_rollout=1", *adapters,
    ]  # fmt: skip
    said = job("train", "one", sets=sets)
    assert "placement: 1 Ray bundle (1 trainer, 0 engine): colocated engines share the trainer's bundles" in said
    steps = job.steps("one")
    assert len(steps) == 3 and max(record["train/logprob_abs_diff_mean"] for record in steps) < PARITY
    assert all(record["train/grad_norm"] > 0 for record in steps)
    assert len({version for record in steps for version in record["weight_versions"]}) == 3, "each samples anew"
    assert engines_of(job, "one") == {} and alive_with(job, "one") == []


@pytest.mark.long
def test_engines_and_trainer_take_turns_and_a_killed_engine_comes_back(job):
    """Two engines of the policy and a judge; one is killed, is started in an engines' turn, and serves again after its
    sync. Every step's log-probabilities agree, and a checkpoint in the middle makes the engines sleep once more."""
    sets = [
        'engines.mode="colocate"', ENGINES, f'models.judge.path="{job.model}"', "optimizer_steps_per_rollout=1",
        'reward.function="tests.e2e.rewards:judged"', "engines.restart_backoff=0.1", "steps=100000", "eval.sets={}",
        "checkpoint.every_steps=2", "checkpoint.keep_last=1",
    ]  # fmt: skip
    process = job.start("train", "turns", sets=sets)
    metrics = job.runs / "turns" / "metrics.jsonl"

    def until(condition) -> None:
        wait_for(condition, process, job, "turns")

    def steps() -> list[dict]:
        return job.steps("turns") if metrics.exists() else []

    try:
        until(lambda: len(steps()) >= 3)
        victim = engines_of(job, "turns")["engine-0"].pid
        os.kill(victim, signal.SIGKILL)
        until(lambda: started_anew(job, "turns", "engine-0", victim))
        until(lambda: steps()[-1].get("engines/restarts_total", 0) >= 1 and steps()[-1]["rollout/engines_serving"] == 2)
        back = len(steps())
        until(lambda: len(steps()) >= back + 2)
        process.send_signal(signal.SIGINT)
        assert process.wait(300) in (0, 130)
    finally:
        if process.poll() is None:
            process.kill()
        stop(job, "turns")
    output, records = job.output("turns"), steps()
    assert "placement: 1 Ray bundle (1 trainer, 0 engine): colocated engines share the trainer's bundles" in output
    assert "model judge: 1 engines, weights not updated" in output
    assert max(record["train/logprob_abs_diff_mean"] for record in records) < PARITY, output[-4000:]
    for record in records[:-1]:
        parts = sum(record.get(f"time/{part}_seconds", 0.0) for part in PARTS)
        assert parts == pytest.approx(record["time/step_seconds"], rel=0.02)
        assert {"time/sleep_seconds", "time/onload_seconds", "time/offload_seconds"} <= record.keys()
    # The engines do not get the weights of the last one, which a signal ended.
    assert len({record["weight_version"] for record in records[:-1]}) == len(records) - 1
    assert (job.runs / "turns" / "checkpoints" / "latest").exists()
    assert engines_of(job, "turns") == {} and alive_with(job, "turns") == []
    assert Endpoints.load(job.runs / "turns" / "endpoints.json").models == {}


@pytest.mark.long
def test_sigterm_to_the_process_group_after_the_last_step_leaves_nothing(job):
    """As `timeout` sends it, at the moment when nothing is left to do but to take the run apart."""
    sets = [
        'engines.mode="colocate"', 'engines.groups=[{device="cpu",max_model_len=64}]', "eval.sets={}", "steps=2",
        "optimizer_steps_per_rollout=1", "checkpoint.save_at_end=false",
    ]  # fmt: skip
    process = job.start("train", "last", sets=sets)
    metrics = job.runs / "last" / "metrics.jsonl"
    try:
        wait_for(lambda: metrics.exists() and len(job.steps("last")) == 2, process, job, "last")
        assert process.poll() is None
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(STOP_SECONDS + GRACE_SECONDS) == 0, job.output("last")[-4000:]
    finally:
        if process.poll() is None:
            process.kill()
            stop(job, "last")
    output = job.output("last")
    assert "SIGTERM: all steps are done" in output and "a checkpoint is written" not in output, output[-4000:]
    assert "error: " not in output and "done after step 2" in output, output[-4000:]
    assert engines_of(job, "last") == {} and alive_with(job, "last") == []


def test_a_dry_run_shows_whose_gpus_the_engines_are_on(job):
    out = job("train", "dry", "--dry-run", sets=['engines.mode="colocate"', "engines.groups=[{}]", "eval.sets={}"])
    assert "1 Ray bundle (1 trainer, 0 engine): colocated engines share the trainer's bundles, in turns" in out
    assert "engine-0: vllm regular, group default, cpu, http://127.0.0.1:20000" in out
