"""Adapters alone travel to real vLLM engines that are never paused: `weights.lora_sync = "adapter"`, with requests in
flight over every sync, and an engine killed in the middle."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from rltool.engines.endpoints import Endpoints
from rltool.engines.sync_client import probe
from rltool.processes.run_directory import RunDirectory, open_run
from rltool.processes.state import read_state
from rltool.processes.stop_run import stop_run
from tests.e2e.job import DEADLINE, Job, write_job

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

LORA = ["lora.rank=4", "optimizer.lr=0.01", 'weights.lora_sync="adapter"']


def until(condition: Callable[[], bool], said: Callable[[], str]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, said()[-4000:]
        time.sleep(0.1)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, tiny_tied_dir: Path) -> Iterator[tuple[Job, RunDirectory]]:
    """Two vLLMs that take adapters, watched by serve-engines, and a job against them."""
    root = tmp_path_factory.mktemp("adapters")
    with ExitStack() as stack:
        job = Job(root, tiny_tied_dir)
        job.say(
            "serve-engines", str(tiny_tied_dir), "--device", "cpu", "--num-engines", "2", "--max-model-len", "64",
            "--lora-rank", "4", "--lora-slots", "4", "--run", "engines", "--detach",
        )  # fmt: skip
        run = open_run("engines", create=False, root=job.runs)
        stack.callback(stop_run, run)
        yield write_job(root, tiny_tied_dir, f"@{run.endpoints_file}"), run


def test_every_sequence_has_one_version_no_engine_pauses_and_a_killed_one_comes_back_with_the_adapter(engines):
    job, served = engines
    train = job.start("train", "flight", sets=[*LORA, "steps=100000", "rollout.max_staleness=2", "eval.sets={}"])

    def serving() -> list[float]:
        steps = job.steps("flight") if (job.runs / "flight" / "metrics.jsonl").exists() else []
        return [record["rollout/engines_serving"] for record in steps]

    def said() -> str:
        return job.output("flight")

    try:
        until(lambda: len(serving()) >= 5, said)
        before = read_state(served, "engine-0")
        assert before is not None
        os.kill(before.pid, signal.SIGKILL)
        until(lambda: serving()[-1] == 1, said)
        until(lambda: serving()[-1] == 2, said)
        came_back = len(serving())
        until(lambda: len(serving()) >= came_back + 5, said)
    finally:
        train.send_signal(signal.SIGTERM)
        code = train.wait(DEADLINE)
    assert code == 0, said()[-3000:]
    steps = job.steps("flight")
    differences = [record["weights/logprob_abs_diff_mean"] for record in steps]
    assert 0 < max(differences) < 1e-5, "every engine at every sync, in float32 on both sides"
    assert all(record["weights/paused_seconds"] == 0 for record in steps)
    late = 0
    for step, record in enumerate(steps):
        dump = json.loads((job.runs / "flight" / "rollouts" / f"step_{step:06d}.json").read_text())
        of_samples = [{span[0] for span in sample["versions"]} for sample in dump["samples"]]
        assert all(len(versions) == 1 for versions in of_samples)
        numbers = {int(version.rsplit(":", 1)[1]) for [version] in of_samples}
        assert max(numbers) <= record["step"] and min(numbers) >= record["step"] - 2
        late += min(numbers) < record["step"]
    assert late > 3, "requests were in flight over syncs"
    logs = [log.read_text() for log in served.path.glob("logs/*/engine-*.log")]
    assert any("setting pause state to UNPAUSED" in log for log in logs), "vLLM writes every change of it"
    assert not any("setting pause state to PAUSED" in log for log in logs)
    for engine in Endpoints.load(served.endpoints_file).models["policy"].engines:
        assert probe(engine, timeout=10.0).weight_version == "default", "the model beside the adapters is as it was"
    assert not any(record.get("rollout/refused_foreign_total") for record in steps)
