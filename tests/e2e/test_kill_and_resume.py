"""A run killed with SIGKILL, driver and Ray's processes together, at any moment: it ends as if undisturbed."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rltool.checkpoints import directory as directories
from tests.e2e.commands import Command
from tests.e2e.job import DEADLINE, Job, write_job

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(600)]

STEPS = 16
SYNC = ["checkpoint.every_steps=1", "checkpoint.keep_last=2"]
ASYNC = [*SYNC, "checkpoint.async_save=true"]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, tiny_tied_dir: Path) -> Job:
    return write_job(tmp_path_factory.mktemp("killed"), tiny_tied_dir, None)


def parameters(said: str) -> str:
    return re.search(r"sha256:(\w+)", said).group(1)


def facts(job: Job, run: str) -> list[dict]:
    """What training computed, by step; times and what has to do with checkpoints left out."""
    return [
        {n: value for n, value in record.items() if n == "step" or (n.startswith("train/") and "per_second" not in n)}
        for record in job.steps(run)
    ]


@pytest.fixture(scope="module")
def whole(job: Job) -> tuple[Path, str, list[dict]]:
    """A run on synthetic rollouts that nobody stopped: its record, its last parameters, its metrics."""
    record = job.root / "recorded"
    said = job("debug train-only", "whole", "--fake-data", "--record", str(record), "--steps", str(STEPS))
    return record, parameters(said), facts(job, "whole")


class Victim:
    """A running `debug train-only`, all of whose processes are known, stopped and killed together."""

    def __init__(self, job: Job, run: str, record: Path, *more: str, sets: list[str]) -> None:
        self.job, self.run = job, run
        self.checkpoints = job.runs / run / "checkpoints"
        self.newest_before = directories.latest_checkpoint(self.checkpoints)
        self.process: Command = job.start(
            "debug train-only", run, "--rollouts", str(record), *more, sets=sets
        )

    def partial(self) -> Path | None:
        """What is being written, once there is a complete checkpoint to fall back on. A leftover is removed before the
        first step."""
        if "step " not in self.job.output(self.run):
            return None
        found = list(self.checkpoints.glob(".step_*.partial"))
        return found[0] if found and directories.latest_checkpoint(self.checkpoints) else None

    def tree(self) -> list[psutil.Process]:
        try:
            root = psutil.Process(self.process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def signal(self, action: str) -> None:
        for member in self.tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                getattr(member, action)()

    def kill_in(self, moment: Callable[[Victim], bool]) -> None:
        """Once the moment is seen, all processes are stopped where they are; if it still holds, they are killed, else
        they run on."""
        deadline = time.monotonic() + DEADLINE
        while True:
            assert self.process.poll() is None, (
                f"it ended before it could be killed:\n{self.job.output(self.run)[-3000:]}"
            )
            assert time.monotonic() < deadline, self.job.output(self.run)[-3000:]
            if moment(self):
                self.signal("suspend")
                if moment(self):
                    return self.kill()
                self.signal("resume")
            time.sleep(0.0005)

    def kill(self) -> None:
        members = self.tree()
        self.signal("kill")
        self.process.wait(30)
        psutil.wait_procs(members, timeout=30)


def a_save_begins(victim: Victim) -> bool:
    return victim.partial() is not None


def the_state_is_written(victim: Victim) -> bool:
    """Files of the state are there, but not yet what makes a checkpoint of them."""
    partial = victim.partial()
    return partial is not None and any(partial.glob("torch_dist/*.distcp")) and not (partial / "manifest.json").exists()


def it_has_gone_on(victim: Victim) -> bool:
    """A checkpoint later than that which it was resumed from is complete."""
    return directories.latest_checkpoint(victim.checkpoints) not in (None, victim.newest_before)


MOMENTS = [(a_save_begins, SYNC), (the_state_is_written, SYNC), (the_state_is_written, ASYNC), (it_has_gone_on, ASYNC)]


def test_a_run_that_is_killed_again_and_again_ends_like_one_never_stopped(job, whole):
    record, expected, metrics = whole
    reached = 0
    for number, (moment, sets) in enumerate(MOMENTS):
        victim = Victim(job, "killed", record, *(["--resume"] if number else []), sets=sets)
        try:
            victim.kill_in(moment)
        finally:
            victim.kill()
        newest = directories.latest_checkpoint(victim.checkpoints)
        assert newest is not None and reached <= directories.step_of(newest) < STEPS
        assert moment is it_has_gone_on or victim.partial() is not None, "it was killed in the middle of a save"
        reached = directories.step_of(newest)
    said = job("debug train-only", "killed", "--rollouts", str(record), "--resume", sets=ASYNC)
    assert parameters(said) == expected and facts(job, "killed") == metrics
    assert [entry["step"] for entry in metrics] == list(range(STEPS))
    assert len({entry["train/grad_norm"] for entry in metrics}) == STEPS, "equal numbers would prove nothing"
    # Two stay, and nothing of what the crashes left.
    assert {path.name for path in victim.checkpoints.iterdir()} == {f"step_{STEPS - 1}", f"step_{STEPS}", "latest"}
    assert (victim.checkpoints / "latest").read_text().strip() == f"step_{STEPS}"
