"""Weights to engines on the trainer's GPUs: two ranks and the workers of real processes, which share memory of the host
in place of a GPU's. Sender, receiver's channel, requests and SGLang's payload are the real ones. And sharded weights
over every transport."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rltool.config.parallel import ParallelLayout
from rltool.config.rollout import WeightsConfig
from rltool.engines.adapters import adapter_name
from rltool.engines.fleet.fleet import State
from rltool.engines.transfer import ipc
from rltool.megatron.export_plan import ExportPlan
from rltool.models.base import Parameter
from rltool.weights.adapter_sync import AdapterSync
from rltool.weights.memory import Memory
from rltool.weights.sleep import SharedGpus
from rltool.weights.sync import SyncDeadlines
from rltool.weights.sync_report import WeightSyncFailed
from rltool.weights.verify.values import ValueCheck
from tests.contract import sync_rig
from tests.contract.fakes import ipc as fake_ipc
from tests.contract.fakes import nccl as fake_nccl
from tests.contract.fakes.sglang import EXPECTED_KEY, VOCAB_SIZE, FakeSglang
from tests.contract.fakes.vllm import FakeVllm
from tests.contract.sync_rig import Rig, version
from tests.ranks import RanksOnGpus, plan_of

GPUS = ("gpu-a", "gpu-b")
DEADLINE = 10.0
CONFIG = WeightsConfig(bucket_bytes=40)


class Ranks(RanksOnGpus):
    def weights(self, step):
        changing = {"a": torch.full((2, 9), float(step)), "c": torch.ones(7) + step, "d": torch.zeros(30) - step}
        return changing | {"b": torch.arange(5, dtype=torch.bfloat16)}

    async def logprobs(self, batch):
        return batch.rollout_logprobs.clone()


@pytest.fixture(scope="module")
def workers() -> Iterator[list[fake_ipc.Worker]]:
    """One on each GPU."""
    process = fake_ipc.WorkerProcess()
    started = [fake_ipc.Worker(process, gpu) for gpu in GPUS]
    try:
        started[0].leave()  # once it answers: no deadline of a sync counts its imports
        yield started
    finally:
        process.kill()


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch) -> Iterator[None]:
    fake_ipc.installed(monkeypatch)
    yield
    assert fake_ipc.SharedExport.live == set(), "every buffer is freed when its engine is left"


@pytest.fixture
def vllm(stack) -> Callable[..., FakeVllm]:
    def start(*workers: fake_ipc.Worker) -> FakeVllm:
        engine = stack.enter_context(FakeVllm(key=EXPECTED_KEY))
        engine.gpu_workers, engine.world_size, engine.device = list(workers), len(workers), "cuda"
        return engine

    return start


def syncing(
    engines: list[Any], directory: Path, scenario: Callable[[Rig[Ranks]], Awaitable[None]], *, deadline=DEADLINE,
    gpus: tuple[str, ...] = GPUS,
) -> None:  # fmt: skip
    async def run() -> None:
        ranks = partial(Ranks, gpus=gpus, deadline=deadline)
        options: dict[str, Any] = {"deadline": deadline, "trainer_device": "cuda", "shares_gpus": True}
        async with sync_rig.rig(engines, ranks, CONFIG, directory, **options) as r:
            await scenario(r)

    asyncio.run(run())


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_has(engine, ranks, step):
    wanted = {name: raw(tensor) for name, tensor in ranks.weights(step).items()}
    if isinstance(engine, FakeSglang):
        assert engine.weights == wanted and engine.weight_version == str(version(step))
    else:
        assert {name: raw(tensor) for name, tensor in engine.tensors.items()} == wanted
        assert engine.version == str(version(step))


def test_each_worker_takes_the_weights_out_of_memory_of_its_own_gpu(vllm, workers, tmp_path):
    engine = vllm(*workers)

    async def scenario(r):
        for step in (0, 1, 1, 2):  # the same version once more, over the same connection
            report = await r.sync.sync(version(step))
            assert report.failed == {}
            # Of one rank, the buckets a; c and d; b: two buffers, and one as large as the largest for the engine.
            assert report.memory == Memory(host=72 + 148 + 148)
            assert_has(engine, r.ranks, step)
        assert engine.paths().count("/init_weight_transfer_engine") == 1
        assert set(r.ranks.gathers) == {(0, True), (1, True)}
        assert r.ranks.held[-2:] == [("onload", "parameters"), ("offload", "parameters")]

    syncing([engine], tmp_path, scenario)


def test_two_engines_of_one_gpu_each_have_a_rank_of_their_own(vllm, workers, tmp_path):
    engines = [vllm(workers[0]), vllm(workers[1])]

    async def scenario(r):
        await r.sync.sync(version(3))
        for engine in engines:
            assert_has(engine, r.ranks, 3)
        assert [set(meeting) for meeting in r.ranks.meetings] == [{engines[0].url}, {engines[1].url}]

    syncing(engines, tmp_path, scenario)


@pytest.mark.parametrize("release", ["0.5.23", "0.5.17"])
def test_sglang_gets_a_payload_for_each_of_its_ranks(release, tmp_path):
    with FakeSglang(gpus=("gpu-b", "gpu-a"), tp=2, version=release) as engine:

        async def scenario(r):
            for step in (0, 1):
                assert (await r.sync.sync(version(step))).failed == {}
                assert_has(engine, r.ranks, step)

        syncing([engine], tmp_path, scenario)


def test_an_engine_that_sleeps_gets_its_weights_before_its_cache(vllm, workers, tmp_path):
    engine = vllm(workers[1])

    async def scenario(r):
        await r.sync.sync(version(0))
        r.fleet.fall_asleep(engine.url)
        for request in r.sync.gpus.sleep_of(r.fleet.member(engine.url).info).sleep():
            await r.client.run(r.endpoints[engine.url], [request], timeout=DEADLINE)
        assert engine.tensors == {} and engine.asleep
        await r.sync.sync(version(1))
        assert_has(engine, r.ranks, 1)
        assert not engine.asleep and not engine.paused and r.ended == []
        woken = [path for path in engine.paths() if path in ("/wake_up", "/update_weights", "/resume")]
        assert woken[-6:] == ["/wake_up", *["/update_weights"] * 3, "/wake_up", "/resume"]

    syncing([engine], tmp_path, scenario)


@pytest.mark.parametrize(
    ("gpus", "message"),
    [
        (("gpu-a", "elsewhere"), "no trainer rank shares memory on its GPU gpu-b"),
        (("elsewhere", "gone"), "no rank of the trainer is on one of its GPUs"),
    ],
)
def test_an_engine_on_a_gpu_without_a_rank_is_refused(gpus, message, vllm, workers, tmp_path):
    engine = vllm(*workers)

    async def scenario(r):
        with pytest.raises(WeightSyncFailed, match=message):
            await r.sync.sync(version(0))
        assert "/init_weight_transfer_engine" not in engine.paths()

    syncing([engine], tmp_path, scenario, gpus=gpus)


def test_an_engine_that_takes_nothing_holds_up_neither_the_ranks_nor_the_others(vllm, workers, tmp_path):
    engines = [vllm(workers[0]), vllm(workers[1])]

    async def scenario(r):
        await r.sync.sync(version(0))
        engines[0].fail("/update_weights", status=500, times=1)
        report = await r.sync.sync(version(1))
        assert set(report.failed) == {engines[0].url} and report.updated == (engines[1].url,)
        assert_has(engines[1], r.ranks, 1)
        assert r.states() == [State.STALE, State.READY]
        assert (await r.sync.sync(version(1), only={engines[0].url})).failed == {}
        assert_has(engines[0], r.ranks, 1)

    syncing(engines, tmp_path, scenario)


def test_an_engine_that_hangs_in_a_bucket_is_dropped_at_the_deadline(vllm, workers, tmp_path):
    engines = [vllm(workers[0]), vllm(workers[1])]

    async def scenario(r):
        await r.sync.sync(version(0))
        engines[0].hang("/update_weights")
        report = await r.sync.sync(version(1))
        assert set(report.failed) == {engines[0].url}
        assert_has(engines[1], r.ranks, 1)

    syncing(engines, tmp_path, scenario, deadline=1.0)


def test_a_rank_that_fails_is_a_failure_of_its_engine_alone(vllm, workers, tmp_path, monkeypatch):
    engines = [vllm(workers[0]), vllm(workers[1])]

    async def scenario(r):
        await r.sync.sync(version(0))
        broken = r.ranks.senders[1]._channels[engines[1].url].transport
        monkeypatch.setattr(broken, "send", lambda *_: (_ for _ in ()).throw(RuntimeError("CUDA error")))
        report = await r.sync.sync(version(1))
        assert "CUDA error" in report.failed[engines[1].url]
        assert_has(engines[0], r.ranks, 1)

    syncing(engines, tmp_path, scenario)


class Stages(Ranks):
    """Each holds its own tensors: two pipeline stages."""

    @cached_property
    def plan(self) -> ExportPlan:
        def of_stage(name: str, tensor: torch.Tensor) -> Parameter:
            return Parameter(name, ((name, tuple(tensor.shape)),), layer=int(name in "cd"))

        return replace(plan_of(self.weights(0), of_stage), num_layers=2)


@pytest.mark.parametrize(
    ("transport", "device"), [("ipc", "cuda"), ("nccl", "cuda"), ("gloo", "cpu"), ("disk", "cpu")]
)
def test_sharded_weights_come_from_each_rank_and_again_after_a_failure(transport, device, vllm, tmp_path, monkeypatch):
    """Two workers, which store everything; an update that fails is one engine's."""
    fake_nccl.installed(monkeypatch)
    monkeypatch.setattr(ipc, "gpu_uuid", lambda device: "gpu-0")
    engine, config = vllm(), WeightsConfig(bucket_bytes=40, sharded=True, transport=transport)
    engine.world_size, engine.device = 2, device
    layout = ParallelLayout(2, pp=2)

    async def run() -> None:
        options: dict[str, Any] = {"deadline": DEADLINE, "trainer_device": device, "shares_gpus": transport == "ipc"}
        ranks = partial(Stages, gpus=("gpu-0", "gpu-1"), deadline=DEADLINE, layout=layout)
        async with sync_rig.rig([engine], ranks, config, tmp_path, **options) as r:
            copies = 1 if transport == "disk" else 2
            for step in (0, 1, 1, 2):
                report = await r.sync.sync(version(step))
                assert report.failed == {}
                assert_has(engine, r.ranks, step)
                by_rank = {"a": 72, "b": 10}, {"c": 28, "d": 120}
                assert report.sent_bytes == tuple(copies * sum(held.values()) for held in by_rank)
                assert report.metrics()["weights/rank_bytes"] == copies * 148
            assert engine.paths().count("/init_weight_transfer_engine") == 1
            route = "/rltool/update_weights" if transport == "nccl" else "/update_weights"
            engine.fail(route, status=500, times=1)
            with pytest.raises(WeightSyncFailed):
                await r.sync.sync(version(3))
            assert (await r.sync.sync(version(3))).failed == {}
            assert_has(engine, r.ranks, 3)
            await r.sync.leave()

    asyncio.run(run())


