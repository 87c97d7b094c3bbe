"""Sharded syncs: real Megatron ranks send what they hold to real vLLM workers, on the CPU over gloo and disk.

The proof is bits: the engine computes the same log-probabilities as after a broadcast from rank 0 of the same weights.
On a CPU vLLM keeps packed copies of its matrices, of which it has no digests, so that these alone would not do.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rltool.config.rollout import WeightsConfig
from rltool.engines.client import EngineClient
from rltool.engines.dialects.table import controls, inspects
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.types import HttpRequest
from tests.e2e.engines import RunningEngine, serving_vllm, wait_ready
from tests.e2e.megatron_models import make_trainer, save_hf
from tests.e2e.test_engine_faults import training  # noqa: F401  # a fixture
from tests.tiny_models import write_tiny_tokenizer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SECONDS = 60.0
BUCKET_BYTES = 100_000
PROMPT = [7, 3, 19, 40, 2, 2, 31, 5, 11, 23, 8, 40, 17, 6, 29, 1]
GROUP = "test-sharded"
BACKENDS = ["gloo-sharded", "disk-sharded"]
INSPECTS = inspects("vllm", plugin=True)


def ask(endpoint: EngineEndpoint, requests: list[HttpRequest]) -> list[Any]:
    async def run() -> list[Any]:
        async with EngineClient() as client:
            return await client.run(endpoint, requests, timeout=SECONDS)

    return asyncio.run(run())


def sync_case(
    place, endpoint: EngineEndpoint, workers: int, path: Path, directory: Path, layout: dict, factor: float,
    backend: str,
):  # fmt: skip
    """On each rank: the model of `path` with every parameter times `factor` into the engine. Returns the rank's report,
    and how many bytes of the model it holds."""
    import torch
    import torch.distributed as dist

    from rltool.megatron.model import global_names
    from rltool.weights.send.sender import Rank, WeightSender, one_meeting
    from rltool.weights.transport import Receiver, transport

    trainer = make_trainer(place, path, **layout)
    try:
        with torch.no_grad():
            for parameter in trainer.gpt.parameters():
                parameter.mul_(factor)
        sharded = backend.endswith("-sharded")
        sender = WeightSender(
            WeightsConfig(bucket_bytes=BUCKET_BYTES, sharded=sharded), trainer.export_plan, device=torch.device("cpu"),
            deadline=SECONDS, model_files=path, rank=Rank(place.rank, layout=trainer.coordinates.layout),
        )  # fmt: skip
        receiver = Receiver(endpoint.url, "vllm", backend, workers)
        meetings: list[Any] = [None] * place.world_size
        dist.all_gather_object(meetings, sender.host([receiver], GROUP, directory))
        meeting, control = one_meeting(meetings)[endpoint.url], transport("vllm", backend).control
        buckets, version = sender.plan.buckets(BUCKET_BYTES), f"{'a' * 32}:0:0"

        def update() -> None:
            announced = [request for request, _ in control.announce(buckets, meeting, version=version)]
            ask(endpoint, [*controls("vllm").pause("keep"), *control.begin(), *announced])

        with ThreadPoolExecutor(1) as beside:
            if place.rank == 0:
                init = control.init(meeting, rank_offset=1, timeout_seconds=SECONDS)
                joining = beside.submit(ask, endpoint, init)
            failures = sender.join()
            if place.rank == 0:
                joining.result()
            assert failures == {}
            if place.rank == 0 and not control.after_send:
                taking = beside.submit(update)
            stream = trainer.export_own(sender.part) if sharded else trainer.export_weights()
            report = sender.send(stream, version, [endpoint.url])
            if control.after_send:
                dist.barrier()
            if place.rank == 0:
                (beside.submit(update) if control.after_send else taking).result()
                ask(endpoint, [*control.finish(version), *controls("vllm").resume(), *control.leave(GROUP)])
        dist.barrier()
        sender.close()
        return report, sum(p.nbytes for p in global_names(trainer.gpt).values()), trainer.export_plan.bytes
    finally:
        trainer.close()


def scores(endpoint: EngineEndpoint) -> tuple[float, ...]:
    [reply] = ask(endpoint, [INSPECTS.score(PROMPT)])
    return INSPECTS.parse_score(PROMPT, reply)


def digests(endpoint: EngineEndpoint) -> dict[str, str]:
    [reply] = ask(endpoint, [INSPECTS.checksums()])
    found = INSPECTS.parse_checksums(reply)
    assert found
    return found


def compare(
    ranks, endpoint: EngineEndpoint, workers: int, path: Path, directory: Path, world_size: int, layout: dict,
    backend: str,
) -> None:  # fmt: skip
    def sync(factor: float, backend: str) -> list[Any]:
        return ranks.run(sync_case, world_size, endpoint, workers, path, directory, layout, factor, backend)

    first = scores(endpoint)
    reports = sync(1.25, backend)
    of_sharded = scores(endpoint), digests(endpoint)
    sync(0.75, "gloo")
    between = scores(endpoint)
    sync(1.25, "gloo")
    assert (scores(endpoint), digests(endpoint)) == of_sharded
    assert first != of_sharded[0] != between
    sync(0.75, backend)
    assert scores(endpoint) == between
    total = reports[0][2]
    for report, held, _ in reports:
        [sent] = report.sent_bytes
        # Norms and the like are needed by every worker. What a rank holds goes to each worker that stores it.
        assert 0 < sent <= total * (1.0 if world_size == 1 else 0.75) + 20_000 * workers, (sent, total)
        # Two buckets of its own part, the messages made of one, and a parameter that is split.
        assert report.memory.host <= held and report.memory.host < 4 * BUCKET_BYTES + 2 * largest(path)
    sent = sum(report.sent_bytes[0] for report, _, _ in reports)
    assert total <= sent <= total + (40_000 * (workers - 1) if backend == "gloo-sharded" else 0), (sent, total)


def largest(path: Path) -> int:
    from safetensors.torch import load_file

    return max(tensor.nbytes for tensor in load_file(path / "model.safetensors").values())


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_tensor_parallel_ranks_into_one_worker(ranks, vllm_engine_untied, backend, tmp_path):
    engine = vllm_engine_untied
    compare(ranks, engine.endpoint, 1, engine.launch.model, tmp_path, 2, {"tp": 2}, backend)


@pytest.fixture(scope="module")
def two_workers(tiny_untied_dir: Path, tmp_path_factory) -> Iterator[RunningEngine]:
    with serving_vllm(tiny_untied_dir, tmp_path_factory.mktemp("dense"), tp=2) as engine:
        yield engine


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("world_size", "layout"), [(1, {}), (2, {"pp": 2}), (2, {"tp": 2}), (2, {})], ids=["one", "pp2", "tp2", "dp2"]
)
def test_into_two_tensor_parallel_workers(ranks, two_workers, world_size, layout, backend, tmp_path):
    compare(ranks, two_workers.endpoint, 2, two_workers.launch.model, tmp_path, world_size, layout, backend)


@pytest.mark.long
def test_two_ranks_with_half_of_the_experts_each_into_two_workers(ranks, tmp_path):
    path = save_hf(tmp_path / "model", "qwen3_moe", tied=False)
    write_tiny_tokenizer(path)
    with serving_vllm(path, tmp_path, tp=2) as engine:
        for backend in BACKENDS:
            compare(ranks, engine.endpoint, 2, path, tmp_path / backend, 2, {"ep": 2}, backend)


@pytest.mark.long
@pytest.mark.parametrize("transport", ["gloo", "disk"])
def test_a_run_sends_shards_and_an_engine_that_was_killed_gets_the_weights_by_them_again(training, transport):  # noqa: F811
    """The killed engine comes up with the model of step 0, of which the trainer's weights are far by then."""
    ranks_of_two = ("trainer.world_size=2", "trainer.tensor_parallel=2", "trainer.cpus_per_rank=0.5")
    over = f"weights.transport={transport}"
    training.begin("weights.sharded=true", over, "weights.bucket_bytes=100000", *ranks_of_two)
    training.until_steps(2)
    training.in_generation()
    training.victim.signal(signal.SIGKILL)
    training.victim.start_again()
    training.until_steps(1)
    training.assert_logged("ready -> suspect", "stale -> suspect")
    wait_ready(training.victim)
    training.assert_logged("suspect -> stale", "dead -> stale")
    training.assert_back_after_a_sync()
    training.finish()
