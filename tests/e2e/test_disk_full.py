"""A file system that is really full: a tmpfs of a few checkpoints, in a namespace that ends with its command."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.job import DEADLINE, Job, write_job

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

CHECKPOINT = 3_900_000
"""Bytes of one checkpoint of the tiny model, a little rounded up."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, tiny_tied_dir: Path) -> Job:
    return write_job(tmp_path_factory.mktemp("full"), tiny_tied_dir, None)


def train_on_a_small_disk(job: Job, run: str, size: int, steps: int, *sets: str, before: str = "") -> tuple[int, str]:
    """`debug train-only --fake-data` with a tmpfs of `size` bytes on the run's checkpoints, saving at every step.

    before: shell commands, with "$1" for that directory. Returns the exit code and all output, with the names of what
    lies in the directory at the end as the last line. The mount belongs to a namespace of its own (and of users, so
    that root is not needed): it cannot outlive the command, whatever becomes of the test.
    """
    checkpoints = job.runs / run / "checkpoints"
    checkpoints.mkdir(parents=True)
    argv = job.argv(
        "debug train-only", run, "--fake-data", "--steps", str(steps), sets=["checkpoint.every_steps=1", *sets]
    )
    script = (
        f'mount -t tmpfs -o size={size} none "$1" || exit 99; {before}"${{@:2}}"; code=$?; wait; '
        'echo; ls -A "$1" | tr "\\n" " "; exit $code'
    )
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "bash", "-c", script, "bash", str(checkpoints), *argv],
        env=job.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=DEADLINE,
        cwd=job.root,
    )  # fmt: skip
    assert done.returncode != 99, f"no tmpfs can be mounted here: {done.stdout}"
    assert not list(checkpoints.iterdir()), "the file system is gone with its namespace"
    return done.returncode, done.stdout


@pytest.mark.parametrize("asynchronous", [pytest.param("false", marks=pytest.mark.long), "true"])
def test_a_full_disk_stops_the_run_with_one_error_and_the_last_good_checkpoint_stays(job, asynchronous):
    code, said = train_on_a_small_disk(
        job, f"stop-{asynchronous}", int(2.5 * CHECKPOINT), 5, f"checkpoint.async_save={asynchronous}"
    )
    assert code == 1 and "Traceback" not in said, said
    words = " ".join(said.split())
    assert (
        words.count("was not written") == 1
        and "step_3 was not written: " in words
        and "No space left on device" in words
    )
    assert "bytes and a little more" in words and "keep_last" in words
    assert said.splitlines()[-1].split() == ["latest", "step_1", "step_2"], "no partial directory"


@pytest.mark.long
def test_if_so_configured_training_goes_on_and_uses_the_space_that_is_freed(job):
    """From the first checkpoint on a ballast fills the disk, until a failure has been recorded."""
    metrics = job.runs / "continue" / "metrics.jsonl"
    failed = f"grep -qs checkpoint/failures {metrics}"
    filled = 'for i in $(seq 2000); do [ -e "$1"/latest ] && break; sleep 0.05; done; cat /dev/zero > "$1"/ballast'
    freed = f'for i in $(seq 2000); do {failed} && break; sleep 0.05; done; rm "$1"/ballast'
    ballast = f"({filled}; {freed}) 2> /dev/null & "
    settings = ('checkpoint.on_save_failure="continue"', "checkpoint.keep_last=2")
    code, said = train_on_a_small_disk(job, "continue", int(3.4 * CHECKPOINT), 40, *settings, before=ballast)
    assert code == 0, said
    failures = sum(record.get("checkpoint/failures", 0) for record in job.metrics("continue"))
    assert failures == said.count("warning: checkpoint") >= 1 and len(job.steps("continue")) == 40
    assert said.splitlines()[-1].split() == ["latest", "step_39", "step_40"]


def test_a_trainers_server_says_which_directory_has_no_room_for_it_and_leaves_nothing_there(tmp_path, tiny_tied_dir):
    """First of a new run, then of one that is there, whose key and settings were written."""
    runs = tmp_path / "runs"
    runs.mkdir()
    job = Job(tmp_path, tiny_tied_dir)
    argv = [sys.executable, "-m", "rltool", "serve-trainer", str(tiny_tied_dir), "--lora-rank", "4", "--run", "x"]
    start = shlex.join([*argv, "--ready-timeout", "60"])
    script = (
        'mount -t tmpfs -o size=1m none "$1" || exit 99; fill() { cat /dev/zero > "$1"/ballast; }; '
        f'fill "$1" 2> /dev/null; {start}; echo first $?; ls "$1"; rm "$1"/ballast; '
        f"python -c 'from rltool.processes.run_directory import open_run; open_run(\"x\", create=True)'; "
        f'fill "$1" 2> /dev/null; {start}; echo second $?; ls "$1"/x/state'
    )
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "bash", "-c", script, "bash", str(runs)], cwd=tmp_path,
        env=job.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=DEADLINE,
    )  # fmt: skip
    said = " ".join(done.stdout.split())
    assert "Traceback" not in said, said
    error = f"error: serve-trainer cannot start: {runs}/x cannot be written (No space left on device), 0 of the 1048576"
    assert said.count(error) == 2 and "first 1 ballast" in said and "second 1" in said, said
    assert not {"default", "serve-trainer.json"} & {*said.partition("second 1")[2].split()}
