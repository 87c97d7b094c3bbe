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
from tests.e2e.test_managed import alive_with, engines_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SETS = (
    'engines.mode="managed"', "eval.sets={}",
    'weights.pause_mode="abort"',
    'engines.groups=[{name="p",role="prefill",max_model_len=64},{name="d",role="decode",max_model_len=64}]',
)  # fmt: skip
SYNCHRONOUS = ("steps=2",)
AHEAD = ("steps=4", "rollout.max_staleness=1", 'algorithm.is_weights="token"')
"""Each sync meets requests on their way."""
AGREEMENT = 5e-6


@pytest.mark.parametrize(
    "more", [SYNCHRONOUS, pytest.param(AHEAD, marks=pytest.mark.long)], ids=["synchronous", "ahead"]
)
def test_a_run_whose_engines_prefill_and_decode_apart_agrees_with_its_trainer(
    tmp_path: Path, tiny_tied_dir: Path, more: tuple[str, ...]
):
    job = write_job(tmp_path / "job", tiny_tied_dir, None)
    process = job.start("train", "apart", sets=[*SETS, *more])
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
    out = job.output("apart")
    assert "placement: 3 Ray bundles (1 trainer, 2 engine)" in out and "engine-0: vllm prefill, group p, cpu" in out
    assert len(steps) == (2 if more == SYNCHRONOUS else 4)
    compared = [s["train/logprob_abs_diff_mean"] for s in steps if "train/logprob_abs_diff_mean" in s]
    assert compared and max(compared) < AGREEMENT
    assert fetched > 0, "without a connector each engine would have computed everything itself"
    assert engines_of(job, "apart") == {} and alive_with(job, "apart") == []
    assert Endpoints.load(job.runs / "apart" / "endpoints.json").models == {}
    assert (job.runs / "apart" / "logs" / "latest" / "engine-0.log").stat().st_size > 0


def _fetched(file: Path) -> float:
    """KV caches that the decode engine has fetched so far, by its own count."""
    models = Endpoints.load(file).models if file.exists() else {}
    for engine in models["policy"].engines if "policy" in models else ():
        if engine.role == "decode":
            text = send(engine.url, HttpRequest("GET", "/metrics"), key=engine.read_key(), timeout=5.0)
            lines = [line for line in text.splitlines() if line.startswith("vllm:nixl_xfer_time_seconds_count")]
            return sum(float(line.rsplit(" ", 1)[1]) for line in lines)
    return 0.0
