"""A foreground command with real children: how it ends, what is left (nothing); `rltool stop` from another shell."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

from rltool.engines.launch.start import living_engines
from rltool.engines.run_status import run_status
from rltool.errors import RltoolError, UsageError
from rltool.processes.restarts import RestartPolicy
from rltool.processes.run_directory import open_run
from rltool.processes.spawn import ProcessFailed, ProcessSpec, RunningProcess
from rltool.processes.state import is_alive, read_state, read_states, state_of_this_process, write_state
from rltool.processes.stop import process_tree, stop_processes
from rltool.processes.stop_run import stop_order, stop_run
from rltool.processes.supervise import ProcessGroup, run_in_foreground
from rltool.tinker import launch
from rltool.tinker.launch import ServerRelaunch

DEADLINE = 30.0

# argv: run root, detach ("1" or ""). Two children, one of which has a child of its own.
FOREGROUND = """
import sys
from pathlib import Path
from rltool.errors import RltoolError
from rltool.processes.run_directory import open_run
from rltool.processes.spawn import ProcessFailed, ProcessSpec, RunningProcess
from rltool.processes.supervise import run_command

LONELY = "import time; print('up', flush=True); time.sleep(600)"
FAMILY = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); " + LONELY

def bring_up(group):
    group.start(ProcessSpec(role="engine-0", argv=(sys.executable, "-c", FAMILY)))
    group.start(ProcessSpec(role="engine-1", argv=(sys.executable, "-c", LONELY)))
    print("brought up", flush=True)

run = open_run("r", create=True, root=Path(sys.argv[1]))
try:
    note = lambda text: print(text, flush=True)
    sys.exit(run_command("serve-engines", run, bring_up, detach=bool(sys.argv[2]), note=note))
except RltoolError as error:
    print(error)
    sys.exit(error.exit_code)
