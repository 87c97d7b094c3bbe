"""Engines of a living run are killed, or stopped and continued: the run goes on with the rest, and they come back."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rltool.engines.endpoints import Endpoints, ModelEndpoints
from rltool.processes.run_directory import open_run
from rltool.processes.state import read_states
from rltool.processes.stop import process_tree
from tests.e2e.commands import Command
from tests.e2e.engines import RunningEngine, start_vllm, wait_ready
from tests.e2e.job import DEADLINE, Job, write_job
from tests.e2e.test_rollout_modes import running_requests, trained_groups, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

RUN = "faults"
LONG_RESPONSES = [
    "steps=100000", "eval.sets={}", "sampling.stop_token_ids=[]", "sampling.max_response_tokens=240",
    "trainer.max_tokens_per_micro_batch=2048", "optimizer_steps_per_rollout=1",
]  # fmt: skip
"""Generation takes long enough that an engine can be caught in the middle of it."""


class Training:
    """A run on two engines: `survivor`, and `victim`, to which things happen."""

    def __init__(self, job: Job, survivor: RunningEngine, victim: RunningEngine) -> None:
        self.job, self.survivor, self.victim = job, survivor, victim
        self.process: Command | None = None

    def begin(self, *sets: str) -> None:
        self.process = self.job.start("train", RUN, sets=[*LONG_RESPONSES, *sets])
        self.until(lambda: len(self.steps()) > 0)

    def until(self, condition: Callable[[], bool]) -> None:
        """Fails at once when the run or its surviving engine has ended."""
        process = self.process
        assert process is not None

        def met() -> bool:
            ended = process.poll()
            return condition() or (ended is not None and pytest.fail(f"exit code {ended}: {self.output()[-4000:]}"))

        wait_for(met, self.output)

    def output(self) -> str:
        return self.job.output(RUN)

    def steps(self) -> list[dict]:
        return self.job.steps(RUN) if (self.job.runs / RUN / "metrics.jsonl").exists() else []

    def until_steps(self, more: int) -> None:
        """Until so many more steps are complete."""
        wanted = len(self.steps()) + more
        self.until(lambda: len(self.steps()) >= wanted)

    def in_generation(self) -> None:
        """Until the victim has requests of this run."""
        self.until(lambda: running_requests(self.victim) > 0)

    def serving(self) -> int:
        """Engines that served when the last batch was complete."""
        return int(self.steps()[-1]["rollout/engines_serving"])

    def victim_row(self) -> dict:
        """What `rltool status` says of it."""
        [run] = json.loads(self.job.say("status", "--run", RUN, "--json"))["runs"]
        [row] = [engine for engine in run["training"]["engines"] if engine["url"] == self.victim.url]
        return row

    def assert_logged(self, *transitions: str) -> None:
        """One of them is logged, or will be."""
        lines = [f"engine {self.victim.url}: {transition}: " for transition in transitions]
        self.until(lambda: any(line in self.output() for line in lines))

    def assert_back_after_a_sync(self) -> None:
        """STALE, then READY, and it works: the tokens that it samples are those of the present weights."""
        self.until(lambda: self.serving() == 2)
        assert self.victim_row()["state"] in ("ready", "paused")
        self.in_generation()
        self.until_steps(2)

    def finish(self) -> None:
        """End the run in order, and look at what it trained on."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(DEADLINE) == 0, self.output()[-4000:]
        steps = self.job.steps(RUN)
        assert [record["step"] for record in steps] == list(range(len(steps)))
        groups = trained_groups(self.job, RUN)
        assert set(groups.values()) == {1}, "no prompt was trained on twice"
        assert sorted(groups) == list(range(8 * len(steps))), "and none was lost"
        assert all(record["rollout/staleness_max"] == 0 for record in steps)
        assert all(record["train/logprob_abs_diff_mean"] < 1e-5 for record in steps)

    def close(self) -> None:
        if (self.job.runs / RUN / "state" / "run.json").exists():
            for state in read_states(open_run(RUN, create=False, root=self.job.runs)):
                for process in process_tree(state):
                    process.kill()
        if self.process is not None:
            self.process.kill()
            self.process.wait(DEADLINE)


@pytest.fixture
def training(tmp_path: Path, tiny_untied_dir: Path, vllm_engine_untied: RunningEngine) -> Iterator[Training]:
    """The victim is of this test alone: nobody else's engine is killed."""
    (tmp_path / "victim").mkdir()
    victim = start_vllm(tiny_untied_dir, tmp_path / "victim")
    engines = (vllm_engine_untied, victim)
    try:
        wait_ready(victim)
        file = tmp_path / "endpoints.json"
        Endpoints(models={"policy": ModelEndpoints(engines=tuple(engine.endpoint for engine in engines))}).save(file)
        training = Training(write_job(tmp_path, tiny_untied_dir, f"@{file}"), *engines)
        try:
            yield training
        finally:
            training.close()
    finally:
        victim.signal(signal.SIGCONT)
        victim.stop()


@pytest.mark.long  # test_adapter_sync.py kills one in a run, too
def test_an_engine_killed_in_generation_is_sampled_around_and_comes_back_after_a_sync(training):
    training.begin()
    training.in_generation()
    training.victim.signal(signal.SIGKILL)
    training.until_steps(1)
    training.assert_logged("ready -> suspect", "stale -> suspect")
    assert training.victim_row()["state"] in ("suspect", "dead")
    assert training.steps()[-1]["rollout/failed_requests_total"] > 0
    training.victim.start_again()
    wait_ready(training.victim)
    training.assert_logged("suspect -> stale", "dead -> stale")
    training.assert_back_after_a_sync()
    training.finish()


@pytest.mark.long
def test_an_engine_stopped_in_generation_is_sampled_around_and_comes_back_when_it_continues(training):
    training.begin()
    training.in_generation()
    training.victim.signal(signal.SIGSTOP)
    training.until_steps(2)
    training.assert_logged("ready -> suspect", "stale -> suspect")
    assert training.victim_row()["state"] in ("suspect", "dead")
    training.victim.signal(signal.SIGCONT)
    training.assert_back_after_a_sync()
    training.finish()


@pytest.mark.long
@pytest.mark.parametrize("min_serving", [1, 2])
def test_a_run_with_too_few_engines_waits_then_saves_and_says_why(training, min_serving):
    """With min_serving 1 the other one is given up as well: it is stopped, not killed, for others use it."""
    training.begin(f"engines.min_serving={min_serving}", "deadlines.engines=20")
    training.in_generation()
    training.victim.signal(signal.SIGKILL)
    stopped = [training.survivor] if min_serving == 1 else []
    for engine in stopped:
        engine.signal(signal.SIGSTOP)
    try:
        assert training.process.wait(DEADLINE) == 1, training.output()[-4000:]
    finally:
        for engine in stopped:
            engine.signal(signal.SIGCONT)
    said = training.output()
    assert f"too few engines serve: engines.min_serving = {min_serving}" in said and "deadlines.engines = 20 s" in said
    assert f"{training.victim.url}: suspect (" in said or f"{training.victim.url}: dead (" in said
    assert training.victim.log_tail(1) in said, "the last lines of its log"
    for engine in stopped:
        assert f"{engine.url}: suspect (" in said or f"{engine.url}: dead (" in said
    assert "rltool serve-engines" in said and "rltool train --resume" in said
    done = training.steps()[-1]["step"] + 1
    assert (training.job.runs / RUN / "checkpoints" / f"step_{done}").is_dir()
