"""Who may train in a run: real processes, one of which is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

from rltool.errors import UsageError
from rltool.processes.run_directory import open_run, plan_run
from rltool.processes.run_lock import RunLock

# argv: run root. Holds the lock, with a child that outlives it.
HOLDER = """
import subprocess, sys
from pathlib import Path
from rltool.processes.run_directory import open_run
from rltool.processes.run_lock import RunLock

run = open_run("r", create=True, root=Path(sys.argv[1]))
with RunLock(run, argv=["/bin/rltool", "train", "--run", "r", "--set", "a b"]):
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    print(child.pid, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def run(tmp_path):
    return open_run("r", create=True, root=tmp_path)


@pytest.fixture
def holder(tmp_path, run):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    child = int(process.stdout.readline())
    yield process, child
    process.kill()
    process.communicate()
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)


def files(run):
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.path.rglob("*") if path.is_file()}


def test_a_second_trainer_is_told_who_has_the_run_and_how_to_end_it_and_changes_nothing(run, holder):
    before = files(run)
    with pytest.raises(UsageError) as refused, RunLock(run):
        pass
    said = str(refused.value)
    assert f"run r is being written by pid {holder[0].pid} (rltool train --run r --set 'a b')" in said
    assert "`rltool stop --run r`" in said and refused.value.exit_code == 2
    assert files(run) == before


def test_the_lock_ends_with_its_holder_by_sigkill_though_a_child_of_it_lives_on(run, holder):
    process, child = holder
    process.kill()
    process.wait()
    os.kill(child, 0)
    with RunLock(run):
        pass


def test_after_the_block_the_run_is_free_and_the_next_holder_signs_in_its_own_name(run):
    with RunLock(run, argv=["x/rltool", "train", "--a-longer-command-line-than-the-next-one"]):
        pass
    with RunLock(run, argv=["x/rltool", "debug"]), pytest.raises(UsageError) as refused:
        RunLock(run).take()
    assert f"pid {os.getpid()} (rltool debug)" in str(refused.value)


def test_taking_it_twice_is_nothing(run):
    with RunLock(run) as lock:
        lock.take()


def test_a_run_that_is_still_to_be_made_is_not_made_by_the_lock_and_taken_later(tmp_path):
    planned = plan_run("new", root=tmp_path)
    with RunLock(planned) as lock:
        assert not planned.path.exists()
        open_run("new", create=True, root=tmp_path)
        lock.take()
        with pytest.raises(UsageError, match="run new is being written by"):
            RunLock(planned).take()


def test_a_holder_that_has_not_signed_yet_is_another_process(run):
    with RunLock(run) as lock:
        lock.file.write_text("")
        with pytest.raises(UsageError, match="run r is being written by another process"):
            RunLock(run).take()


def test_a_run_that_cannot_be_written_is_refused_before_anything_is_loaded(run):
    (run.state_dir / "train.lock").mkdir()  # a plain lack of rights would not stop root
    with pytest.raises(UsageError, match="run r cannot be written: .*train.lock: Is a directory"):
        RunLock(run).take()
