"""The start of Ray with something else in its place: it hangs, fails, or is given up, and leaves no process."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from socket import gethostname

import psutil
import pytest

from rltool.training.cluster.ray_start import RayStartFailed, start_ray


class Slow:
    """Starts a process, then another one each time that the one before is killed, until `enough`; then it fails."""

    def __init__(self, enough=2):
        self.enough, self.processes = enough, []
        self.begun = threading.Event()

    def __call__(self):
        while len(self.processes) < self.enough:
            self.processes.append(subprocess.Popen(["sleep", "600"]))
            self.begun.set()
            self.processes[-1].wait()
        raise RuntimeError("the processes are gone")


class GiveUp(BaseException):
    pass


def children():
    return {process for process in psutil.Process().children() if process.status() != psutil.STATUS_ZOMBIE}


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = children()
    yield
    assert children() <= before


def test_it_returns_once_the_start_has(tmp_path):
    done = []
    start_ray(lambda: done.append(threading.current_thread().name), 60, lambda _: None, None)
    assert done == ["ray-start"]


def test_the_thread_stays_for_ray_ends_with_the_thread_that_started_it():
    started = []
    start_ray(lambda: started.append(threading.current_thread()), 60, lambda _: None, None)
    assert started[0].is_alive() and started[0].daemon


def test_a_start_that_takes_too_long_is_one_line_with_the_name_of_its_deadline():
    slow = Slow()
    with pytest.raises(RayStartFailed, match=r"did not start within deadlines.start = 0.3 s") as failed:
        start_ray(slow, 0.3, lambda _: None, None)
    assert "\n" not in str(failed.value) and len(slow.processes) == 2, "what was started late is ended too"


def test_a_signal_gives_the_start_up():
    slow = Slow()

    def look(_):
        if slow.begun.is_set():
            raise GiveUp

    with pytest.raises(GiveUp):
        start_ray(slow, 600, look, None)
    assert len(slow.processes) == 2


def test_a_failure_of_rays_own_is_told_by_its_first_line():
    def fails():
        subprocess.Popen(["sleep", "600"])
        raise RuntimeError("Failed to start the GCS\nThis could happen because\n...")

    with pytest.raises(RayStartFailed) as failed:
        start_ray(fails, 60, lambda _: None, Path("logs/ray"))
    said = "Ray did not start: Failed to start the GCS. Its logs are in logs/ray. A busy host"
    assert str(failed.value).startswith(said)
    assert "could happen" not in str(failed.value)


def timed_out():
    raise RuntimeError("The current node timed out during startup. This could happen because")


def test_a_start_that_meets_rays_own_limit_is_made_again_with_nothing_left_of_the_first():
    left = []

    def start():
        left.append(len(children()))
        if len(left) < 3:
            subprocess.Popen(["sleep", "600"])
            timed_out()

    start_ray(start, 60, lambda _: None, None)
    assert left == [left[0]] * 3


def test_but_not_beyond_the_deadline():
    for start in (timed_out, lambda: (time.sleep(0.2), timed_out())):
        with pytest.raises(RayStartFailed, match=r"within deadlines.start = 0.5 s"):
            start_ray(start, 0.5, lambda _: None, None)


# argv: whether the head ever takes a connection; it is gone after that.
HEADLESS = """
import socket, sys, time
import ray
from rltool.errors import HostLost
from rltool.training.cluster import ray_calls, ray_start

ray_start.KNOCK_SECONDS, ray_start.HEAD_SECONDS = 0.05, 0.4
ray.wait = lambda refs, **_: time.sleep(0.05) or ([], refs)
head = socket.create_server(("127.0.0.1", 0))
address = "127.0.0.1:%d" % head.getsockname()[1]
if sys.argv[1] == "never":
    head.close()
watch = ray_start.HeadWatch(address)
time.sleep(0.5)
head.close()
try:
    ray_calls.get_all(["ref"], 2.0, "deadlines.step", who=["trainer rank 0"])
except HostLost as error:
    print(error.exit_code, str(error).replace(address, "HEAD"))
except ray_calls.DeadlinePassed:
    print("still there")
watch.close()
"""


@pytest.mark.parametrize(
    ("answered", "said"), [("once", f"4 Ray's head at HEAD takes no connection from host {gethostname()} for 0.4 s ("),
                           ("never", "still there")],
)  # fmt: skip
def test_a_head_that_takes_no_connection_any_more_ends_the_run_and_one_that_never_did_says_nothing(answered, said):
    done = subprocess.run([sys.executable, "-c", HEADLESS, answered], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith(said), done.stdout + done.stderr


# argv: the process of Ray's that dies, how the main thread waits: for an actor (with get_all), for one whose death it
# sees before the watch has looked, or in something else. A process that ends with this one stands for each of Ray's.
LOSES = """
import subprocess, sys, time
import psutil, ray
from rltool.errors import PartLost
from rltool.training.cluster import ray_calls
from rltool.training.cluster import ray_start
from rltool.training.cluster.ray_start import RayWatch

part, waits = sys.argv[1:]
begun = {name: subprocess.Popen("cat", stdin=subprocess.PIPE) for name in ray_start.WATCHED}
ray_start.WATCHED["gcs_server"] = 0.5 if waits == "elsewhere" else 60.0
ray.wait = lambda refs, **_: time.sleep(0.05) or ([], refs)
def died(*_, **__):
    raise ray.exceptions.ActorDiedError()

if waits == "for a rank that dies of it":
    ray_start.POLL_SECONDS = 60.0  # the watch comes late
    ray.wait, ray.get = lambda refs, **_: (refs, []), died
watch = RayWatch({name: psutil.Process(process.pid) for name, process in begun.items()})
try:
    time.sleep(0.5)
    begun[part].kill()
    if waits == "elsewhere":
        time.sleep(60)
    ray_calls.get_all(["ref"], 60, "deadlines.step", who=["the rollout manager"])
except PartLost as error:
    watch.close()
    print("raised:", error)
    sys.exit(7)
"""


@pytest.mark.parametrize(
    ("part", "waits", "code", "beginning"),
    [
        ("raylet", "for an actor", 1, "error: "),
        ("gcs_server", "for an actor", 7, "raised: "),
        ("gcs_server", "elsewhere", 1, "error: "),
        ("raylet", "for a rank that dies of it", 7, "raised: "),
        ("gcs_server", "for a rank that dies of it", 7, "raised: "),
    ],
)
def test_a_process_of_rays_that_dies_ends_the_run_with_a_line_of_its_own(part, waits, code, beginning):
    done = subprocess.run([sys.executable, "-c", LOSES, part, waits], capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    [line] = (done.stdout + done.stderr).splitlines()
    assert line.startswith(f"{beginning}Ray's {part} (pid ") and line.endswith("go on with `rltool train --resume`")
