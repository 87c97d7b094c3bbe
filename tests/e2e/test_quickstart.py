"""`rltool quickstart` as a user runs it, once to its end (with fewer steps) and once interrupted."""

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

from rltool.processes.run_directory import open_run
from rltool.processes.state import ProcessState, read_states
from rltool.processes.stop import process_tree

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

DEADLINE = 700.0


def start(root: Path, out: Path, *words: str) -> subprocess.Popen:
    environment = {**os.environ, "RLTOOL_RUNS": str(root), "COLUMNS": "200"}
    with out.open("w") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "rltool", "quickstart", *words],
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=root.parent,
            start_new_session=True,
        )


def everything_started(root: Path, run: str) -> list[psutil.Process]:
    states: list[ProcessState] = read_states(open_run(run, create=False, root=root))
    return [process for state in states for process in process_tree(state)]


def still_running(processes: list[psutil.Process]) -> list[str]:
    _, alive = psutil.wait_procs(processes, timeout=60)
    return [f"{p.pid} {p.cmdline()}" for p in alive if p.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def root(tmp_path):
    """Directory of runs; whatever a failed test leaves running there is killed."""
    root = tmp_path / "runs"
    yield root
    for marker in root.glob("*/state/run.json"):
        for process in everything_started(root, marker.parent.parent.name):
            process.kill()


def test_it_goes_all_the_way_and_leaves_a_report_and_no_process(root, tmp_path):
    process = start(root, tmp_path / "out", "--run", "q", "--steps", "12", "--warm-up-steps", "60")
    seen: dict[int, psutil.Process] = {}
    deadline = time.monotonic() + DEADLINE
    while process.poll() is None:
        assert time.monotonic() < deadline, (tmp_path / "out").read_text()
        if (root / "q" / "state" / "run.json").exists():
            seen.update({p.pid: p for p in everything_started(root, "q")})
        time.sleep(0.5)
    said = (tmp_path / "out").read_text()
    assert process.returncode == 0, said
    run = root / "q"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [r for r in records if "train/grad_norm" in r]
    assert len(steps) == 12 and all(r["train/logprob_abs_diff_mean"] < 1e-5 for r in steps)
    assert [r["step"] for r in records if "eval/heldout/accuracy" in r] == [-1, 11]
    page = (run / "report.html").read_text()
    assert "<svg" in page and "http://" not in page.split("<body", 1)[0] and "eval/heldout/accuracy" in page
    assert (run / "trained-hf" / "model.safetensors").exists() and (run / "checkpoints" / "latest").exists()
    for words in ("1/7", "7/7", "what it learned", "report.html", "try next"):
        assert words in said
    assert len(seen) > 5 and not still_running(list(seen.values()))


def test_an_interrupt_stops_everything_that_was_started(root, tmp_path):
    process = start(root, tmp_path / "out", "--run", "q")
    deadline = time.monotonic() + DEADLINE
    engines: list[ProcessState] = []
    while len(engines) < 2:
        assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "out").read_text()
        time.sleep(0.2)
        if (root / "q" / "state" / "run.json").exists():
            engines = [s for s in read_states(open_run("q", create=False, root=root)) if s.role.startswith("engine-")]
    running = everything_started(root, "q")
    assert running
    process.send_signal(signal.SIGINT)
    assert process.wait(240) == 130, (tmp_path / "out").read_text()
    assert not still_running(running) and not everything_started(root, "q")
