"""Evaluations beside training on real vLLMs: on the engine that rollouts use, and on one of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rltool.engines.endpoints import Endpoints, ModelEndpoints
from tests.e2e.engines import RunningEngine, serving_vllm
from tests.e2e.job import Job, write_job

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]

BESIDE = ["eval.blocking=false", "eval.every_steps=1", "eval.samples_per_prompt=64", "steps=6"]
"""512 answers are an evaluation, 32 a batch."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, tiny_untied_dir: Path, vllm_engine_untied: RunningEngine) -> Job:
    root = tmp_path_factory.mktemp("beside")
    Endpoints(models={"policy": ModelEndpoints(engines=(vllm_engine_untied.endpoint,))}).save(root / "endpoints.json")
    return write_job(root, tiny_untied_dir, f"@{root}/endpoints.json")


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory, tiny_untied_dir: Path) -> Iterator[RunningEngine]:
    with serving_vllm(tiny_untied_dir, tmp_path_factory.mktemp("held")) as engine:
        yield engine


def evaluations(job: Job, run: str) -> list[dict]:
    return [record for record in job.metrics(run) if "eval/heldout/accuracy" in record]


def test_it_stands_under_the_step_it_began_after_and_training_stays_exact(job):
    output = job("train", "shared", sets=BESIDE)
    steps, found = job.steps("shared"), evaluations(job, "shared")
    assert [record["step"] for record in steps] == list(range(6))
    assert all(record["train/logprob_abs_diff_mean"] < 1e-5 for record in steps)
    assert found[0]["step"] == -1 and found[-1]["step"] == 5 and "evaluation of step" in output
    for record in found:
        first, last = record["eval/version_min"], record["eval/version_max"]
        assert first == record["step"] + 1 <= last and record["weight_version"].endswith(f":{first:.0f}")
        assert record["eval/heldout/samples"] == 8 * 64
    skipped = [record["step"] for record in steps if "eval/skipped" in record]
    assert len(found) + len(skipped) == 7, "each one that was due was made or counted"


def test_an_engine_of_its_own_holds_the_weights_that_the_evaluation_began_with(job, held, tmp_path):
    Endpoints(models={"policy": ModelEndpoints(engines=(held.endpoint,))}).save(tmp_path / "held.json")
    output = job("train", "held", sets=[*BESIDE, f'eval.engines=["@{tmp_path}/held.json"]'])
    assert "engines for evaluation alone: 1 x vllm" in output
    found = evaluations(job, "held")
    assert found[0]["step"] == -1 and found[-1]["step"] == 5
    for record in found:
        assert record["eval/version_min"] == record["eval/version_max"] == record["step"] + 1
    assert all(record["train/logprob_abs_diff_mean"] < 1e-5 for record in job.steps("held"))
    _, info = held.http("GET", "/rltool/info", key=held.key)
    _, paused = held.http("GET", "/is_paused", key=held.key)
    assert info["weight_version"] == found[-1]["weight_version"] and not paused["is_paused"]
