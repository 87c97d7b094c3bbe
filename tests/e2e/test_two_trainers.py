"""Two training runs and one real vLLM engine: the second is refused, and takes the engine over when it is told to."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rltool.engines.endpoints import Endpoints, ModelEndpoints
from tests.e2e.commands import Command
from tests.e2e.engines import RunningEngine
from tests.e2e.job import DEADLINE, Job, write_job

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.fixture
def job(vllm_engine_tied: RunningEngine, tiny_tied_dir: Path, tmp_path: Path) -> Job:
    file = tmp_path / "endpoints.json"
    Endpoints(models={"policy": ModelEndpoints(engines=(vllm_engine_tied.endpoint,))}).save(file)
    return write_job(tmp_path, tiny_tied_dir, f"@{file}")


@pytest.fixture
def first(job: Job) -> Iterator[Command]:
    """A run that has trained a step, and has many before it."""
    process = job.start("train", "first", "--steps", "100000")
    try:
        until(lambda: "step 0" in job.output("first"), process, job)
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(DEADLINE)


def until(condition: Callable[[], bool], process: Command, job: Job) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, job.output("first")[-4000:]
        time.sleep(0.1)


def holder(engine: RunningEngine) -> dict | None:
    status, facts = engine.http("GET", "/rltool/info", key=engine.key)
    assert status == 200
    lease = facts["lease"]
    return lease and lease["holder"]


@pytest.mark.long  # tests/contract/test_lease.py has the lease by itself
def test_the_second_run_is_refused_until_it_steals_and_then_the_first_ends(job, first, vllm_engine_tied):
    engine = vllm_engine_tied
    assert (holder(engine)["name"], holder(engine)["pid"]) == ("first", first.pid)

    refused = job("train", "second", "--steps", "1", code=2)
    assert f"leased by run first (pid {first.pid} on" in refused and "--steal" in refused
    assert not (job.runs / "second").exists(), "nothing was started"

    assert "leased by run first" in job.say("engines", "resume", job.endpoints, code=1)
    steps = len(job.steps("first"))
    until(lambda: len(job.steps("first")) > steps, first, job)

    job("train", "second", "--steps", "2", "--steal")
    assert len(job.steps("second")) == 2
    assert first.wait(DEADLINE) == 1
    said = " ".join(job.output("first").split())
    assert "run second (pid" in said and "has taken over the engine" in said and "--resume --run first" in said
    assert holder(engine) is None
    job("train", "first", "--resume", "--steps", str(len(job.steps("first")) + 1))
