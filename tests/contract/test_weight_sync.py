"""The whole sync, trainer side and control side, against fake engines that receive real bytes over real gloo groups."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rltool.weights.control import WeightControl

from rltool.config.train import WeightsConfig
from rltool.engines.client import EngineClient
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet import Fleet, State
from rltool.engines.weight_version import WeightVersion
from rltool.engines.wire import meta_of
from rltool.weights.sender import WeightSender, write_to_disk
from rltool.weights.sync import WeightSync, WeightSyncFailed
from tests.contract.fakes.sglang import EXPECTED_KEY as KEY
from tests.contract.fakes.sglang import FakeSglang
from tests.contract.fakes.vllm import FakeVllm

TENSORS = {"a.weight": torch.arange(6.0).reshape(2, 3), "b.weight": torch.arange(5, dtype=torch.bfloat16), "c.bias": torch.full((7,), 0.5)}
FIRST = WeightVersion("0" * 32, 1, 1)
TIMEOUT = 3.0


class Control:
    """WeightControl on a loop in a thread: what the rollout manager's actor is in production."""

    def __init__(self, control: WeightControl, loop: asyncio.AbstractEventLoop, pool: ThreadPoolExecutor) -> None:
        self.control, self._loop, self._pool = control, loop, pool

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.control, name)

        def call(*args: Any) -> Any:
            if asyncio.iscoroutinefunction(method):
                return asyncio.run_coroutine_threadsafe(method(*args), self._loop)
            return self._pool.submit(method, *args)

        return call


class Trainer:
    """One rank."""

    def __init__(self, config: WeightsConfig, pool: ThreadPoolExecutor, model_files: Path) -> None:
        self.sender, self._pool, self._model_files = WeightSender(config, timeout=TIMEOUT), pool, model_files
        self.tensors = dict(TENSORS)

    def stream(self):
        return ((meta_of(name, tensor), tensor) for name, tensor in self.tensors.items())

    def weight_metadata(self):
        return [meta_of(name, tensor) for name, tensor in self.tensors.items()]

    def host(self, targets, group):
        return self.sender.host(targets, group)

    def join(self):
        return self._pool.submit(self.sender.join)

    def send(self, buckets, skip):
        return self._pool.submit(lambda: self.sender.send(self.stream(), buckets, skip))

    def write(self, buckets, directory):
        return self._pool.submit(lambda: write_to_disk(self.stream(), buckets, directory, self._model_files))


class Rig:
    """Fake engines, both handles and a WeightSync over them."""

    def __init__(self, stack: ExitStack, engines: list, tmp_path: Path, medium: str = "gloo") -> None:
        self.engines = engines
        key_file = tmp_path / "key"
        key_file.write_text(KEY)
        (tmp_path / "config.json").write_text("{}")
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        pool = stack.enter_context(ThreadPoolExecutor(8))

        def on_loop(coroutine):
            return asyncio.run_coroutine_threadsafe(coroutine, loop).result(30)

        stack.callback(lambda: (loop.call_soon_threadsafe(loop.stop), thread.join(), loop.close()))
        client = on_loop(EngineClient().__aenter__())
        stack.callback(lambda: on_loop(client.__aexit__(None, None, None)))
        config = WeightsConfig()
        kinds = {FakeVllm: "vllm", FakeSglang: "sglang"}
        endpoints = [EngineEndpoint(url=e.url, dialect=kinds[type(e)], key_file=key_file, plugin=True) for e in engines]
        infos = {e.url: on_loop(client.probe(e)) for e in endpoints}
        self.fleet = Fleet()
        self.control = Control(WeightControl(endpoints, infos, client, self.fleet, config, timeout=TIMEOUT), loop, pool)
        self.trainer = Trainer(config, pool, tmp_path)
        stack.callback(self.trainer.sender.close)
        self.sync = WeightSync(self.control, self.trainer, medium=medium, limit_bytes=24, timeout=TIMEOUT, disk_root=tmp_path / "weights")

    def states(self) -> list[State]:
        return [self.fleet.member(engine.url).state for engine in self.engines]


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def rig(stack, tmp_path):
    engines = [stack.enter_context(FakeVllm(key=KEY)) for _ in range(2)]
    return Rig(stack, engines, tmp_path)


def assert_received(engine, tensors=TENSORS) -> None:
    assert engine.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(engine.tensors[name], tensor), name


def test_every_engine_gets_every_byte_and_the_version_and_serves(rig):
    report = rig.sync.sync(str(FIRST))
    for engine in rig.engines:
        assert_received(engine)
        assert engine.version == str(FIRST) and not engine.paused
    assert rig.states() == [State.READY, State.READY]
    assert (report.bytes, report.engines_ok, report.engines_total, report.rebuilt) == (24 + 10 + 28, 2, 2, True)
    assert set(report.phases) == {"connect", "pause", "transfer", "finish", "resume"}


