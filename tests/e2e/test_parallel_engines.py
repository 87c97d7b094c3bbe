"""Weights into engines of several workers, on the CPU: tensor-parallel ones of both kinds, and a data-parallel vLLM.

Values are the proof: HF's forward pass scores what the engine sampled, after each of several syncs.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rltool.config.rollout import WeightsConfig
from rltool.engines.client import EngineClient
from rltool.engines.dialects.table import dialect
from rltool.engines.fleet.engine_set import EngineSet
from rltool.engines.fleet.fleet import Fleet
from rltool.engines.types import Completion
from rltool.engines.weight_version import WeightVersion
from rltool.weights.connections import Trainer
from rltool.weights.sync import SyncDeadlines, WeightSync
from rltool.weights.transport import Backend
from rltool.weights.verify.values import ValueCheck
from tests.e2e.engines import RunningEngine, serving_sglang, serving_vllm
from tests.e2e.hf_ranks import HfRanks
from tests.e2e.weights import mean_difference, new_request, perturbed_model
from tests.tiny_models import VOCAB_SIZE

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

RUN = "e" * 32
EQUAL = 1e-4
"""Mean absolute difference of fp32 log-probabilities; measured 1e-6 (vLLM) and 1e-5 (SGLang)."""
DIFFERENT = 0.05
SECONDS = 60.0
REQUESTS = 8
"""Enough for both replicas of a data-parallel server to get some."""


@pytest.fixture(scope="module", params=["vllm-tp2", "vllm-dp2", pytest.param("sglang-tp2", marks=pytest.mark.long)])
def engine(request, tiny_untied_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    """One server of two workers at a time."""
    directory = tmp_path_factory.mktemp(request.param)
    if request.param == "vllm-tp2":
        serving = serving_vllm(tiny_untied_dir, directory, tp=2)
    elif request.param == "vllm-dp2":
        serving = serving_vllm(tiny_untied_dir, directory, extra_args=("--data-parallel-size", "2"))
    else:
        serving = serving_sglang(tiny_untied_dir, directory, tp=2)
    with serving as running:
        yield running


@pytest.mark.parametrize("backend", ["gloo", pytest.param("disk", marks=pytest.mark.long)])
def test_every_worker_computes_with_the_trainers_weights(engine: RunningEngine, backend: Backend, tmp_path: Path):
    asyncio.run(asyncio.wait_for(sync_and_compare(engine, backend, tmp_path), 240))


@pytest.mark.long
@pytest.mark.parametrize("engine", ["vllm-tp2", "vllm-dp2"], indirect=True)
def test_a_request_that_every_worker_refuses_leaves_no_answers_behind(engine: RunningEngine, tmp_path: Path):
    """In vLLM's own way the first worker's error is raised, and the others' stay in their queues: each answer after
    that is the one before it."""

    def ask(path: str, body: dict | None = None) -> tuple[int, str]:
        status, reply = engine.http("POST", path, body, key=engine.key)
        return status, str(reply)

    nowhere = {"names": ["nobody"], "dtypes": ["float32"], "shapes": [[1]], "path": str(tmp_path / "nowhere")}
    for _ in range(2):
        assert ask("/init_weight_transfer_engine", {"init_info": {"transport": "disk"}})[0] == 200
        assert ask("/start_weight_update")[0] == 200
        status, reason = ask("/update_weights", {"update_info": nowhere})
        assert status == 500 and "No such file" in reason
        assert ask("/start_weight_update")[0] == 200
        assert ask("/shutdown_weight_transfer_engine")[0] == 200
    asyncio.run(asyncio.wait_for(sync_and_compare(engine, "disk", tmp_path), 240))


async def sync_and_compare(engine: RunningEngine, backend: Backend, directory: Path) -> None:
    """Two syncs over one connection, the second with requests in flight."""
    config, endpoint, fleet = WeightsConfig(bucket_bytes=200_000, transport=backend), engine.endpoint, Fleet()
    ranks = HfRanks(config, engine.launch.model, deadline=SECONDS)
    async with EngineClient() as client:
        info = await client.probe(endpoint)
        assert info.world_size == 2
        fleet.add_probed(endpoint, info)
        sync = WeightSync(
            EngineSet(fleet, client), Trainer(ranks, "cpu", directory / "weights", VOCAB_SIZE), config,
            ValueCheck(VOCAB_SIZE, 1.0, EQUAL, info.max_model_len), SyncDeadlines(SECONDS, SECONDS),
        )  # fmt: skip
        running: list[asyncio.Task[list[Completion]]] = []
        try:
            for step, seed in enumerate((41, 42)):
                old, ranks.model = ranks.model, perturbed_model(engine.launch.model, seed=seed)
                report = await sync.sync(WeightVersion(RUN, 0, step), check_all=True)
                assert report.updated == (endpoint.url,) and report.difference is not None
                assert report.difference < EQUAL
                requests = [new_request(seed=number) for number in range(REQUESTS)]
                before = by_replica(engine)
                answers = await asyncio.gather(*(client.generate(endpoint, one, timeout=SECONDS) for one in requests))
                assert len(by_replica(engine)) == len(before) and replicas_that_worked(before, engine) == len(before)
                for [sample] in answers:
                    assert mean_difference(ranks.model, sample) < EQUAL
                    assert old is None or mean_difference(old, sample) > DIFFERENT
                    assert [span.version for span in sample.versions] == [str(WeightVersion(RUN, 0, step))]
                running.append(
                    asyncio.create_task(client.generate(endpoint, new_request(n=4, max_tokens=200), timeout=SECONDS))
                )
            await asyncio.gather(*running)
            assert await sync.leave() == {}
        finally:
            ranks.close()
            await client.run(endpoint, dialect(info.dialect).resume(), timeout=SECONDS)


def by_replica(engine: RunningEngine) -> dict[str, float]:
    """Tokens generated so far by each data-parallel replica of a vLLM; of an SGLang one that stands still."""
    if engine.endpoint.dialect == "sglang":
        return {}
    _, metrics = engine.http("GET", "/metrics", key=engine.key)
    found = re.findall(r'^vllm:generation_tokens_total\{engine="(\d+)".*\} (\S+)$', str(metrics), re.MULTILINE)
    assert found, "/metrics of vLLM no longer tells generated tokens by engine"
    return {replica: float(tokens) for replica, tokens in found}


def replicas_that_worked(before: dict[str, float], engine: RunningEngine) -> int:
    return sum(tokens > before[replica] for replica, tokens in by_replica(engine).items())
