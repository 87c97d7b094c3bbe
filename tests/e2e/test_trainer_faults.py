"""Real Ray and Megatron ranks on the CPU: a part of a running training dies or hangs, or another wants its run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rltool.checkpoints import directory as directories
from rltool.processes.hosts import is_loopback
from rltool.processes.marks import left_behind
from tests.e2e.job import Job, write_job
from tests.e2e.trainer_faults import SETS, Training, listening, rltool, training

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, tiny_tied_dir: Path) -> Job:
    return write_job(tmp_path_factory.mktemp("faults"), tiny_tied_dir, None)


def go_on(job: Job, run: str, *more: str) -> str:
    """Resume for one step beyond the newest checkpoint."""
    newest = directories.latest_checkpoint(job.runs / run / "checkpoints")
    assert newest is not None
    steps = directories.step_of(newest) + 1
    said = " ".join(job("train", run, "--resume", "--steps", str(steps), *more, sets=SETS).split())
    assert f"done after step {steps};" in said
    assert steps_in(job.runs / run / "metrics.jsonl") == list(range(steps)), "no step is lost, none is there twice"
    return said


def steps_in(metrics: Path) -> list[int]:
    return [json.loads(line)["step"] for line in metrics.read_text().splitlines()] if metrics.exists() else []


def ray_directory(begun: Training) -> Path:
    """What its Ray was given for its sessions."""
    [given] = {word.partition("=")[2] for word in begun.named("raylet").cmdline() if word.startswith("--temp_dir=")}
    return Path(given)


def recorded(begun: Training) -> list[int]:
    return steps_in(begun.run.metrics_file)


@pytest.mark.long
def test_a_living_run_is_refused_to_others_and_after_a_sigkill_its_leftovers_end_and_it_resumes(job):
    with training(job, "mine") as mine:
        mine.wait_for_a_checkpoint()
        for more in ([], ["--resume"], ["--resume", "--restarts", "2"]):
            said = job("train", "mine", "--steps", "9", *more, sets=SETS, code=2)
            assert f"is being written by pid {mine.process.pid} (rltool train" in " ".join(said.split())
        newest = mine.newest()
        mine.wait_for_a_checkpoint(beyond=newest)
        assert str(mine.process.pid) in rltool(job, "status", "--run", "mine")
        given = ray_directory(mine)
        mine.process.kill()
        mine.end()
        stopped = rltool(job, "stop", "--run", "mine")
        assert mine.processes() == [] and left_behind(mine.run) == [] and not given.parent.exists()
        assert "an earlier trainer of run mine was killed and left these" in stopped, stopped
        go_on(job, "mine")


# argv: the directory that Ray was given. As another user: what can be done to it is printed.
STRANGER = """
import os, socket, sys
given = sys.argv[1]
os.setgroups([]), os.setgid(65534), os.setuid(65534)
def tried(what, do):
    try:
        do()
    except OSError as error:
        assert error.errno == 13, (what, error)
    else:
        print(what)
