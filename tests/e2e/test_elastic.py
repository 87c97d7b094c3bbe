"""Engines come to a living run and go, on real parts: train, vLLM, and the command line of another shell."""

from __future__ import annotations

import json
import signal
import urllib.request
from collections import Counter
from pathlib import Path

import pytest

from rltool.engines.endpoints import Endpoints, ModelEndpoints, resolve
from rltool.processes.run_directory import open_run
from rltool.processes.state import read_states
from rltool.processes.stop import process_tree
from tests.e2e.engines import RunningEngine
from tests.e2e.job import DEADLINE, Job, write_job
from tests.e2e.test_rollout_modes import trained_groups, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

RUN = "elastic"
UNHURRIED = 'reward.function="tests.e2e.rewards:after_a_moment"'
"""The run leaves the processor to the engine that starts beside it."""


@pytest.fixture
def job(tmp_path: Path, tiny_untied_dir: Path, vllm_engine_untied: RunningEngine):
    Endpoints(models={"policy": ModelEndpoints(engines=(vllm_engine_untied.endpoint,))}).save(tmp_path / "given.json")
    job = write_job(tmp_path, tiny_untied_dir, f"@{tmp_path}/given.json")
    yield job
    if (job.runs / RUN / "state" / "run.json").exists():
        for state in read_states(open_run(RUN, create=False, root=job.runs)):
            for process in process_tree(state):
                process.kill()


class Shell:
    """Another shell of the user's, and what the run says in its files."""

    def __init__(self, job: Job) -> None:
        self.job, self.run = job, job.runs / RUN

    def __call__(self, *words: str) -> str:
        return self.job.say(*words, "--run", RUN)

    def engines(self) -> dict[str, dict]:
        [run] = json.loads(self("status", "--json"))["runs"]
        return {engine["url"]: engine for engine in run["training"]["engines"]}

    def written(self) -> set[str]:
        return {engine.url for engine in resolve([f"@{self.run}/endpoints.json"]).engines}

    def serving(self) -> list[int]:
        """How many engines served, step by step."""
        if not (self.run / "metrics.jsonl").exists():
            return []
        return [int(record["rollout/engines_serving"]) for record in self.job.steps(RUN)]


def sampled_tokens(url: str, key: str) -> float:
    request = urllib.request.Request(url + "/metrics", headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        lines = reply.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:generation_tokens_total"))


def test_engines_join_a_living_run_and_leave_it_and_endpoints_json_follows(job, vllm_engine_untied, tiny_untied_dir):
    shell = Shell(job)
    first = vllm_engine_untied.url
    train = job.start("train", RUN, sets=["steps=100000", "eval.sets={}", UNHURRIED])
    try:
        wait_for(lambda: len(shell.serving()) > 1, lambda: job.output(RUN))
        said = shell(
            "serve-engines", str(tiny_untied_dir), "--device", "cpu", "--max-model-len", "256", "--detach"
        )
        assert f"joins run {RUN} (stale" in said
        [late] = shell.written() - {first}
        assert shell.written() == {first, late}, "a run that resumes begins with both"
        key = (shell.run / "state" / "key").read_text()
        wait_for(lambda: shell.serving()[-1] == 2, lambda: job.output(RUN))
        row = shell.engines()[late]
        assert row["state"] in ("ready", "paused") and row["takes_weights"]
        before = sampled_tokens(late, key)
        wait_for(lambda: sampled_tokens(late, key) > before, lambda: job.output(RUN))

        said = shell("engines", "remove", late)
        assert f"{late}: leaves run {RUN} (" in said
        wait_for(lambda: late not in shell.engines(), lambda: job.output(RUN))
        assert shell.written() == {first}
        left_at, before = len(shell.serving()), sampled_tokens(late, key)
        wait_for(lambda: len(shell.serving()) > left_at + 2, lambda: job.output(RUN))
        assert shell.serving()[-1] == 1 and sampled_tokens(late, key) == before, "it lives on, and has nothing to do"

        assert f"added to run {RUN} (stale" in shell("engines", "add", late, "--key-file", f"{shell.run}/state/key")
        wait_for(lambda: shell.serving()[-1] == 2, lambda: job.output(RUN))
        said = shell("stop", "engine-0")
        assert f"{late} leaves run {RUN}" in said and "stopped engine-0" in said
        assert shell.written() == {first} and late not in shell.engines()
        stopped_at = len(shell.serving())
        wait_for(lambda: len(shell.serving()) > stopped_at + 1, lambda: job.output(RUN))
        assert set(shell.engines()) == {first}
    finally:
        train.send_signal(signal.SIGTERM)
        code = train.wait(DEADLINE)
    assert code == 0, job.output(RUN)[-3000:]
    assert not any("failed" in name and count for name, count in failures(job).items())
    assert set(trained_groups(job, RUN).values()) == {1}, "no prompt was trained on twice"


def failures(job: Job) -> Counter[str]:
    """What was counted as failed, over the run: an engine that leaves in order costs no request."""
    last = job.steps(RUN)[-1]
    return Counter({name: int(last[name]) for name in ("rollout/failed_requests_total",) if name in last})