def test_the_second_sync_uses_the_same_group_and_brings_the_new_values(rig):
    rig.sync.sync(str(FIRST))
    rig.trainer.tensors = {name: tensor + 1 for name, tensor in TENSORS.items()}
    report = rig.sync.sync(str(FIRST.next()))
    assert not report.rebuilt
    for engine in rig.engines:
        assert_received(engine, rig.trainer.tensors)
        assert engine.paths().count("/init_weight_transfer_engine") == 1


def test_disk_brings_the_same(stack, tmp_path):
    rig = Rig(stack, [stack.enter_context(FakeVllm(key=KEY))], tmp_path, medium="disk")
    rig.sync.sync(str(FIRST))
    assert_received(rig.engines[0])
    assert (tmp_path / "weights" / str(FIRST).replace(":", "-") / "model.safetensors.index.json").exists()


@pytest.mark.parametrize("medium", ["gloo", "disk"])
def test_a_fleet_of_both_dialects_is_synced_from_one_gather(stack, tmp_path, medium):
    engines = [stack.enter_context(FakeVllm(key=KEY)), stack.enter_context(FakeSglang())]
    rig = Rig(stack, engines, tmp_path, medium=medium)
    rig.sync.sync(str(FIRST))
    rig.sync.sync(str(FIRST.next()))
    assert [engines[0].version, engines[1].weight_version] == [str(FIRST.next())] * 2
    assert rig.states() == [State.READY, State.READY]


@pytest.mark.parametrize("route", ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update"])
@pytest.mark.parametrize("status", [404, 500])
def test_a_failed_step_names_the_engine_resumes_all_and_the_next_sync_repairs(rig, route, status):
    rig.sync.sync(str(FIRST))
    sick, healthy = rig.engines
    sick.fail(route, status, times=1)
    with pytest.raises(WeightSyncFailed, match=sick.url.replace(".", r"\.")) as error:
        rig.sync.sync(str(FIRST.next()))
    assert healthy.url not in str(error.value) and str(status) in str(error.value)
    assert not sick.paused and not healthy.paused
    assert sick.version != str(FIRST.next()), "a version is given only to weights that arrived"
    assert rig.fleet.member(sick.url).state is State.STALE, "it must not serve"
    assert rig.fleet.serving() == (healthy.url,)

    report = rig.sync.sync(str(FIRST.next().next()))
    assert report.rebuilt and rig.states() == [State.READY, State.READY]
    assert_received(sick)


def test_an_engine_that_hangs_is_given_up_at_the_deadline_and_the_others_go_on(rig):
    rig.sync.sync(str(FIRST))
    sick, healthy = rig.engines
    sick.hang("/update_weights")
    with pytest.raises(WeightSyncFailed, match="update_weights"):
        rig.sync.sync(str(FIRST.next()))
    assert healthy.version == str(FIRST.next()) and not healthy.paused
    assert rig.fleet.serving() == (healthy.url,)
    sick.heal()
    rig.sync.sync(str(FIRST.next().next()))
    assert rig.states() == [State.READY, State.READY]


def test_an_engine_that_only_the_trainer_saw_failing_is_not_given_the_version(rig):
    rig.sync.sync(str(FIRST))
    sick, healthy = rig.engines
    plain = rig.trainer.sender.send

    def send(stream, buckets, skip):
        report = plain(stream, buckets, skip)
        return replace(report, failures={sick.url: "sending weights: connection lost at the last byte"})

    rig.trainer.sender.send = send
    with pytest.raises(WeightSyncFailed, match="connection lost"):
        rig.sync.sync(str(FIRST.next()))
    assert sick.version != str(FIRST.next()) and rig.fleet.member(sick.url).state is State.STALE
    assert healthy.version == str(FIRST.next()) and rig.fleet.serving() == (healthy.url,)


def test_an_engine_that_refuses_the_group_is_named_and_nobody_is_paused(rig):
    sick = rig.engines[0]
    sick.fail("/init_weight_transfer_engine", 500)
    with pytest.raises(WeightSyncFailed, match="init_weight_transfer_engine"):
        rig.sync.sync(str(FIRST))
    assert all("/pause" not in engine.paths() for engine in rig.engines)


def test_what_a_dead_trainer_left_is_cleared(rig):
    engine = rig.engines[0]
    asyncio.run(_pause(engine))
    assert engine.paused
    assert rig.control.clear_leftovers().result(10) == {}
    assert not engine.paused
    assert "/shutdown_weight_transfer_engine" in engine.paths()


async def _pause(engine) -> None:
    from rltool.engines.types import HttpRequest

    async with EngineClient() as client:
        await client.request(engine.url, HttpRequest("POST", "/pause", query={"mode": "keep"}), key=KEY, timeout=5, retry=False)
