"""`rltool serve-engines`, `router`, `status`, `logs`, `stop` as a user types them, on real vLLM and sglang-router."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from rltool.processes.run_directory import open_run
from rltool.processes.state import read_states
from rltool.processes.stop import process_tree
from tests.e2e.engines import running

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

DEADLINE = 300.0


@pytest.fixture
def root(tmp_path: Path):
    """Directory of runs; whatever a failed test leaves running in it is killed."""
    root = tmp_path / "runs"
    yield root
    for directory in root.glob("*/state/run.json"):
        for state in read_states(open_run(directory.parent.parent.name, create=False, root=root)):
            for process in process_tree(state):
                process.kill()


def command(root: Path, *words: str) -> tuple[list[str], dict[str, str]]:
    return [sys.executable, "-m", "rltool", *words], {**os.environ, "RLTOOL_RUNS": str(root), "COLUMNS": "200"}


def rltool(root: Path, *words: str, code: int = 0) -> str:
    argv, environment = command(root, *words)
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=DEADLINE, cwd=root.parent)
    assert done.returncode == code, f"{words} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def generate(url: str, key: str) -> dict:
    body = {
        "input_ids": [5, 6, 7],
        "sampling_params": {"max_new_tokens": 4, "temperature": 1.0},
        "return_logprob": True,
    }
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(url + "/generate", json.dumps(body).encode(), headers, method="POST")
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


def pause(url: str, key: str) -> None:
    request = urllib.request.Request(
        url + "/pause?mode=keep", headers={"Authorization": f"Bearer {key}"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        assert reply.status == 200


def wait_for(condition, what: str):
    deadline = time.monotonic() + DEADLINE
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.1)
    return found


def test_engines_and_router_serve_are_seen_and_end_without_a_trace(root, tiny_tied_dir):
    said = rltool(
        root,
        "serve-engines",
        str(tiny_tied_dir),
        "--device",
        "cpu",
        "--max-model-len",
        "64",
        "--run",
        "job",
        "--detach",
    )
    run = open_run("job", create=False, root=root)
    assert f"rltool train --config run.toml --rollout-external @{run.endpoints_file}" in said
    said += rltool(root, "router", "--detach")
    key = run.key_file.read_text()
    assert key not in said

    status = json.loads(rltool(root, "status", "--json"))["runs"][0]
    assert status["name"] == "job"
    rows = {row["role"]: row for row in status["processes"]}
    assert set(rows) == {"engine-0", "router", "serve-engines", "router-command"}
    assert all(row["alive"] for row in rows.values())
    assert [rows[role]["health"] for role in ("engine-0", "router")] == ["ok", "ok"]
    assert rows["engine-0"]["weight_version"]
    endpoints = json.loads(run.endpoints_file.read_text())["models"]["policy"]
    assert endpoints["data_url"] == rows["router"]["url"]
    assert (
        endpoints["engines"][0] | {"plugin": True, "weight_backend": "rltool", "key_file": "state/key"}
        == endpoints["engines"][0]
    )

    reply = generate(endpoints["data_url"], key)
    assert len(reply["output_ids"]) == len(reply["meta_info"]["output_token_logprobs"]) > 0

    trees = [process for state in read_states(run) for process in process_tree(state)]
    assert len(trees) >= 3  # the engine has at least one worker process
    assert all(key not in " ".join(process.cmdline()) for process in trees)
    assert re.search(r"^engine-0 +\|", rltool(root, "logs", "-n", "3"), re.MULTILINE)
    assert "has a living router" in rltool(root, "router", "--detach", code=2)

    pause(rows["engine-0"]["url"], key)  # as a trainer does that dies in the middle of a sync
    paused = json.loads(rltool(root, "status", "--json"))["runs"][0]["processes"]
    assert next(row["health"] for row in paused if row["role"] == "engine-0") == "paused"
    assert "was paused, resumed" in rltool(root, "engines", "resume")
    assert "was not paused" in rltool(root, "engines", "resume")
    assert generate(endpoints["data_url"], key)["output_ids"]

    rltool(root, "stop")
    assert running(trees) == []
    assert read_states(run) == []
    assert json.loads(run.endpoints_file.read_text())["models"]["policy"]["data_url"] is None


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_an_interrupt_while_engines_are_starting_leaves_no_process(root, tiny_tied_dir, number):
    argv, environment = command(root, "serve-engines", str(tiny_tied_dir), "--device", "cpu", "--run", "cut")
    supervisor = subprocess.Popen(
        argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=root.parent
    )
    try:
        states = root / "cut" / "state"
        wait_for((states / "engine-0.json").exists, "the engine's state file")
        run = open_run("cut", create=False, root=root)
        engine = next(state for state in read_states(run) if state.role == "engine-0")
        wait_for(lambda: engine.log.stat().st_size, "the engine's first log line")
        trees = process_tree(engine)
        assert trees
        supervisor.send_signal(number)
        output, _ = supervisor.communicate(timeout=240)
    finally:
        supervisor.kill()
    assert supervisor.returncode == (130 if number == signal.SIGINT else 0), output.decode()
    assert running(trees) == []
    assert process_tree(engine) == []
    assert read_states(run) == []
    assert not run.endpoints_file.exists()
    assert b"Traceback" not in output


def test_an_engine_that_cannot_start_ends_the_command_with_its_log_and_leaves_nothing(root, tiny_tied_dir):
    said = rltool(
        root, "serve-engines", str(tiny_tied_dir), "--device", "cpu", "--run", "bad", "--", "--no-such-flag", code=1
    )
    assert "engine-0 ended with exit code 2 while starting" in said
    assert "--no-such-flag" in said
    assert "rltool logs engine-0 --run bad" in said
    assert "Traceback" not in said.split("next:")[-1]
    run = open_run("bad", create=False, root=root)
    assert read_states(run) == []
    assert not run.endpoints_file.exists()
