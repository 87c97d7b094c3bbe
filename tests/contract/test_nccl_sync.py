"""Whole syncs over NCCL (a fake one between threads, real bytes) into fake engines: vLLM with rltool's plugin and
without it, SGLang."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
import torch

from rltool.config.rollout import WeightsConfig
from rltool.engines.fleet.fleet import State
from rltool.weights.transports import nccl_sender
from tests.contract import sync_rig
from tests.contract.fakes import nccl as fake_nccl
from tests.contract.fakes.sglang import FakeSglang
from tests.contract.fakes.vllm import FakeVllm
from tests.contract.sync_rig import KEY, Rig, version
from tests.ranks import SenderRanks

DEADLINE = 3.0
STEPS = ("/rltool/update_weights", "/rltool/finish_weight_update")


class Ranks(SenderRanks):
    """breaks_at: the tensor at which the stream of the next version does; news: seconds until the rollout manager hears
    of it."""

    breaks_at: int | None = None
    news = 0.0

    def weights(self, step):
        return {f"t{number}": torch.full((4,), float(10 * step + number)) for number in range(5)}

    def stream(self, step):
        for number, pair in enumerate(super().stream(step)):
            if number == self.breaks_at:
                time.sleep(0.1)  # by now the engines wait for it
                raise OSError("planned")
            yield pair

    async def send(self, version, urls):
        try:
            return await super().send(version, urls)
        except OSError:
            await asyncio.sleep(self.news)
            raise

    async def logprobs(self, batch):
        return batch.rollout_logprobs.clone()


@pytest.fixture
def syncing(monkeypatch, two, tmp_path) -> Callable[[Callable[[Rig[Ranks]], Awaitable[None]]], None]:
    fake_nccl.installed(monkeypatch)
    monkeypatch.setattr(nccl_sender, "COMPLETE_SECONDS", 0.5)
    for engine in two:
        engine.device = "cuda"

    def syncing(scenario: Callable[[Rig[Ranks]], Awaitable[None]], *, engines=two, **of_weights) -> None:
        async def run() -> None:
            config = WeightsConfig(**{"bucket_bytes": 15, "transport": "nccl"} | of_weights)
            ranks = partial(Ranks, deadline=DEADLINE)
            async with sync_rig.rig(engines, ranks, config, tmp_path, deadline=DEADLINE, trainer_device="cuda") as r:
                await scenario(r)

        asyncio.run(run())

    return syncing


@pytest.fixture
def unequal(stack) -> dict[str, Any]:
    """A fleet of one engine of each kind, of 3, 1 and 2 workers."""
    plugin, stock = FakeVllm(key=KEY), FakeVllm(key=KEY, plugin=False)
    plugin.world_size = 3
    for engine in (plugin, stock):
        engine.device = "cuda"
        engine.forget()
    engines = {"plugin": plugin, "stock": stock, "sglang": FakeSglang(tp=2)}
    for engine in engines.values():
        stack.enter_context(engine)
    return engines


def joined(engine) -> int:
    """How often it was asked into a transfer group."""
    if isinstance(engine, FakeSglang):
        return engine.seen["/init_weights_update_group"]
    return engine.paths().count("/init_weight_transfer_engine")


def has_version(engine) -> str:
    return engine.weight_version if isinstance(engine, FakeSglang) else engine.version


def assert_has(engine, ranks, step):
    wanted = ranks.weights(step)
    assert has_version(engine) == str(version(step)) and not engine.batch.paused
    if isinstance(engine, FakeSglang):
        assert engine.weights == {name: tensor.numpy().tobytes() for name, tensor in wanted.items()}
    else:
        assert engine.tensors.keys() == wanted.keys()
        assert all(torch.equal(engine.tensors[name], tensor) for name, tensor in wanted.items())


def test_two_requests_are_the_pause_and_the_update(two, syncing):
    async def scenario(r):
        for step in range(3):
            report = await r.sync.sync(version(step))
            assert report.failed == {}
            for engine in two:
                assert_has(engine, r.ranks, step)
        for engine in two:
            asked = [path for path in engine.paths() if path in (*STEPS, "/pause", "/start_weight_update", "/resume")]
            assert asked[-4:] == [*STEPS] * 2 and not engine.paused

    syncing(scenario)


@pytest.mark.parametrize(
    ("mode", "pause", "resume"),
    [("keep", ("/sleep", {"level": "0", "mode": "keep"}), ("/wake_up", {"tags": "scheduling"})),
     ("abort", ("/pause", {"mode": "abort"}), ("/resume", {}))],
)  # fmt: skip
def test_a_stock_server_that_keeps_its_requests_is_paused_by_its_sleep_of_level_0(
    fake_stock_vllm, syncing, mode, pause, resume
):
    fake_stock_vllm.device = "cuda"
    fake_stock_vllm.forget()

    async def scenario(r):
        for step in range(2):
            report = await r.sync.sync(version(step))
            assert report.failed == {}
            assert_has(fake_stock_vllm, r.ranks, step)
        asked = [(request.path, request.query) for request in fake_stock_vllm.requests if request.method == "POST"]
        first = asked.index(("/update_weights", {})) - 2
        assert asked[first : first + 7] == [
            pause, ("/start_weight_update", {}), ("/update_weights", {}), ("/finish_weight_update", {}),
            ("/reset_prefix_cache", {"reset_running_requests": "true", "reset_external": "true"}),
            ("/reset_encoder_cache", {}), resume,
        ]  # fmt: skip

    syncing(scenario, engines=(fake_stock_vllm,), pause_mode=mode)


@pytest.mark.parametrize("breaks_at", [0, 2])
@pytest.mark.parametrize("news", [0.0, 0.3], ids=["heard of at once", "heard of later"])
def test_what_the_trainer_gave_up_half_way_never_becomes_a_version(two, unequal, syncing, breaks_at, news):
    """The engines may get all broadcasts that they wait for, with other bytes, and answer that all is well: then they
    are asked for more until the rollout manager has heard of it, and wait for what never comes.

    SGLang makes its communicator in the first broadcast, so it is a connection's first sync that breaks off too.
    """
    engines = (two[0], *unequal.values())

    async def scenario(r):
        r.ranks.breaks_at, r.ranks.news = breaks_at, news
        with pytest.raises(OSError, match="planned"):
            await r.sync.sync(version(0))
        r.ranks.breaks_at = None
        assert (await r.sync.sync(version(1))).failed == {}
        updates = [engine.paths().count(STEPS[0]) for engine in (two[0], unequal["plugin"])]

        r.ranks.breaks_at = breaks_at
        with pytest.raises(OSError, match="planned"):
            await r.sync.sync(version(2))
        assert [engine.paths().count(STEPS[0]) for engine in (two[0], unequal["plugin"])] == [n + 1 for n in updates]
        for engine in engines:
            assert has_version(engine) in (str(version(1)), "incomplete") and not engine.batch.paused
            assert r.fleet.member(engine.url).state is State.STALE
        r.ranks.breaks_at = None
        assert (await r.sync.sync(version(3))).failed == {}
        for engine in engines:
            assert_has(engine, r.ranks, 3)

    syncing(scenario, engines=engines)


def test_a_fleet_of_every_kind_and_size_is_synced_from_one_gather(unequal, syncing):
    async def scenario(r):
        gathers, stream = [], r.ranks.stream
        r.ranks.stream = lambda step: gathers.append(step) or stream(step)
        for step in range(1, 4):
            report = await r.sync.sync(version(step))
            assert set(report.updated) == {engine.url for engine in unequal.values()} and report.failed == {}
            assert gathers.count(step) == 1
            for engine in unequal.values():
                assert_has(engine, r.ranks, step)
        assert [joined(engine) for engine in unequal.values()] == [1, 1, 1]

    syncing(scenario, engines=tuple(unequal.values()))


def answers_an_error(engine) -> None: ...


def drops_its_connections(engine) -> None:
    engine.drop_connections()


def dies(engine) -> None:
    killer = threading.Thread(target=engine.die)  # which waits for the thread that this is called in
    killer.start()
    killer.join(0.3)


def start_again(engine) -> None:
    engine.die()
    if isinstance(engine, FakeSglang):
        engine.boot, engine.weights, engine.weight_version = uuid.uuid4().hex, {}, "default"
        engine.__enter__()
    else:
        engine.forget()
        engine.start()


@pytest.mark.parametrize("kind", ["plugin", "stock", "sglang"])
@pytest.mark.parametrize("fails", [answers_an_error, drops_its_connections, dies])
def test_an_engine_that_fails_between_two_broadcasts_fails_alone(unequal, syncing, kind, fails):
    sick = unequal[kind]
    healthy = [engine for engine in unequal.values() if engine is not sick]

    async def scenario(r):
        await r.sync.sync(version(0))
        taken = []

        def after_two() -> None:
            taken.append(None)
            if len(taken) == 3:
                fails(sick)
                raise RuntimeError("planned")

        sick.workers.before_each = after_two
        report = await r.sync.sync(version(1))
        assert report.failed.keys() == {sick.url} and set(report.updated) == {engine.url for engine in healthy}
        assert len(taken) == 3 and has_version(sick) != str(version(1))
        for engine in healthy:
            assert_has(engine, r.ranks, 1)
        assert set(r.fleet.serving()) == set(report.updated)
        if fails is dies:
            start_again(sick)
            await r.probe(sick)
        assert (await r.sync.sync(version(2))).failed == {}
        for engine in unequal.values():
            assert_has(engine, r.ranks, 2)
        assert [joined(engine) for engine in healthy] == [1, 1]

    syncing(scenario, engines=tuple(unequal.values()))


@pytest.mark.parametrize("kind", ["plugin", "stock", "sglang"])
def test_an_engine_joins_late_is_started_again_and_leaves_beside_others(unequal, syncing, kind):
    comes = unequal[kind]
    stay = [engine for engine in unequal.values() if engine is not comes]

    async def scenario(r):
        await r.sync.sync(version(0))
        await r.add(comes)
        assert (await r.sync.sync(version(1))).failed == {}
        assert joined(comes) == 1

        start_again(comes)
        await r.probe(comes)
        assert r.fleet.member(comes.url).state is State.STALE
        assert (await r.sync.sync(version(2))).failed == {}
        for engine in (comes, *stay):
            assert_has(engine, r.ranks, 2)

        workers = comes.workers
        r.fleet.drain(comes.url, "it was told to")
        await r.sync.leave_engine(comes.url)
        r.fleet.remove(comes.url, "it was told to")
        assert comes.workers is None and not any(rank.alive for rank in workers.ranks)
        assert set((await r.sync.sync(version(3))).updated) == {engine.url for engine in stay}
        for engine in stay:
            assert_has(engine, r.ranks, 3)
        assert_has(comes, r.ranks, 2)
        assert [joined(engine) for engine in stay] == [1, 1], "nobody else's group was touched"

    syncing(scenario, engines=tuple(stay))
