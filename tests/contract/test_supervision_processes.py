"""Starting, watching and stopping real child processes, with children of their own."""

import asyncio
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from rltool.engines.endpoints import Endpoints, EngineEndpoint, ModelEndpoints
from rltool.engines.fleet.liveness import Liveness
from rltool.engines.run_status import run_status
from rltool.errors import RltoolError
from rltool.processes.leftovers import SHARED_MEMORY, make_temporary_directory, remove_abandoned
from rltool.processes.readiness import NotReady, wait_until_ready
from rltool.processes.run_directory import open_run
from rltool.processes.spawn import ProcessFailed, ProcessSpec, start
from rltool.processes.state import is_alive, read_state, read_states, write_state
from rltool.processes.stop import process_tree, stop_processes
from rltool.processes.supervise import stop_all, supervise

DEADLINE = 30.0

# A parent that prints the pid of a child which ignores TERM, as do some worker processes while they load CUDA.
STUBBORN_FAMILY = """
import signal, subprocess, sys, time
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", deaf])
print("child", child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def run(tmp_path):
    run = open_run("test", create=True, root=tmp_path)
    yield run
    for state in read_states(run):
        for process in process_tree(state):
            process.kill()


def python(role, code, **options):
    return ProcessSpec(role=role, argv=(sys.executable, "-c", code), **options)


def wait_for_log(process, text):
    deadline = time.monotonic() + DEADLINE
    while text not in process.log.read_text():
        assert time.monotonic() < deadline, f"{text!r} never appeared in {process.log.read_text()!r}"
        time.sleep(0.02)
    return process.log.read_text()


def start_family(run):
    parent = start(python("family", STUBBORN_FAMILY), run)
    wait_for_log(parent, "deaf")
    child = int(wait_for_log(parent, "child").split("child")[1].split()[0])
    return parent, psutil.Process(child)


def gone(process):
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_a_started_process_is_recorded_and_logs_both_streams(run):
    process = start(
        python(
            "worker",
            "import sys, os; print('out', os.environ['X']); sys.stderr.write('err')",
            environment={"X": "1"},
            url="http://u",
            gpus=(3,),
        ),
        run,
    )
    assert process.popen.wait(DEADLINE) == 0
    log = process.log.read_text()
    assert "out 1" in log
    assert "err" in log
    state = read_state(run, "worker")
    assert state == process.state
    assert (state.url, state.gpus, state.pid) == ("http://u", (3,), process.popen.pid)
    assert not is_alive(state)


def test_a_program_that_does_not_exist_is_named(run):
    with pytest.raises(ProcessFailed, match="/does/not/exist"):
        start(ProcessSpec(role="worker", argv=("/does/not/exist",)), run)
    assert read_states(run) == []


def test_a_process_whose_state_cannot_be_written_does_not_live_on(run, monkeypatch):
    family = (
        "import subprocess, time\nsubprocess.Popen(['sleep', '600'])\nprint('up', flush=True)\ntime.sleep(600)"
    )
    trees = []

    def full_disk(_run, state):
        log = run.logs_dir / "latest" / "worker.log"
        while "up" not in log.read_text():
            time.sleep(0.02)
        trees.extend(process_tree(state))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rltool.processes.spawn.write_state", full_disk)
    with pytest.raises(OSError, match="No space left"):
        start(python("worker", family), run)
    assert len(trees) == 2 and not psutil.pid_exists(trees[0].pid), "it was reaped"
    deadline = time.monotonic() + DEADLINE
    while not all(map(gone, trees)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_stop_ends_the_whole_tree_even_a_child_that_ignores_term(run):
    parent, child = start_family(run)
    stop_processes([parent.state], grace=0.5)
    assert not is_alive(parent.state)
    assert gone(child)


def test_an_orphan_whose_parent_was_killed_is_still_found_and_stopped(run):
    parent, child = start_family(run)
    parent.popen.kill()
    parent.popen.wait()
    assert child.is_running()
    stop_processes([parent.state], grace=0.2)
    assert gone(child)


def test_a_reused_pid_is_never_signalled(run):
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    try:
        mine = start(python("worker", "pass"), run)
        mine.popen.wait(DEADLINE)
        reused = mine.state.model_copy(update={"pid": stranger.pid, "start_time": mine.state.start_time - 3600})
        write_state(run, reused)
        assert not is_alive(reused)
        stop_processes([reused], grace=0.2)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


@pytest.mark.parametrize("elsewhere", [{"boot": "of before the reboot"}, {"pid_namespace": "pid:[1]"}], ids=str)
def test_a_strangers_session_with_the_number_of_a_process_of_another_boot_or_container_is_left_alone(run, elsewhere):
    parent, child = start_family(run)
    parent.popen.kill()
    parent.popen.wait()
    assert process_tree(parent.state) == [child], "what is left of a session is found"
    stale = parent.state.model_copy(update=elsewhere)
    assert process_tree(stale) == []
    stop_processes([stale], grace=0.2)
    assert child.is_running()
    stop_processes([parent.state], grace=0.0)


def test_an_interrupt_in_the_grace_period_kills_at_once_and_leaves_nothing(run):
    parent, child = start_family(run)

    def impatient(_seconds):
        raise KeyboardInterrupt

    slept = iter([impatient])
    stop_processes([parent.state], grace=600, sleep=lambda s: next(slept, time.sleep)(s))
    assert not is_alive(parent.state)
    assert gone(child)


def test_waiting_returns_what_the_probe_found(run):
    process = start(python("worker", "import time; time.sleep(600)"), run)
    answers = iter([NotReady("no port"), NotReady("loading"), "served"])

    async def probe():
        answer = next(answers)
        if isinstance(answer, NotReady):
            raise answer
        return answer

    assert asyncio.run(wait_until_ready(process, probe, timeout=DEADLINE, poll=0.01)) == "served"
    stop_all([process])
    assert read_states(run) == []


def test_death_while_waiting_fails_at_once_with_the_end_of_the_log(run):
    process = start(python("worker", "print('\\n'.join(f'line {i}' for i in range(50))); raise SystemExit(7)"), run)

    async def hanging_probe():
        await asyncio.sleep(3600)

    with pytest.raises(ProcessFailed) as failure:
        asyncio.run(wait_until_ready(process, hanging_probe, timeout=3600, poll=0.01))
    message = str(failure.value)
    assert "worker ended with exit code 7 while starting" in message
    assert "line 49" in message
    assert "line 30" in message
    assert "line 29" not in message
    assert str(process.log) in message
    assert "rltool logs worker --run test" in message


def test_a_process_that_never_serves_is_reported_with_what_is_missing(run):
    process = start(python("worker", "import time; time.sleep(600)"), run)
    now = iter(range(0, 10_000, 30))

    async def probe():
        raise NotReady("connection refused")

    with pytest.raises(ProcessFailed, match=r"not ready within 100 s \(connection refused\)"):
        asyncio.run(wait_until_ready(process, probe, timeout=100, poll=0.0, clock=lambda: next(now)))
    stop_all([process])


def test_a_final_error_of_the_probe_is_passed_on(run):
    process = start(python("worker", "import time; time.sleep(600)"), run)

    async def probe():
        raise RltoolError("it serves another model")

    with pytest.raises(RltoolError, match="another model"):
        asyncio.run(wait_until_ready(process, probe, timeout=DEADLINE, poll=0.01))
    stop_all([process])


def test_the_first_failure_names_role_and_exit_code(run):
    steady = start(python("steady", "import time; time.sleep(600)"), run)
    failing = start(python("failing", "print('boom'); raise SystemExit(3)"), run)
    with pytest.raises(ProcessFailed, match=r"(?s)failing ended with exit code 3.*boom"):
        supervise([steady, failing], poll=0.01)
    stop_all([steady, failing])
    assert not is_alive(steady.state)


def test_a_process_that_was_killed_is_reported_with_its_signal(run):
    process = start(python("worker", "import time; time.sleep(600)"), run)
    process.popen.kill()
    with pytest.raises(ProcessFailed, match="killed by signal 9"):
        supervise([process], poll=0.01)


def test_a_process_that_was_asked_to_stop_is_no_failure(run):
    process = start(python("worker", "import time; time.sleep(600)"), run)
    write_state(run, process.state.model_copy(update={"stopping": True}))
    stop_processes([process.state])
    supervise([process], poll=0.01)


def test_an_interrupt_while_a_child_is_being_started_arrives_after_it_is_recorded(run, monkeypatch):
    popen = subprocess.Popen

    def interrupted_popen(*args, **kwargs):
        child = popen(*args, **kwargs)
        signal.raise_signal(signal.SIGINT)
        return child

    monkeypatch.setattr("rltool.processes.spawn.subprocess.Popen", interrupted_popen)
    with pytest.raises(KeyboardInterrupt):
        start(python("worker", "import time; time.sleep(600)"), run)
    state = read_state(run, "worker")
    assert state is not None
    assert is_alive(state)
    stop_processes([state])
    os.waitpid(state.pid, 0)


def test_processes_can_be_started_outside_of_the_main_thread(run):
    started = []
    thread = threading.Thread(target=lambda: started.append(start(python("worker", "pass"), run)))
    thread.start()
    thread.join(DEADLINE)
    assert started[0].popen.wait(DEADLINE) == 0


TITLED = """
import os, signal, subprocess, sys, time
child = subprocess.Popen(["VLLM::EngineCore", "-c", "import time; time.sleep(600)"], executable=sys.executable)
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, other.pid, flush=True)
time.sleep(600)
"""
"""A server that does not notice that what generates in it has died."""


class Health:
    """Answers `status` to every GET; an address of nobody after `close`."""

    def __init__(self):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(handler):
                handler.send_response(self.status)
                handler.send_header("Content-Length", "0")
                handler.end_headers()

            def log_message(handler, *_):
                pass

        self.status = 200
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def health():
    server = Health()
    yield server
    server.close()


def test_a_server_whose_engine_core_was_killed_is_reported_at_once_though_it_lives(run, health):
    server = start(python("engine-0", TITLED), run)
    line = wait_for_log(server, "\n")  # whole: an unbuffered print writes it word by word
    core, other = (psutil.Process(int(pid)) for pid in line.split("child")[1].split()[:2])
    check = Liveness(server.state.pid, health.url)
    other.kill()  # a helper, of which servers have many that come and go
    assert check() is None
    core.kill()
    with pytest.raises(ProcessFailed, match=rf"engine-0 lost its process VLLM::EngineCore \(pid {core.pid}\)") as found:
        supervise([server], checks={"engine-0": check}, poll=0.01)
    assert "rltool logs engine-0" in str(found.value)
    stop_all([server])


def test_a_server_that_says_itself_that_its_engine_is_dead_is_reported(run, health):
    now = [0.0]
    server = start(python("engine-0", "import time; time.sleep(600)"), run)
    check = Liveness(server.state.pid, health.url, clock=lambda: now[0])
    now[0] += 60
    assert check() is None
    health.status = 500  # a failure of another kind, which may pass
    now[0] += 60
    assert check() is None
    health.status = 503
    assert check() is None, "it is not asked with every look"
    now[0] += 60
    with pytest.raises(ProcessFailed, match="answers 503 on /health"):
        supervise([server], checks={"engine-0": check}, poll=0.01)
    stop_all([server])


def test_a_server_that_does_not_answer_is_not_called_dead(run):
    now = [0.0]
    server = start(python("engine-0", "import time; time.sleep(600)"), run)
    check = Liveness(server.state.pid, "http://127.0.0.1:9", clock=lambda: now[0])
    now[0] += 60
    assert check() is None
    stop_all([server])


def test_a_server_whose_engine_core_was_stopped_with_it_is_no_failure(run, health):
    server = start(python("engine-0", TITLED), run)
    core = psutil.Process(int(wait_for_log(server, "child").split("child")[1].split()[0]))
    check = Liveness(server.state.pid, health.url)
    write_state(run, server.state.model_copy(update={"stopping": True}))
    core.kill()
    while not gone(core):
        time.sleep(0.01)
    said, said_while_it_ran = [], []

    def then_the_server(_seconds):
        if is_alive(server.state):
            said_while_it_ran.extend(said)
            stop_processes([server.state])

    supervise([server], checks={"engine-0": check}, sleep=then_the_server, note=said.append)
    assert (said_while_it_ran, said) == ([], ["engine-0 was stopped"])


def test_status_does_not_call_an_engine_alive_whose_server_says_that_it_is_dead(run, health):
    server = start(python("engine-0", "import time; time.sleep(600)", url=health.url), run)
    engine = EngineEndpoint(url=health.url, dialect="vllm")
    Endpoints(models={"policy": ModelEndpoints(engines=(engine,))}).save(run.endpoints_file)
    health.status = 503
    [row] = run_status(run).processes
    assert (row.role, row.alive) == ("engine-0", False)
    assert "its engine has died" in row.health and str(server.state.pid) in row.health
    health.status = 500  # not a verdict
    [row] = run_status(run).processes
    assert row.alive is True and row.health != "ok"
    stop_all([server])


IN_ITS_DIRECTORY = """
import os, socket, time
path = os.path.join(os.environ["PLACE"], "0123456789-" * 5)
server = socket.socket(socket.AF_UNIX)
server.bind(path)
print("bound", path, flush=True)
time.sleep(600)
"""


@pytest.fixture
def temporary(monkeypatch):
    """Another place for temporary files than that of the commands that run beside this test, which remove abandoned
    directories and make some. Its path is short."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as directory:
        monkeypatch.setattr(tempfile, "tempdir", directory)
        yield Path(directory)