"""


class Foreground:
    def __init__(self, root, detach=""):
        self.process = subprocess.Popen(
            [sys.executable, "-c", FOREGROUND, str(root), detach],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        first = self.process.stdout.readline()
        assert first == "brought up\n", first + self.process.stdout.read()
        self.run = open_run("r", create=False, root=root)
        self.states = {state.role: state for state in read_states(self.run)}
        deadline = time.monotonic() + DEADLINE
        children = [state.log for role, state in self.states.items() if role != "serve-engines"]
        while any("up" not in log.read_text() for log in children):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        self.trees = [
            process for role, state in self.states.items() if role != "serve-engines" for process in process_tree(state)
        ]

    def end(self):
        output, _ = self.process.communicate(timeout=DEADLINE)
        return self.process.returncode, output

    def left(self):
        return [p.pid for p in self.trees if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    def kill(self):
        for process in [p for state in read_states(self.run) for p in process_tree(state)]:
            if process.pid != os.getpid():
                process.kill()
        self.process.kill()
        self.process.wait()


@pytest.fixture
def start(tmp_path):
    started = []

    def begin(detach=""):
        started.append(Foreground(tmp_path, detach))
        return started[-1]

    yield begin
    for foreground in started:
        foreground.kill()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0), (signal.SIGHUP, 0)])
def test_a_signal_ends_all_children_with_their_trees(start, number, code):
    foreground = start()
    assert set(foreground.states) == {"serve-engines", "engine-0", "engine-1"}
    assert len(foreground.trees) == 3
    foreground.process.send_signal(number)
    assert foreground.end()[0] == code
    assert foreground.left() == []
    assert read_states(foreground.run) == []


def test_the_first_death_ends_all_and_is_reported(start):
    foreground = start()
    os.kill(foreground.states["engine-1"].pid, signal.SIGKILL)
    code, output = foreground.end()
    assert code == 1
    assert "engine-1 was killed by signal 9" in output
    assert "rltool logs engine-1 --run r" in output
    assert foreground.left() == []
    assert read_states(foreground.run) == []


def test_detached_children_outlive_the_command_are_watched_and_stopped_from_another_process(start):
    detached = start(detach="1")
    assert detached.end()[0] == 0, "also its pipe was let go of"
    assert len(detached.left()) == 3
    watcher = detached.states["serve-engines"]
    assert is_alive(watcher) and watcher.pid != detached.process.pid
    assert [os.getsid(watcher.pid), os.readlink(f"/proc/{watcher.pid}/fd/0")] == [watcher.pid, os.devnull]
    assert set(state.role for state in stop_run(detached.run)) == {"serve-engines", "engine-0", "engine-1"}
    assert detached.left() == []
    assert read_states(detached.run) == []


def test_what_a_detached_command_says_later_is_in_its_log(start):
    detached = start(detach="1")
    assert detached.end() == (0, "")
    os.kill(detached.states["engine-1"].pid, signal.SIGKILL)
    ended_by(detached.states["serve-engines"])
    log = detached.states["serve-engines"].log.read_text()
    assert "engine-1 was killed by signal 9" in log
    assert detached.left() == [] and read_states(detached.run) == []


@pytest.mark.parametrize(
    ("what", "code", "said"),
    [
        ("raise SystemExit(7)", 7, ""),
        ("raise ProcessFailed('engine-0 died')", 1, "engine-0 died"),
        ("os.kill(os.getpid(), 9)", 128 + 9, ""),
    ],
)
def test_a_detached_command_that_fails_before_all_serves_ends_with_its_code(tmp_path, what, code, said):
    script = FOREGROUND.replace('print("brought up", flush=True)', what)
    script = "import os\nfrom rltool.processes.spawn import ProcessFailed\n" + script
    run = open_run("r", create=True, root=tmp_path)
    try:
        done = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path), "1"], capture_output=True, text=True, timeout=DEADLINE
        )
        assert (done.returncode, done.stdout.strip()) == (code, said)
        # One that is killed ends nothing and removes nothing: that is for `rltool stop`.
        left = {"engine-0", "engine-1", "serve-engines"} if code > 128 else set()
        assert {state.role for state in read_states(run)} == left
    finally:
        stop_run(run)


WAIT = """
import time
def wait():  # as real starts do: one long sleep would not see a signal that came just before it
    while True: time.sleep(0.05)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0), (signal.SIGHUP, 0)])
