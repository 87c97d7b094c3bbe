"""What a trainer leaves when it is killed: found by its mark, ended by `rltool stop`, and nothing else is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

from rltool.processes import marks
from rltool.processes.marks import MARK_VARIABLE, left_behind, marking
from rltool.processes.run_directory import open_run
from rltool.processes.state import find_process, read_states, state_of_this_process
from rltool.processes.stop_run import stop_run

# argv: run root. A trainer whose child has a session of its own, as Ray's have.
TRAINER = """
import subprocess, sys
from pathlib import Path
from rltool.processes.marks import marking
from rltool.processes.run_directory import open_run
from rltool.processes.state import state_of_this_process, write_state

run = open_run("r", create=True, root=Path(sys.argv[1]))
own = state_of_this_process("train", argv=["rltool", "train"])
write_state(run, own)
with marking(run, own):
    child = subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def run(tmp_path):
    return open_run("r", create=True, root=tmp_path)


@pytest.fixture
def trainer(tmp_path, run):
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    child = psutil.Process(int(process.stdout.readline()))
    yield process, child
    process.kill()
    process.communicate()
    with suppress(psutil.NoSuchProcess):
        child.kill()


def sleeping():
    """Linux lets a parent go on when the child's memory is new, and a moment later the child has its environment."""
    process = subprocess.Popen(["sleep", "600"])
    while MARK_VARIABLE not in psutil.Process(process.pid).environ():
        time.sleep(0.001)
    return process


def kill(process):
    process.kill()
    process.wait()


def test_what_a_living_trainer_started_is_no_leftover_and_that_of_a_killed_one_is(run, trainer):
    process, child = trainer
    assert left_behind(run) == []
    kill(process)
    [state] = left_behind(run)
    assert (state.pid, state.role) == (child.pid, "sleep") and find_process(state) == child


def test_what_a_trainer_of_another_host_started_is_no_leftover_here(run, monkeypatch):
    """Ray starts workers on this host for a trainer that lives on another; its pid is nobody's here."""
    trainer = state_of_this_process("train", argv=()).model_copy(update={"pid": 2**22 - 1})
    with monkeypatch.context() as there:
        there.setattr(marks, "boot", lambda: "of another host")
        with marking(run, trainer):
            worker = sleeping()
    try:
        assert left_behind(run) == []
        with marking(run, trainer):
            leftover = sleeping()
        assert [state.pid for state in left_behind(run)] == [leftover.pid]
        leftover.kill()
        leftover.wait()
    finally:
        worker.kill()
        worker.wait()


def test_a_copy_of_the_directory_has_the_same_id_and_finds_nothing(run, trainer, tmp_path):
    kill(trainer[0])
    shutil.copytree(run.path, tmp_path / "copy")
    copy = open_run("copy", create=False, root=tmp_path)
    assert copy.run_id == run.run_id and left_behind(copy) == []


def test_stop_ends_what_a_killed_trainer_left_and_names_it(run, trainer):
    process, child = trainer
    kill(process)
    said = []
    stopped = stop_run(run, report=said.append)
    assert [state.pid for state in stopped] == [child.pid]
    assert f"an earlier trainer of run r was killed and left these, which end now: sleep (pid {child.pid})" in said
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    assert left_behind(run) == [] and read_states(run) == []


def test_stopping_an_engine_leaves_a_trainers_leftovers_alone(run, trainer):
    (run.state_dir / "engine-0.json").write_text(
        state_of_this_process("engine-0", argv=()).model_copy(update={"pid": 2**22 - 1}).model_dump_json()
    )
    kill(trainer[0])
    assert stop_run(run, ["engine-0"]) == []
    assert trainer[1].is_running()


def test_the_mark_ends_with_its_block(run):
    before = os.environ.get(MARK_VARIABLE)
    with marking(run, state_of_this_process("train", argv=())):
        assert os.environ[MARK_VARIABLE].startswith(run.run_id)
    assert os.environ.get(MARK_VARIABLE) == before
