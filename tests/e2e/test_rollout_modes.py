"""One step off-policy and asynchronous training against a real vLLM: updates in flight, stops, kill -9 and resume."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from rltool.engines.endpoints import Endpoints, ModelEndpoints
from tests.e2e.engines import RunningEngine
from tests.e2e.job import DEADLINE, STOP_SECONDS, Job, write_job

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

CORRECTED = ["optimizer_steps_per_rollout=1", 'algorithm.is_weights="token"', "eval.sets={}"]
"""What an off-policy run is configured with: the trainer's recomputed policy, and truncated importance weights."""
MODES = {
    "synchronous": [],
    "one step off-policy": ["rollout.max_staleness=1", *CORRECTED],
    "asynchronous": ["rollout.max_staleness=4", 'weights.pause_mode="abort"', *CORRECTED],
}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, tiny_untied_dir: Path, vllm_engine_untied: RunningEngine) -> Job:
    root = tmp_path_factory.mktemp("modes")
    Endpoints(models={"policy": ModelEndpoints(engines=(vllm_engine_untied.endpoint,))}).save(root / "endpoints.json")
    return write_job(root, tiny_untied_dir, f"@{root}/endpoints.json")


def trained_groups(job: Job, run: str) -> Counter[int]:
    """How often each group was trained on, along the line of weights that survives.

    A step that was done again replaced its dump.
    """
    counts: Counter[int] = Counter()
    for record in job.steps(run):
        dump = json.loads((job.runs / run / "rollouts" / f"step_{record['step']:06d}.json").read_text())
        counts.update({sample["group_id"] for sample in dump["samples"]})
    return counts


@pytest.mark.parametrize(
    ("mode", "bound"), [pytest.param("one step off-policy", 1, marks=pytest.mark.long), ("asynchronous", 4)]
)
def test_no_trained_token_is_older_than_the_bound_and_current_ones_agree_with_the_trainer(job, mode, bound):
    run = mode.replace(" ", "-")
    job("train", run, sets=[*MODES[mode], "steps=8"])
    steps = job.steps(run)
    assert len(steps) == 8
    assert all(record["rollout/staleness_max"] <= bound for record in steps)
    assert max(record["rollout/staleness_max"] for record in steps) == bound, "generation ran ahead as far as it may"
    for record in steps:
        compared = record["train/logprob_compared_tokens"]
        assert (compared == 0) == ("train/logprob_abs_diff_mean" not in record)
        assert record.get("train/logprob_abs_diff_mean", 0.0) < 1e-5
        assert record["weights/logprob_abs_diff_mean"] < 1e-5, "each sync compared the engine, whatever the batch holds"
    assert set(trained_groups(job, run).values()) == {1}


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=[pytest.mark.long] * (mode != "asynchronous")) for mode in MODES]
)
def test_a_run_that_is_killed_and_resumed_loses_no_prompt_and_repeats_none(job, mode):
    run = f"killed-{mode.replace(' ', '-')}"
    sets = [*MODES[mode], "eval.sets={}", "checkpoint.every_steps=2"]
    victim = job.start("train", run, sets=[*sets, "steps=1000"])
    wait_for(lambda: "step 5/" in job.output(run), lambda: job.output(run))
    family = [psutil.Process(victim.pid), *psutil.Process(victim.pid).children(recursive=True)]
    for process in family:
        process.kill()
    victim.wait(30)
    psutil.wait_procs(family, timeout=30)
    job("train", run, "--resume", sets=[*sets, "steps=9"])
    steps = job.steps(run)
    assert [record["step"] for record in steps] == list(range(9))
    groups = trained_groups(job, run)
    assert set(groups.values()) == {1} and sum(groups.values()) == 9 * 8
    # Nothing was filtered here, so the groups that were trained on are the first ones, without a hole.
    assert sorted(groups) == list(range(9 * 8))


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 0, marks=pytest.mark.long)]
)
def test_a_stop_in_a_long_rollout_aborts_it_at_the_engine(job, vllm_engine_untied, number, code):
    """Responses that would take minutes on this machine: the stop does not wait for them."""
    run = f"stopped-{int(number)}"
    long = [
        "sampling.max_response_tokens=200",
        "trainer.max_tokens_per_micro_batch=4096",
        "rollout.prompts_per_step=64",
        "rollout.samples_per_prompt=16",
    ]
    sets = [*long, "steps=1000", "eval.sets={}", "optimizer_steps_per_rollout=1", "sampling.stop_token_ids=[]"]
    process = job.start("train", run, sets=sets)
    wait_for(lambda: "data: " in job.output(run), lambda: job.output(run))
    before = metric(vllm_engine_untied, "generation_tokens_total")
    wait_for(lambda: running_requests(vllm_engine_untied) > 0, lambda: job.output(run))
    process.send_signal(number)
    assert process.wait(DEADLINE) == code, job.output(run)
    sampled = metric(vllm_engine_untied, "generation_tokens_total") - before
    assert sampled < 0.5 * 64 * 16 * 200, "it has not waited for the responses"
    assert running_requests(vllm_engine_untied) == 0, (
        "what was in flight is aborted, and not left to be generated for nobody"
    )
    assert not (job.runs / run / "checkpoints").exists(), "no step was made, so there is nothing to save"
    _, paused = vllm_engine_untied.http("GET", "/is_paused", key=vllm_engine_untied.key)
    assert not paused["is_paused"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("after", "sets"),
    [
        ("starting Ray", []),
        ("building the model", []),
        ("reading the data", []),
        ("engines agree", ["eval.samples_per_prompt=2000", "eval.sampling.max_response_tokens=200"]),
        ("engines agree", ["epochs_per_rollout=2000", "eval.sets={}"]),
    ],
    ids=["ray", "model", "data", "evaluation", "training"],
)
def test_a_stop_comes_back_in_seconds_in_every_phase(job, after, sets, request):
    """Beside the one in a rollout above, and the one between steps in test_train.py."""
    run = request.node.callspec.id
    process = job.start("train", run, sets=["steps=1000", *sets])
    wait_for(lambda: after in job.output(run), lambda: job.output(run))
    time.sleep(4.0 if run == "training" else 1.0)  # its rollout comes first
    assert process.poll() is None, job.output(run)
    process.send_signal(signal.SIGINT)
    signalled = time.monotonic()
    assert process.wait(DEADLINE) == 130, job.output(run)
    print("TOOK", run, time.monotonic() - signalled)
    assert time.monotonic() - signalled < STOP_SECONDS, job.output(run)


def running_requests(engine: RunningEngine) -> float:
    return metric(engine, "num_requests_running")


def metric(engine: RunningEngine, name: str) -> float:
    _, text = engine.http("GET", "/metrics", key=engine.key)
    lines = [line for line in str(text).splitlines() if line.startswith(f"vllm:{name}")]
    assert lines, f"vLLM has no {name}"
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def wait_for(condition, log) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, log()[-3000:]
        time.sleep(0.05)