def test_sockets_of_a_process_lie_in_a_directory_of_its_own_that_goes_with_it_however_it_ends(run, temporary):
    one, other = (start(python(f"engine-{i}", IN_ITS_DIRECTORY, temporary_in="PLACE"), run) for i in range(2))
    paths = [Path(wait_for_log(process, "bound").split()[-1]) for process in (one, other)]
    assert paths[0].parents[2] == temporary
    closed = paths[0].parent.parent.stat()
    assert closed.st_mode & 0o777 == 0o700 and closed.st_uid == os.getuid()
    one.popen.kill()
    one.popen.wait()
    assert paths[0].exists()
    stop_all([one])
    assert not paths[0].parent.parent.exists()
    remove_abandoned()
    assert paths[1].exists(), "its process lives"
    stop_all([other])
    assert not paths[1].parent.parent.exists()


def test_a_program_that_cannot_be_started_leaves_no_directory(run, temporary):
    with pytest.raises(ProcessFailed):
        start(ProcessSpec(role="worker", argv=("/does/not/exist",), temporary_in="PLACE"), run)
    assert list(temporary.iterdir()) == []


def test_a_directory_for_sockets_is_refused_where_every_path_is_too_long():
    with pytest.raises(RltoolError, match="set TMPDIR to a directory whose path is shorter"):
        make_temporary_directory(100)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a directory of another user")