class Adapters(Ranks):
    @cached_property
    def plan(self) -> ExportPlan:
        return replace(plan_of(self.weights(0)), peft={"r": 2, "lora_alpha": 4})


@pytest.mark.parametrize("turns", [True, False])
def test_adapters_lie_in_memory_all_at_once_and_engines_that_sleep_keep_their_weights(turns, vllm, workers, tmp_path):
    """Colocated engines, and, without turns, engines that stay awake beside the trainer (trainer.share_gpus)."""
    config = WeightsConfig(bucket_bytes=40, lora_sync="adapter", transport="auto" if turns else "ipc")
    engine = vllm(*workers)
    engine.lora_rank, engine.lora_slots = 8, 2

    async def run() -> None:
        options: dict[str, Any] = {"deadline": DEADLINE, "trainer_device": "cuda", "shares_gpus": turns}
        ranks = partial(Adapters, gpus=GPUS, deadline=DEADLINE)
        async with sync_rig.rig([engine], ranks, config, tmp_path, **options) as r:
            trainer = r.sync.trainer
            gpus = SharedGpus(trainer, r._end, updated=False) if turns else None
            sync = AdapterSync(
                r.set, trainer, config, ValueCheck(VOCAB_SIZE, 1.0, 1e-3, 256), SyncDeadlines(DEADLINE, DEADLINE),
                in_use=lambda _: False, gpus=gpus,
            )  # fmt: skip
            for step in range(3):
                if turns and step:
                    r.fleet.fall_asleep(engine.url)
                    asked = gpus.sleep_of(r.fleet.member(engine.url).info).sleep()
                    await r.client.run(r.endpoints[engine.url], asked, timeout=DEADLINE)
                    assert engine.asleep
                report = await sync.sync(version(step))
                assert report.failed == {} and r.states() == [State.READY] and not engine.asleep and not engine.paused
                held, wanted = engine.adapters[adapter_name(version(step))], r.ranks.weights(step)
                assert {n: raw(t) for n, t in held.items()} == {n: raw(t) for n, t in wanted.items()}
                assert report.memory.host >= 72 + 148 + 10, "the buffer has room for all of it"
                assert not turns or not step or report.wake > 0
            levels = [each.query["level"] for each in engine.requests if each.path == "/sleep"]
            assert levels == (["1", "1"] if turns else []) and r.ended == []
            asked = set(engine.paths())
            assert not asked & {"/update_weights", "/start_weight_update", "/rltool/update_weights", "/pause"}
            await sync.leave()

    asyncio.run(run())
