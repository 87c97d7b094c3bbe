"""A real vLLM whose worker is killed: its server lives on for a while, and is not taken for an engine; and one whose
server is killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rltool.engines.endpoints import Endpoints
from rltool.engines.fleet.liveness import serves
from rltool.engines.sync_client import probe
from rltool.processes.run_directory import open_run
from rltool.processes.state import read_state, read_states
from rltool.processes.stop import process_tree
from rltool.processes.stop_run import stop_run

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(600)]

DEADLINE = 240.0


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


class ServingEngines:
    """`rltool serve-engines`, one vLLM on the CPU."""

    def __init__(self, root: Path, model: Path, *flags: str) -> None:
        self.environment = {**os.environ, "RLTOOL_RUNS": str(root / "runs"), "COLUMNS": "200", "PYTHONUNBUFFERED": "1"}
        self.out = root / "out"
        with self.out.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rltool", "serve-engines", str(model), "--device", "cpu", "--run", "r",
                 "--max-model-len", "64", *flags],
                env=self.environment, stdout=out, stderr=subprocess.STDOUT, cwd=root,
            )  # fmt: skip
        self.root = root
        last = "end them with" if "--detach" in flags else "Ctrl-C ends them"
        until(lambda: last in self.out.read_text() or self.process.poll() not in (None, 0), self.out.read_text())
        self.run = open_run("r", create=False, root=root / "runs")
        self.tree = process_tree(read_state(self.run, "engine-0"))

    def said(self) -> str:
        state = read_state(self.run, "serve-engines")
        return self.out.read_text() + (state.log.read_text() if state is not None and state.log is not None else "")

    def status(self) -> dict:
        done = subprocess.run(
            [sys.executable, "-m", "rltool", "status", "--run", "r", "--json"],
            env=self.environment, capture_output=True, text=True, cwd=self.root, timeout=DEADLINE, check=True,
        )  # fmt: skip
        rows = json.loads(done.stdout)["runs"][0]["processes"]
        return next(row for row in rows if row["role"] == "engine-0")

    def close(self) -> None:
        for process in [self.process, *self.tree, *(p for s in read_states(self.run) for p in process_tree(s))]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()


@pytest.fixture
def serving(tmp_path, tiny_tied_dir, request):
    engines = ServingEngines(tmp_path, tiny_tied_dir, *getattr(request, "param", ("--max-restarts", "0")))
    yield engines
    engines.close()


def test_a_killed_worker_is_seen_though_the_server_lives(serving):
    """Server and engine core are stopped, as if they waited for the worker: an idle vLLM would end by itself."""
    assert serving.status()["alive"] is True
    worker = next(process for process in serving.tree if process.name().startswith("VLLM::Worker"))
    for process in serving.tree:
        if process != worker:
            process.suspend()
    worker.kill()
    until(lambda: serving.process.poll() is not None, "the foreground says nothing")
    assert serving.process.returncode == 1
    said = " ".join(serving.said().split())
    assert f"engine-0 lost its process VLLM::Worker (pid {worker.pid})" in said
    assert not any(runs(process) for process in serving.tree), "the rest is stopped"


def test_an_engine_that_ends_because_its_worker_was_killed_quotes_that_and_no_leaks(serving):
    serving.process.send_signal(signal.SIGSTOP)  # so that it looks when all is over
    worker = next(process for process in serving.tree if process.name().startswith("VLLM::Worker"))
    worker.kill()
    until(lambda: serving.status()["alive"] is False, "status takes the engine for a living one")
    until(lambda: not any(runs(process) for process in serving.tree), "vLLM goes on without its worker")
    serving.process.send_signal(signal.SIGCONT)
    assert serving.process.wait(DEADLINE) == 1
    said = " ".join(serving.said().split())
    assert "VllmWorker-0 died unexpectedly" in said and "leaked" not in said


@pytest.mark.parametrize("serving", [("--detach",)], indirect=True)
def test_a_killed_server_is_started_again_and_leaves_no_engine_core(serving):
    """vLLM's engine core outlives a server that was killed, and with it what it holds of a GPU."""
    assert serving.process.wait(DEADLINE) == 0
    before = read_state(serving.run, "engine-0")
    os.kill(before.pid, signal.SIGKILL)
    until(lambda: "it is started again" in serving.said(), serving.said())

    def serves_again() -> bool:
        state = read_state(serving.run, "engine-0")
        return state is not None and state.pid != before.pid and serves(before.url)

    until(serves_again, "the engine does not serve again")
    assert not any(runs(process) for process in serving.tree), "what the killed server has left"
    assert serving.status()["alive"] is True
    (engine,) = Endpoints.load(serving.run.endpoints_file).models["policy"].engines
    assert engine.url == before.url and probe(engine, timeout=10.0).boot_id == engine.boot_id
    again = process_tree(read_state(serving.run, "engine-0"))
    stop_run(serving.run)
    assert not any(runs(process) for process in again) and read_states(serving.run) == []


def runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
