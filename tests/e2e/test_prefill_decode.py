"""Two real vLLM engines, started by the run: one fills KV caches, the other fetches them over NIXL and samples."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import pytest

from rltool.engines.endpoints import Endpoints
from rltool.engines.sync_client import send
from rltool.engines.types import HttpRequest
from rltool.errors import RltoolError
from tests.e2e.job import write_job

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900), pytest.mark.long]

SETS = (
    'engines.mode="managed"', "steps=4", "eval.sets={}", "rollout.max_staleness=1", 'algorithm.is_weights="token"',
    'weights.pause_mode="abort"',
    'engines.groups=[{name="p",role="prefill",max_model_len=64},{name="d",role="decode",max_model_len=64}]',
)  # fmt: skip
AGREEMENT = 5e-6


def test_a_run_whose_engines_prefill_and_decode_apart_agrees_with_its_trainer(tmp_path: Path, tiny_tied_dir: Path):
    job = write_job(tmp_path / "job", tiny_tied_dir, None)
    process = job.start("train", "apart", sets=list(SETS))
    fetched = 0.0
    try:
        while process.poll() is None:
            with suppress(RltoolError):  # an engine is being ended
                fetched = max(fetched, _fetched(job.runs / "apart" / "endpoints.json"))
            time.sleep(0.5)
    finally:
        process.kill()
    assert process.returncode == 0, job.output("apart")[-4000:]
    steps = job.steps("apart")
    assert len(steps) == 4
    compared = [s["train/logprob_abs_diff_mean"] for s in steps if "train/logprob_abs_diff_mean" in s]
    assert compared and max(compared) < AGREEMENT
    assert fetched > 0, "without a connector each engine would have computed everything itself"


def _fetched(file: Path) -> float:
    """KV caches that the decode engine has fetched so far, by its own count."""
    models = Endpoints.load(file).models if file.exists() else {}
    for engine in models["policy"].engines if "policy" in models else ():
        if engine.role == "decode":
            text = send(engine.url, HttpRequest("GET", "/metrics"), key=engine.read_key(), timeout=5.0)
            lines = [line for line in text.splitlines() if line.startswith("vllm:nixl_xfer_time_seconds_count")]
            return sum(float(line.rsplit(" ", 1)[1]) for line in lines)
    return 0.0
