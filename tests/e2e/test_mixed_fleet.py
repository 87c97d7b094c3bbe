"""One real vLLM and one real SGLang behind one sglang-router, trained against as one fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from rltool.config.router import RouterConfig
from rltool.engines.client import EngineClient
from rltool.engines.endpoints import Endpoints, ModelEndpoints
from rltool.engines.types import Completion
from rltool.processes.run_directory import open_run
from rltool.processes.supervise import ProcessGroup
from rltool.router.launch import start_router
from tests.e2e.engines import RunningEngine
from tests.e2e.job import Job, write_job
from tests.e2e.weights import mean_difference, new_request

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

EQUAL = 1e-4
"""Mean absolute difference of fp32 log-probabilities; measured 1e-6 (vLLM) and 1e-5 (SGLang)."""
SECONDS = 60.0


@pytest.fixture
def fleet(vllm_engine_tied: RunningEngine, sglang_engine: RunningEngine) -> tuple[RunningEngine, RunningEngine]:
    return vllm_engine_tied, sglang_engine


@pytest.fixture
def job(tmp_path: Path, tiny_tied_dir: Path, fleet: tuple[RunningEngine, ...]) -> Iterator[Job]:
    """A job whose generation goes through one router to both."""
    endpoints = Endpoints(models={"policy": ModelEndpoints(engines=tuple(engine.endpoint for engine in fleet))})
    run = open_run("engines", create=True, root=tmp_path / "runs")
    endpoints.save(run.endpoints_file)
    with ProcessGroup(run) as group:
        start_router(
            RouterConfig(key_file=fleet[0].endpoint.key_file),
            endpoints.models["policy"],
            group,
            endpoints_file=run.endpoints_file,
        )
        yield write_job(tmp_path, tiny_tied_dir, f"@{run.endpoints_file}")


@pytest.mark.long  # each kind is trained against in test_train.py and test_sglang_train.py
def test_a_fleet_of_both_kinds_is_trained_against_and_both_compute_what_the_trainer_computes(job, fleet):
    before = [requests_answered(engine) for engine in fleet]
    said = job("train", "mixed", sets=["eval.sets={}", "checkpoint.save_hf_at_end=true"])
    steps = job.steps("mixed")
    assert [record["step"] for record in steps] == [0, 1, 2]
    assert all(0 < record["train/logprob_abs_diff_mean"] < EQUAL for record in steps)
    assert all(record["rollout/engines_serving"] == 2 for record in steps)
    assert all(record["weights/failed_engines"] == 0 for record in steps)
    assert "through http://127.0.0.1" in said and "to 2/2 engines" in said
    assert all(after > 8 for after in (requests_answered(e) - b for e, b in zip(fleet, before, strict=True)))

    model = AutoModelForCausalLM.from_pretrained(job.runs / "mixed" / "hf" / "step_3").eval()
    for engine in fleet:
        sample = asyncio.run(sampled(engine))
        assert {span.version for span in sample.versions} == {steps[-1]["weight_version"]}
        assert mean_difference(model, sample) < EQUAL, engine.endpoint.dialect


async def sampled(engine: RunningEngine) -> Completion:
    async with EngineClient() as client:
        [sample] = await client.generate(engine.endpoint, new_request(seed=None), timeout=SECONDS)
        return sample


def requests_answered(engine: RunningEngine) -> int:
    """How many generation requests it has answered so far."""
    if engine.endpoint.dialect == "sglang":
        return engine.log.read_text().count('"POST /generate HTTP/1.1" 200')
    _, metrics = engine.http("GET", "/metrics", key=engine.key)
    counts = [line.rsplit(" ", 1)[1] for line in str(metrics).splitlines() if line.startswith(SUCCESSES)]
    assert counts, f"/metrics of vLLM has no {SUCCESSES}"
    return round(sum(map(float, counts)))


SUCCESSES = "vllm:request_success_total"
