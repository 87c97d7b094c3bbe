"""A transport per engine in a real run: one vLLM takes its weights over gloo, the other one patches from a store."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from rltool.engines.client import EngineClient
from rltool.engines.dialects.checksums import Checksums, compare
from rltool.engines.endpoints import Endpoints, ModelEndpoints
from rltool.engines.types import Completion
from rltool.processes.run_directory import open_run
from tests.e2e.engines import RunningEngine, serving_vllm
from tests.e2e.job import Job, write_job
from tests.e2e.test_mixed_fleet import requests_answered
from tests.e2e.weights import mean_difference, new_request

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]

EQUAL = 1e-4
"""Mean absolute difference of fp32 log-probabilities, as in test_mixed_fleet."""
SECONDS = 60.0
STEPS = 4


@pytest.fixture
def near(vllm_engine_tied: RunningEngine) -> RunningEngine:
    return vllm_engine_tied


@pytest.fixture
def far(near: RunningEngine, tiny_tied_dir: Path, tmp_path: Path) -> Iterator[RunningEngine]:
    (tmp_path / "far").mkdir()
    with serving_vllm(tiny_tied_dir, tmp_path / "far", key=near.key) as engine:
        yield engine


@pytest.fixture
def job(tmp_path: Path, tiny_tied_dir: Path, near: RunningEngine, far: RunningEngine) -> Job:
    """Its second section is for the far engine, by its address, and the first for a group that is not there."""
    endpoints = Endpoints(models={"policy": ModelEndpoints(engines=(near.endpoint, far.endpoint))})
    run = open_run("engines", create=True, root=tmp_path / "runs")
    endpoints.save(run.endpoints_file)
    job = write_job(tmp_path, tiny_tied_dir, f"@{run.endpoints_file}")
    with (tmp_path / "run.toml").open("a") as file:
        file.write(f"""
[weights]
store = "{tmp_path}/store"
anchor_every = 2
bucket_bytes = 200_000
[[weights.engines]]
group = "spare"
transport = "disk"
[[weights.engines]]
match = "{far.url.removeprefix("http://")}"
transport = "delta"
""")
    return job


def test_one_run_over_gloo_and_through_a_store(job, near, far):
    said = job("train", "routes", "--dry-run")
    assert f"weights over gloo: {near.url}; delta: {far.url}" in said
    assert '[[weights.engines]] with group = "spare" decides for none' in said

    before = [requests_answered(engine) for engine in (near, far)]
    said = job("train", "routes", sets=["eval.sets={}", f"steps={STEPS}", "checkpoint.save_hf_at_end=true"])
    assert said.count("decides for none") == 1 and f"delta: {far.url}" in said
    steps = job.steps("routes")
    assert [record["step"] for record in steps] == list(range(STEPS))
    assert all(0 < record["train/logprob_abs_diff_mean"] < EQUAL for record in steps)
    assert all(record["rollout/engines_serving"] == 2 for record in steps)
    assert all(record["weights/failed_engines"] == 0 for record in steps)
    answered = [requests_answered(engine) - b for engine, b in zip((near, far), before, strict=True)]
    assert all(number > 8 for number in answered)

    written = {path.name: kinds(path) for path in (job.root / "store").iterdir() if path.is_dir()}
    by_step = {int(re.sub(r".*-", "", name)): found for name, found in written.items()}
    assert by_step[STEPS] == {"model", "patch"} and by_step[STEPS - 1] == {"patch"}

    model = AutoModelForCausalLM.from_pretrained(job.runs / "routes" / "hf" / f"step_{STEPS}").eval()
    for engine in (near, far):
        sample = asyncio.run(sampled(engine))
        assert {span.version for span in sample.versions} == {steps[-1]["weight_version"]}
        assert mean_difference(model, sample) < EQUAL
    first, second = (asyncio.run(checksums(engine)) for engine in (near, far))
    compared = compare(first, second)
    assert not compared.differing and compared.equal > 5


def kinds(version: Path) -> set[str]:
    return {path.name.partition("-")[0] for path in version.glob("*.safetensors")}


async def sampled(engine: RunningEngine) -> Completion:
    async with EngineClient() as client:
        [sample] = await client.generate(engine.endpoint, new_request(seed=None), timeout=SECONDS)
        return sample


async def checksums(engine: RunningEngine) -> Checksums:
    async with EngineClient() as client:
        found = await client.checksums(engine.endpoint, timeout=SECONDS)
    assert found
    return found