def test_a_signal_before_all_serves_ends_a_detached_command_with_all_children(tmp_path, number, code):
    script = FOREGROUND.replace('print("brought up", flush=True)', "print('starting', flush=True); wait()")
    process = subprocess.Popen(
        [sys.executable, "-c", WAIT + script, str(tmp_path), "1"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "starting\n"
        trees = [p for state in read_states(open_run("r", create=False, root=tmp_path)) for p in process_tree(state)]
        process.send_signal(number)
        assert process.wait(DEADLINE) == code
        assert len(trees) >= 4 and not [p for p in trees if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        assert read_states(open_run("r", create=False, root=tmp_path)) == []
    finally:
        process.kill()
        process.wait()
        stop_run(open_run("r", create=False, root=tmp_path))


FORK = """
import os, signal, sys, time
from pathlib import Path
from rltool.processes.background import in_background

def fork(real=os.fork):
    pid = real()
    if pid:
        print(pid, flush=True)
        signal.raise_signal(int(sys.argv[1]))
    return pid

def work(ready):
    time.sleep(600)

os.fork = fork
sys.exit(in_background(work, Path("log")))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_in_the_moment_of_the_fork_ends_a_detached_command_and_not_its_parent_alone(tmp_path, number):
    argv = [sys.executable, "-c", FORK, str(int(number))]
    parent = subprocess.Popen(argv, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    pid = int(parent.stdout.readline())
    try:
        assert parent.wait(DEADLINE) == 128 + number, "it says how the other one ended"
        assert not psutil.pid_exists(pid), "which it has waited for"
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        parent.communicate()


def ended_by(state):
    deadline = time.monotonic() + DEADLINE
    while is_alive(state):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_stopping_one_role_from_another_process_leaves_the_others_in_the_foreground(start):
    foreground = start()
    stop_run(foreground.run, ["engine-0"])
    assert not is_alive(foreground.states["engine-0"])
    assert is_alive(foreground.states["engine-1"])
    assert foreground.process.poll() is None
    stop_run(foreground.run, ["engine-1"])
    code, output = foreground.end()
    assert code == 0
    assert "engine-0 was stopped" in output


def test_stopping_the_whole_run_ends_the_foreground_command_as_well(start):
    foreground = start()
    stopped = stop_run(foreground.run)
    assert stop_order(stopped)[0].role == "serve-engines"
    assert foreground.end()[0] == 0
    assert foreground.left() == []
    assert read_states(foreground.run) == []


@pytest.mark.parametrize("trainer", ["train", "train-restarts"])
def test_a_trainer_goes_before_those_who_watch_its_engines(trainer):
    """It resumes them; and both may take as long for an orderly end."""
    states = [
        state_of_this_process(role, argv=(), orderly_seconds=seconds)
        for role, seconds in (("engine-0", 0.0), ("router-command", 30.0), ("serve-engines", 300.0), (trainer, 300.0))
    ]
    assert [s.role for s in stop_order(states)] == [trainer, "serve-engines", "router-command", "engine-0"]


def test_a_process_is_marked_as_stopping_before_it_is_signalled(tmp_path, monkeypatch):
    """Otherwise a foreground command that sees the death first takes it for a failure."""
    run = open_run("r", create=True, root=tmp_path)
    seen = []
    monkeypatch.setattr("rltool.processes.stop_run.stop_processes", lambda *_: seen.extend(read_states(run)))
    with ProcessGroup(run) as group:
        group.start(ProcessSpec(role="router", argv=(sys.executable, "-c", "import time; time.sleep(600)")))
        stop_run(run)
    assert [state.stopping for state in seen] == [True]


def test_a_role_that_the_run_does_not_have_is_refused_and_nothing_is_stopped(start):
    foreground = start(detach="1")
    foreground.end()
    with pytest.raises(UsageError, match=r"engine-7; it has: engine-0, engine-1, serve-engines"):
        stop_run(foreground.run, ["engine-0", "engine-7"])
    assert len(foreground.left()) == 3


def test_a_second_interrupt_while_stopping_still_leaves_no_process(tmp_path, monkeypatch):
    run = open_run("r", create=True, root=tmp_path)
    real, calls = stop_processes, []

    def interrupted_once(states, grace):
        calls.append(grace)
        if len(calls) == 1:
            raise KeyboardInterrupt
        real(states, grace)

    monkeypatch.setattr("rltool.processes.supervise.stop_processes", interrupted_once)
    with pytest.raises(KeyboardInterrupt), ProcessGroup(run) as group:
        process = group.start(ProcessSpec(role="router", argv=(sys.executable, "-c", "import time; time.sleep(600)")))
    assert calls[1] == 0
    assert not is_alive(process.state)
    assert read_states(run) == []


def full_disk(*_):
    raise OSError(28, "No space left on device")


SLEEP = (sys.executable, "-c", "import time; time.sleep(600)")


def test_a_state_that_cannot_be_marked_keeps_no_process_alive(tmp_path, monkeypatch):
    run = open_run("r", create=True, root=tmp_path)
    with pytest.raises(KeyboardInterrupt), ProcessGroup(run) as group:  # noqa: PT012  # its own last line
        process = group.start(ProcessSpec(role="router", argv=SLEEP))
        monkeypatch.setattr("rltool.processes.supervise.write_state", full_disk)
        raise KeyboardInterrupt
    assert not is_alive(process.state) and read_states(run) == []


def test_a_damaged_state_keeps_no_process_alive(tmp_path):
    run = open_run("r", create=True, root=tmp_path)
    with pytest.raises(RltoolError, match=r"router\.json is not a process state"), ProcessGroup(run) as group:  # noqa: PT012
        processes = [group.start(ProcessSpec(role=role, argv=SLEEP)) for role in ("router", "engine-0")]
        (run.state_dir / "router.json").write_text("{")
    assert not [process for process in processes if is_alive(process.state) or process.popen.returncode is None]


def test_stop_ends_what_it_cannot_mark_and_says_so(tmp_path, monkeypatch):
    run = open_run("r", create=True, root=tmp_path)
    said = []
    with ProcessGroup(run) as group:
        process = group.start(ProcessSpec(role="router", argv=SLEEP))
        monkeypatch.setattr("rltool.processes.stop_run.write_state", full_disk)
        stop_run(run, report=said.append)
        assert not is_alive(process.state)
    assert said == [
        f"router (pid {process.state.pid}) cannot be marked as stopping (No space left on device): "
        "who watches it takes its end for a failure"
    ]


def test_a_role_that_lives_is_not_started_a_second_time(tmp_path):
    run = open_run("r", create=True, root=tmp_path)
    spec = ProcessSpec(role="router", argv=(sys.executable, "-c", "import time; time.sleep(600)"))
    with ProcessGroup(run) as group:
        group.start(spec)
        with pytest.raises(UsageError, match="rltool stop --run r router"):
            group.start(spec)
    assert read_states(run) == []


@pytest.fixture
def shared(tmp_path):
    """A run whose router and engine another host has started."""
    run = open_run("r", create=True, root=tmp_path)
    for role in ("router", "engine-4"):
        state = state_of_this_process(role, argv=["x"], url="http://127.0.0.1:9")
        write_state(run, state.model_copy(update={"boot": "of-host-a", "host": "host-a", "pid": os.getppid()}))
    return run


def test_what_another_host_has_started_is_neither_stopped_nor_forgotten(shared):
    before, said = read_states(shared), []
    assert stop_run(shared, report=said.append) == [] and read_states(shared) == before
    assert said[1] == (
        f"router of run r was started on host host-a (pid {os.getppid()}), which alone knows whether it lives: "
        f"stop it there, or remove {shared.state_dir}/router.json if that host is gone"
    )
    rows = run_status(shared).processes
    assert [(row.role, row.alive, row.health) for row in rows] == [
        ("engine-4", None, "on host host-a"),
        ("router", None, "on host host-a"),
    ]


def test_what_this_host_started_before_it_was_booted_anew_is_forgotten(shared):
    for state in read_states(shared):
        write_state(shared, state.model_copy(update={"host": socket.gethostname()}))
    said = []
    assert stop_run(shared, report=said.append) == read_states(shared) == said == []


def test_a_state_of_another_host_is_not_replaced_but_by_a_trainer_that_holds_the_run(shared):
    before = read_states(shared)
    with ProcessGroup(shared) as group, pytest.raises(UsageError, match="on host host-a.* another --run NAME"):
        group.start(ProcessSpec(role="router", argv=SLEEP))
    with pytest.raises(UsageError, match="on host host-a"):
        run_in_foreground("router", shared, lambda _: None)
    assert read_states(shared) == before and living_engines(shared) == {4: None}, "its number is taken"
    with ProcessGroup(shared, replaces_other_hosts=True) as group:
        process = group.start(ProcessSpec(role="router", argv=SLEEP))
        assert read_state(shared, "router") == process.state and process.state.host == socket.gethostname()


def test_a_second_foreground_command_of_a_role_is_refused_and_the_first_stays_known_to_stop(start):
    foreground = start()
    with pytest.raises(UsageError, match="has a living serve-engines"):
        run_in_foreground("serve-engines", foreground.run, lambda _: None)
    assert {state.role: state for state in read_states(foreground.run)} == foreground.states


def test_a_foreground_command_that_was_recorded_by_whoever_started_it_is_not_in_its_own_way(tmp_path):
    run = open_run("r", create=True, root=tmp_path)
    write_state(run, state_of_this_process("serve-engines", argv=()))
    assert run_in_foreground("serve-engines", run, lambda _: None) == 0


def test_a_log_on_a_full_disk_keeps_no_process_from_being_started_again(tmp_path):
    def full(_: str) -> None:
        raise OSError(28, "No space left on device")

    def bring_up(group: ProcessGroup) -> None:
        spec = ProcessSpec(role="serve-trainer", argv=("bash", "-c", f"echo >> {tmp_path}/starts; exit 3"))
        relaunch = ServerRelaunch(group, RestartPolicy(2, backoff=0.01))
        relaunch.watch(group.start(spec), spec)
        group.restarts.append(relaunch)

    run = open_run("r", create=True, root=tmp_path)
    with pytest.raises(ProcessFailed, match="ended with exit code 3"):
        run_in_foreground("serve-trainer-command", run, bring_up, note=full)
    assert (tmp_path / "starts").read_text() == "\n" * 3


def test_a_server_is_tried_again_until_a_full_disk_has_room_and_says_once_that_it_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "FULL_SECONDS", 0.01)
    start, tries, said = ProcessGroup.start, [], []

    def full(group: ProcessGroup, spec: ProcessSpec, **more: object) -> RunningProcess:
        tries.append(spec.role)
        if 1 < len(tries) < 6:
            raise OSError(28, "No space left on device")
        return start(group, spec, **more)

    def report(line: str) -> None:
        said.append(line)
        raise OSError(28, "No space left on device")

    def bring_up(group: ProcessGroup) -> None:
        spec = ProcessSpec(role="serve-trainer", argv=("bash", "-c", "exit 3"))
        relaunch = ServerRelaunch(group, RestartPolicy(1, backoff=0.01), report)
        relaunch.watch(group.start(spec), spec)
        group.restarts.append(relaunch)

    monkeypatch.setattr(ProcessGroup, "start", full)
    run = open_run("r", create=True, root=tmp_path)
    with pytest.raises(ProcessFailed, match="ended with exit code 3"):
        run_in_foreground("serve-trainer-command", run, bring_up)
    assert len(tries) == 6, "one restart, which waited"
    assert len(said) == 1 and f"{run.path} cannot be written (No space left" in said[0] and "bytes" in said[0]


def test_the_trainer_is_asked_alone_and_ends_its_children_before_the_engines_are_touched(tmp_path):
    """It saves and resumes its engines: killing its workers or its engines under it would lose the run."""
    run = open_run("r", create=True, root=tmp_path)
    order = tmp_path / "order"
    trainer = (
        "import signal, subprocess, sys, time\n"
        "worker = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "def end(number, frame):\n"
        "    time.sleep(0.5)\n"
        "    found = 'alive' if worker.poll() is None else 'dead'\n"
        f"    open({str(order)!r}, 'a').write('trainer: worker ' + found + '\\n')\n"
        "    worker.kill(); worker.wait(); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "print('up', flush=True)\n"
        "time.sleep(600)\n"
    )
    engine = (
        "import signal, sys, time\n"
        f"def end(number, frame):\n    open({str(order)!r}, 'a').write('engine\\n'); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\nprint('up', flush=True)\ntime.sleep(600)\n"
    )
    with ProcessGroup(run) as group:
        started = [
            group.start(ProcessSpec(role=role, argv=(sys.executable, "-c", code)))
            for role, code in (("engine-0", engine), ("train", trainer))
        ]
        write_state(run, started[1].state.model_copy(update={"orderly_seconds": DEADLINE}))
        deadline = time.monotonic() + DEADLINE
        while any("up" not in process.log.read_text() for process in started):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        stop_run(run)
    assert order.read_text().splitlines() == ["trainer: worker alive", "engine"]


def test_a_state_file_of_a_foreground_command_says_that_it_ends_in_order():
    assert state_of_this_process("train", argv=["x"]).orderly_seconds > 0
    assert json.loads(state_of_this_process("train", argv=["x"]).model_dump_json())["session_leader"] is False
