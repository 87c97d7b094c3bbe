"""`engines.mode = "managed"` with real vLLM engines on the CPU: train starts them again, and what it leaves is ended.
That it starts, uses and ends them is in test_prefill_decode.py."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rltool.processes.run_directory import RunDirectory
from rltool.processes.state import ProcessState, read_state, read_states
from rltool.processes.stop import process_tree
from tests.e2e.commands import Command
from tests.e2e.job import Job, write_job

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

PATIENCE = 600.0
"""Seconds for one thing to come about: an engine is ready in 30 on an idle machine, and in 200 on a busy one."""

POLICY = 'engines.groups=[{name="main",max_model_len=64}]'
"""On what the trainer runs on, which is the CPU."""
WITH_JUDGE = (
    'engines.groups=[{name="main",device="cpu",max_model_len=64},'
    '{name="judges",model="judge",device="cpu",max_model_len=64}]'
)
MANAGED = ['engines.mode="managed"', "eval.sets={}", "optimizer_steps_per_rollout=1"]


@pytest.fixture
def job(tmp_path: Path, tiny_tied_dir: Path):
    job = write_job(tmp_path / "job", tiny_tied_dir, None)
    yield job
    for directory in job.runs.glob("*/state/run.json"):  # whatever a failed test has left
        for state in read_states(RunDirectory(directory.parent.parent)):
            for process in process_tree(state):
                process.kill()


def wait_for(condition: Callable[[], bool], process: Command, job: Job, run: str) -> None:
    """Fails at once when the run has ended."""
    ends = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() is None, f"exit code {process.returncode}: {job.output(run)[-4000:]}"
        assert time.monotonic() < ends, job.output(run)[-4000:]
        time.sleep(0.1)


def engines_of(job: Job, run: str) -> dict[str, ProcessState]:
    """Role -> state of the run's engines."""
    return {s.role: s for s in read_states(RunDirectory(job.runs / run)) if s.role.startswith("engine-")}


def started_anew(job: Job, run: str, role: str, pid: int) -> bool:
    """Whether the engine has another process than that; between the two it has none, and no record."""
    state = engines_of(job, run).get(role)
    return state is not None and state.pid != pid


def alive_with(job: Job, run: str) -> list[str]:
    """Processes that mention the run's directory: engines have it in their command line or are in it."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(job.runs / run) in f"{process.cwd()} {process.cmdline()}":
                found.append(f"{process.pid} {process.cmdline()[:4]}")
        except psutil.Error:
            continue
    return found


def stop(job: Job, run: str) -> None:
    job.say("stop", "--run", run)


def test_a_dry_run_shows_the_engines_and_starts_none(job):
    out = job("train", "dry", "--dry-run", sets=[*MANAGED, WITH_JUDGE, f'models.judge.path="{job.model}"'])
    assert "engine-0: vllm regular, group main, cpu, http://127.0.0.1:20000" in out
    assert "engine-1: vllm regular, group judges, model judge (weights not updated), cpu" in out
    assert not (job.runs / "dry").exists()


@pytest.mark.long
def test_killed_engines_are_started_again_and_used_again(job):
    """One engine of the policy and one of a judge: after each kill no step can be done without the restarted one."""
    sets = [
        *MANAGED, WITH_JUDGE, f'models.judge.path="{job.model}"', "steps=100000",
        'reward.function="tests.e2e.rewards:judged"', "engines.restart_backoff=0.1",
    ]  # fmt: skip
    process = job.start("train", "kills", sets=sets)

    def until(condition) -> None:
        wait_for(condition, process, job, "kills")

    def steps() -> int:
        return len(job.steps("kills")) if (job.runs / "kills" / "metrics.jsonl").exists() else 0

    try:
        until(lambda: steps() >= 2)
        for role, restarts in (("engine-0", 1.0), ("engine-1", 2.0)):
            victim = engines_of(job, "kills")[role]
            os.kill(victim.pid, signal.SIGKILL)
            until(lambda role=role, pid=victim.pid: started_anew(job, "kills", role, pid))
            until(lambda n=restarts: steps() and job.steps("kills")[-1].get("engines/restarts_total", 0.0) >= n)
            now = steps()
            until(lambda now=now: steps() >= now + 2)
        assert engines_of(job, "kills")["engine-0"].log == victim_log(job, "engine-0")
        process.send_signal(signal.SIGINT)
        assert process.wait(300) in (0, 130)
    finally:
        if process.poll() is None:
            process.kill()
        stop(job, "kills")
    output = job.output("kills")
    assert output.count("started again in 0.1 s (restart 1)") == 2, output[-4000:]
    assert "model judge: engine" in output
    assert engines_of(job, "kills") == {} and alive_with(job, "kills") == []


@pytest.mark.long
def test_a_killed_router_is_started_again_and_used_again(job):
    """All generation goes through it: after the kill no step can be done without the new one. When it has no restart
    left the run says so and ends, although its engine serves."""
    sets = [
        *MANAGED, POLICY, "steps=100000", "engines.start_router=true", "engines.max_restarts=1",
        "engines.restart_backoff=0.1", "deadlines.engines=10",
    ]  # fmt: skip
    process = job.start("train", "routed", sets=sets)

    def until(condition) -> None:
        wait_for(condition, process, job, "routed")

    def steps() -> int:
        return len(job.steps("routed")) if (job.runs / "routed" / "metrics.jsonl").exists() else 0

    def router() -> ProcessState | None:
        return read_state(RunDirectory(job.runs / "routed"), "router")

    try:
        until(lambda: steps() >= 2)
        first = router()
        assert first is not None
        os.kill(first.pid, signal.SIGKILL)
        until(lambda: (now := router()) is not None and now.pid != first.pid)
        now = steps()
        until(lambda: steps() >= now + 3)
        second = router()
        assert second is not None and (second.url, second.log) == (first.url, first.log)
        os.kill(second.pid, signal.SIGKILL)
        code = process.wait(PATIENCE)
    finally:
        if process.poll() is None:
            process.kill()
        stop(job, "routed")
    output = job.output("routed")
    assert code == 1, output[-4000:]
    assert "router was killed by signal 9; it is started again in 0.1 s" in output
    assert "router was killed by signal 9; it stays dead: too many restarts" in output
    said = " ".join(output.split())
    assert f"the router {first.url}, through which all generation goes, has not answered for" in said, output[-4000:]
    assert list((job.runs / "routed" / "checkpoints").glob("step_*")), "the run stopped with a checkpoint"
    assert engines_of(job, "routed") == {} and alive_with(job, "routed") == []


def victim_log(job: Job, role: str) -> Path:
    return (job.runs / "kills" / "logs" / "attempt_1" / f"{role}.log").resolve()


@pytest.mark.long
def test_what_a_killed_driver_leaves_is_ended_by_stop(job):
    process = job.start("train", "orphans", sets=[*MANAGED, POLICY, "steps=100000"])
    try:
        metrics = job.runs / "orphans" / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and metrics.read_text() != "", process, job, "orphans")
        process.kill()
        process.wait(60)
    finally:
        stop(job, "orphans")
    assert engines_of(job, "orphans") == {} and alive_with(job, "orphans") == []