tried("listed", lambda: os.listdir(given))
tried("found", lambda: os.stat(given + "/session_latest/sockets/raylet"))
tried("renamed", lambda: os.rename(given, given + "-taken"))
tried("made", lambda: os.mkdir(given + "/mine"))
tried("connected", lambda: socket.socket(socket.AF_UNIX).connect(given + "/session_latest/sockets/raylet"))
os.stat(os.path.dirname(os.path.dirname(given)))
print("done")
"""


def test_a_run_listens_on_loopback_alone_and_other_users_do_not_reach_the_directory_of_its_ray(job):
    with training(job, "sockets") as begun:
        begun.wait_for_a_checkpoint()
        given = ray_directory(begun)
        assert (given / "session_latest" / "sockets" / "raylet").is_socket()
        if os.getuid() == 0:  # nobody else can become another user
            tried = subprocess.run([sys.executable, "-c", STRANGER, str(given)], capture_output=True, text=True)
            assert tried.stdout.split() == ["done"], tried.stdout + tried.stderr
        driver = psutil.Process(begun.process.pid)
        family = {*begun.processes(), *driver.children(recursive=True), driver}
        found = {process: listening(process) for process in family}
        assert all(is_loopback(address) for addresses in found.values() for address in addresses), found
        assert "open to the network" not in begun.said()
        # It has looked at all of them: each of these has a socket, and none is without the mark of the run.
        for process in (driver, begun.named("gcs_server"), begun.named("raylet"), begun.rank(0), begun.rank(1)):
            assert found[process], process
        marked = set(begun.processes())
        assert not [it for it in family if it != driver and it not in marked and it.is_running()]
        # As `timeout` sends it: to its process group.
        assert os.getpgid(begun.process.pid) == begun.process.pid
        sent = time.monotonic()
        os.killpg(begun.process.pid, signal.SIGTERM)
        assert begun.end() == 0 and "error: " not in begun.said() and not given.parent.exists()
        assert time.monotonic() - sent < 30, "about 3 s, where nothing else runs"
        assert begun.newest() == begun.run.checkpoints_dir / f"step_{len(recorded(begun))}", "it saved"


@pytest.mark.long
def test_a_run_resumes_right_after_a_sigkill_and_ends_what_was_left_by_itself(job):
    with training(job, "again") as again:
        again.wait_for_a_checkpoint()
        again.process.kill()
        again.end()
        go_on(job, "again")
        assert again.processes() == []


@pytest.mark.long
def test_a_rank_that_is_killed_ends_the_run_with_its_name_and_the_run_goes_on_by_itself_if_told_so(job):
    with training(job, "killed") as killed:
        killed.wait_for_a_checkpoint()
        victim = killed.rank(1)
        victim.kill()
        assert killed.end() == 1
        assert f"trainer rank 1 (pid {victim.pid}) died:" in killed.said() and "Traceback" not in killed.said()
        assert killed.processes() == []
    with training(job, "killed", "--resume", "--restarts", "1") as restarted:
        restarted.wait_for_a_checkpoint(beyond=restarted.newest())
        newest = restarted.newest()
        restarted.rank(0).kill()
        restarted.wait_for_a_checkpoint(beyond=newest)
        assert "attempt 1 ended with exit code 1, see its error above: restart 1 of 1, from checkpoint step_" in (
            restarted.said()
        )
        restarted.process.send_signal(signal.SIGTERM)
        assert restarted.end() == 0
        assert "SIGTERM: what is in progress comes to its end first" in restarted.said()
        assert restarted.processes() == []


@pytest.mark.long
def test_without_a_checkpoint_a_restart_begins_once_more_and_keeps_no_record_of_the_lost_steps(job):
    with training(job, "anew", "--restarts", "1", sets=["checkpoint.every_steps=0"]) as anew:
        anew.wait_for(lambda: len(recorded(anew)) > 2)
        anew.rank(1).kill()
        anew.wait_for(lambda: (anew.run.logs_dir / "attempt_2" / "train.log").exists() and len(recorded(anew)) > 1)
        assert "restart 1 of 1, from the beginning: there is no checkpoint" in anew.said()
        assert "stopped train" in rltool(job, "stop", "--run", "anew")
        # The stop signals the command itself as well, which may come when the attempt has just ended.
        assert anew.end() in (0, -signal.SIGTERM)
        assert recorded(anew) == list(range(len(recorded(anew))))
        assert anew.processes() == []


@pytest.mark.long
def test_a_rank_that_hangs_is_named_when_the_others_have_waited_long_enough(job):
    # No checkpoints: ranks wait longer for each other while one of them writes.
    with training(job, "hung", sets=["trainer.rendezvous_timeout=8", "checkpoint.every_steps=0"]) as hung:
        hung.wait_for(lambda: len(recorded(hung)) > 2)
        hung.rank(1).suspend()
        assert hung.end() == 1
        # Rank 0 waited for it in a collective, or was done with its part: the moment decides.
        assert "error: trainer rank 1 hangs: no answer, " in hung.said() and "Traceback" not in hung.said()
        assert hung.processes() == []


@pytest.mark.long
@pytest.mark.parametrize("part", ["raylet", "gcs_server"])
def test_a_part_of_ray_that_is_killed_is_named_at_once_ends_the_run_and_stop_ends_the_rest(job, part):
    with training(job, f"without-{part}") as broken:
        broken.wait_for_a_checkpoint()
        victim, given = broken.named(part), ray_directory(broken)
        begun = time.monotonic()
        victim.kill()
        assert broken.end() == 1
        # Nobody needs the GCS for a step: Ray looks for a lost one for a minute before it gives up.
        assert time.monotonic() - begun < 40
        said = broken.said()
        assert f"error: Ray's {part} (pid {victim.pid}) died: " in said and "go on with `rltool train --resume`" in said
        assert said.count("error: ") == 1 and "Traceback" not in said, said
        rltool(job, "stop", "--run", broken.run.name)
        assert broken.processes() == [] and not given.parent.exists()
        go_on(job, broken.run.name)


@pytest.mark.long
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_in_a_save_lets_it_end_and_a_second_one_does_not_and_both_resume(job, times):
    with training(job, f"saving-{times}", sets=["checkpoint.every_steps=1"]) as saving:
        saving.wait_for_a_checkpoint()
        saving.wait_for(lambda: list(saving.run.checkpoints_dir.glob(".step_*.partial")))
        for _ in range(times):
            saving.process.send_signal(signal.SIGINT)
            saving.wait_for(lambda: "Ctrl-C: what is in progress comes to its end first" in saving.said())
        assert saving.end() == 130 and "Traceback" not in saving.said()
        assert saving.processes() == []
        newest = saving.newest()
        assert newest is not None
        if times == 1:
            assert directories.step_of(newest) == len(recorded(saving)), "all that was trained is saved"
            assert not list(saving.run.checkpoints_dir.glob(".step_*.partial"))
        go_on(job, saving.run.name)
        assert not list(saving.run.checkpoints_dir.glob(".step_*.partial"))


@pytest.mark.long
def test_ctrl_c_in_the_training_on_a_rollout_ends_it_between_two_optimizer_steps_and_the_run_resumes_before_it(job):
    with training(job, "epochs", sets=["checkpoint.every_steps=1"]) as short:
        short.wait_for_a_checkpoint()
        short.process.send_signal(signal.SIGINT)
        assert short.end() == 130
    # So many optimizer steps that it would train on the one batch for minutes.
    many = ["optimizer_steps_per_rollout=4000", "rollout.prompts_per_step=8000"]
    with training(job, "epochs", "--resume", sets=many) as epochs:
        done = epochs.newest()
        log = epochs.run.logs_dir / "attempt_2" / "train.log"
        epochs.wait_for(lambda: log.exists() and "supervised rows" in log.read_text())
        time.sleep(3)  # the first batch is there at once
        begun = time.monotonic()
        epochs.process.send_signal(signal.SIGINT)
        assert epochs.end() == 130
        assert time.monotonic() - begun < 40 and "Traceback" not in epochs.said()
        assert "Ctrl-C: the training on this rollout is dropped after the optimizer step in progress" in epochs.said()
        assert epochs.newest() == done and epochs.processes() == []
    go_on(job, "epochs")


@pytest.mark.long
def test_after_a_driver_that_is_killed_while_ray_starts_nothing_is_left_by_stop_and_the_run_is_unused(job):
    with training(job, "killed-early") as early:
        early.wait_for(lambda: any(process.name() == "gcs_server" for process in early.processes()))
        early.process.kill()
        early.end()
        left = early.processes()  # none, where Ray's were all children of the driver still: these die with it
        said = rltool(job, "stop", "--run", "killed-early")
        assert not left or "an earlier trainer of run killed-early was killed and left these" in said
        assert early.processes() == [] and not early.run.is_used
        job("train", "killed-early", "--steps", "1", sets=SETS)


@pytest.mark.parametrize(
    ("number", "code", "name"),
    [(signal.SIGINT, 130, "Ctrl-C"), pytest.param(signal.SIGTERM, 0, "SIGTERM", marks=pytest.mark.long)],
)
def test_a_signal_while_ray_starts_ends_it_at_once_says_so_and_leaves_the_run_unused(job, number, code, name):
    with training(job, f"early-{number}") as early:
        early.wait_for(lambda: any(process.name() == "gcs_server" for process in early.processes()))
        early.process.send_signal(number)
        assert early.end() == code
        said = early.said()
        assert f"{name}: the start was cancelled; nothing was trained, and no checkpoint is written" in said
        assert f"stopped by {name} before a step was done: nothing was trained, no checkpoint was written" in said
        assert "done after step" not in said and "Traceback" not in said
        assert not early.run.is_used and early.processes() == []