def test_what_only_looks_like_an_abandoned_directory_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    strangers, open_to_all, unlocked = (tmp_path / f"rltool-{name}" for name in ("stranger", "open", "unlocked"))
    for directory, mode in ((strangers, 0o700), (open_to_all, 0o777), (unlocked, 0o700)):
        directory.mkdir()
        directory.chmod(mode)
        (directory / "t").mkdir()
    for directory in (strangers, open_to_all):
        (directory / "lock").touch()
    os.chown(strangers, 65534, 65534)
    (tmp_path / "rltool-link").symlink_to(strangers)
    remove_abandoned()
    assert {path.name for path in tmp_path.iterdir()} == {
        "rltool-stranger", "rltool-open", "rltool-unlocked", "rltool-link"
    }  # fmt: skip


# Its memory is removed by a process that Python starts beside it, unless that is killed with it.
SHARES_MEMORY = """
import os, signal, sys, time
from multiprocessing import shared_memory
signal.signal(signal.SIGTERM, signal.SIG_IGN)
segments = [shared_memory.SharedMemory(create=True, size=4096) for _ in range(2)]
print("names", *(segment.name for segment in segments), flush=True)
time.sleep(600)
"""


def test_shared_memory_of_processes_that_had_to_be_killed_goes_unless_another_has_it_mapped(run):
    owner = start(python("engine-0", SHARES_MEMORY), run)
    names = wait_for_log(owner, "\n").split()[1:]
    mine, shared = (SHARED_MEMORY / name for name in names)
    strangers = SHARED_MEMORY / f"psm_{os.getpid():x}strangers"
    strangers.write_bytes(b"x")
    try:
        with shared.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
            stop_processes([owner.state], grace=0.3)
            owner.popen.wait()
            assert not mine.exists() and shared.exists() and strangers.exists()
    finally:
        for segment in (mine, shared):
            segment.unlink(missing_ok=True)
        strangers.unlink()
