"""engines.mode = "colocate" from the rollout manager's side: fake engines that lose their memory when they sleep,
ranks that write down what they hold, and who has the GPUs at each moment."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rltool.config.train import TrainConfig
from rltool.engines.client import EngineClient
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet.fleet import Fleet, FleetPolicy, State
from rltool.engines.weight_version import Lineage
from rltool.quickstart.tiny_model import make_tiny_model
from rltool.rollout.serving import restarts as engine_restarts
from rltool.rollout.serving.side_model import SideEngines
from rltool.training.manager import colocation
from rltool.training.manager.rollout_engines import Engines, Syncing
from rltool.training.manager.service import RolloutService
from tests.contract.fakes.sglang import EXPECTED_KEY as KEY
from tests.contract.fakes.sglang import VOCAB_SIZE, FakeSglang
from tests.contract.fakes.vllm import FakeVllm
from tests.ranks import SenderRanks

RUN = "d" * 32
LONG = 30.0


class Ranks(SenderRanks):
    """held: what they have on their devices. Whatever they do without what it takes fails, and so does taking it while
    an engine has the GPUs."""

    def __init__(self, config: TrainConfig, directory: Path, engines: list[Any]) -> None:
        super().__init__(config.weights, directory, deadline=LONG)
        self.engines, self.held, self.log = engines, {"parameters", "gradients", "optimizer"}, []

    def weights(self, step):
        return {"a": torch.full((4,), float(step))}

    async def send(self, version, urls):
        assert self.held == {"parameters"}
        self.log.append("send")
        return await super().send(version, urls)

    async def logprobs(self, batch):
        assert self.held == {"parameters"}
        return batch.rollout_logprobs.clone()

    async def weight_checksums(self, layout):
        assert self.held == {"parameters"}
        return await super().weight_checksums(layout)

    async def offload(self, parts):
        self.held -= set(parts)

    async def onload(self, parts):
        if "optimizer" in parts:
            assert not any(awake(engine) for engine in self.engines), "two on one GPU"
            self.log.append("train")
        self.held |= set(parts)


class Processes:
    """Of the engines, in memory: `end` is a kill, `start_again` a new process under the old address."""

    def __init__(self, *engines: FakeVllm) -> None:
        self.engines = {engine.url: engine for engine in engines}
        self.exited: dict[str, str] = {}
        self.log: list[str] = []

    def urls(self):
        return self.engines.keys()

    def is_lost(self, url):
        return False

    async def exits(self):
        exited, self.exited = self.exited, {}
        return exited

    async def end(self, url):
        self.log.append("end")
        await asyncio.to_thread(self.engines[url].die)

    async def start_again(self, url):
        self.log.append("start")
        engine = self.engines[url]
        await asyncio.to_thread(engine.die)
        engine.forget()
        engine.heal()
        await asyncio.to_thread(engine.start)


def awake(engine: Any) -> bool:
    is_dead = isinstance(engine, FakeVllm) and engine._thread is None
    return not is_dead and len(engine.asleep) < 2


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def vllm() -> FakeVllm:
    engine = FakeVllm()
    engine.vocab_size = VOCAB_SIZE
    return engine


class Run:
    """A rollout manager over fakes, and a driver's steps."""

    def __init__(self, service: RolloutService, ranks: Ranks, processes: Processes) -> None:
        self.service, self.ranks, self.processes = service, ranks, processes

    async def step(self, number: int) -> None:
        await self.service.sync_weights(number)
        assert self.ranks.held == set(), "while the engines generate, nothing of the trainer is there"
        await self.service.next_batch(number)
        await self.service.free_gpus()
        assert self.ranks.held == {"parameters", "gradients", "optimizer"}

    def states(self) -> list[State]:
        return [member.state for member in self.service.fleet.members()]


@pytest.fixture
def serve(tmp_path, model_dir, monkeypatch):
    monkeypatch.setattr(engine_restarts, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(colocation, "LOOK_SECONDS", 0.02)
    key = tmp_path / "key"
    key.write_text(KEY)
    data = tmp_path / "words.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{w}=", "label": w}) + "\n" for w in ("sun", "bird", "owl", "cat")))
    (tmp_path / "config.json").write_text("{}")

    def endpoint(engine: Any) -> EngineEndpoint:
        is_vllm = isinstance(engine, FakeVllm)
        return EngineEndpoint(
            url=engine.url, dialect="vllm" if is_vllm else "sglang", plugin=is_vllm and engine.plugin, key_file=key
        )

    @asynccontextmanager
    async def open_(
        engines: list[Any], judges: tuple[Any, ...] = (), *, from_disk: bool = False
    ) -> AsyncIterator[Run]:
        config = TrainConfig.model_validate({
            "model": {"path": model_dir},
            "engines": {"mode": "colocate", "restart_backoff": 0.01, "groups": [{"count": len(engines)}]},
            "rollout": {"prompts_per_step": 2, "samples_per_prompt": 2},
            "sampling": {"max_prompt_tokens": 8, "max_response_tokens": 8},
            "deadlines": {"sync": 5.0},
            "data": {"train": [data]},
            "reward": {"function": "tests.contract.rollout_functions:long_is_good"},
        })  # fmt: skip
        async with EngineClient() as client:
            infos = {engine.url: await client.probe(endpoint(engine)) for engine in [*engines, *judges]}
        side = SideEngines(
            tuple(map(endpoint, judges)), {judge.url: infos[judge.url] for judge in judges}, from_disk=from_disk
        )
        ranks = Ranks(config, tmp_path, [*engines, *judges])
        processes = Processes(*(e for e in [*engines, *judges] if isinstance(e, FakeVllm)))
        for engine in engines:
            processes.engines.setdefault(engine.url, engine)
        known = Engines(
            tuple(map(endpoint, engines)), {engine.url: infos[engine.url] for engine in engines},
            models={"judge": side} if judges else {}, processes=processes,
        )  # fmt: skip
        service = RolloutService(
            config, known, log=lambda line: None, fleet=Fleet(FleetPolicy(probe_seconds=0.02)),
            syncing=Syncing(ranks, Lineage(RUN, 0), "cpu", tmp_path / "weights", vocab_size=VOCAB_SIZE),
        )  # fmt: skip
        try:
            await service.start()
            yield Run(service, ranks, processes)
        finally:
            await service.close()
            ranks.sender.close()

    return open_


def test_engines_and_ranks_take_turns_and_neither_sees_the_other_on_the_gpus(serve, stack):
    engines = [stack.enter_context(vllm()), stack.enter_context(FakeSglang())]

    async def run() -> None:
        async with serve(engines) as it:
            for number in range(3):
                await it.step(number)
                assert it.states() == [State.ASLEEP] * 2 and not any(map(awake, engines))
            assert it.ranks.log == ["send", "train"] * 3
            assert it.processes.log == []
            assert engines[0].paths().count("/init_weight_transfer_engine") == 1, "a connection outlives the sleep"

    asyncio.run(run())


def test_weights_come_back_before_the_cache_and_the_engine_is_resumed_by_nobody_in_between(serve, stack):
    engine = stack.enter_context(vllm())

    async def run() -> list[tuple[str, str]]:
        async with serve([engine]) as it:
            await it.step(0)
            first = len(engine.requests)
            await it.service.sync_weights(1)
            assert engine.tensors["a"].tolist() == [1.0] * 4 and engine.asleep == frozenset()
            return [(r.path, r.query.get("tags", "")) for r in engine.requests[first:] if r.method == "POST"]

    told = [call for call in asyncio.run(run()) if call[0] not in ("/rltool/lease", "/reset_prefix_cache")]
    assert told == [
        ("/wake_up", "weights"), ("/start_weight_update", ""), ("/update_weights", ""), ("/finish_weight_update", ""),
        ("/wake_up", "kv_cache"), ("/resume", ""),
    ]  # fmt: skip


def test_for_a_comparison_of_weights_the_parameters_come_back_beside_the_engines_and_leave_again(serve, stack):
    engine = stack.enter_context(vllm())

    async def run() -> None:
        async with serve([engine]) as it:
            await it.step(0)
            await it.service.sync_weights(1)
            asked = asyncio.create_task(it.service.compare_weights([]))
            await it.service.next_batch(1)
            [row] = (await asked)["engines"]
            assert row["equal"] and "parameters are bit-equal" in row["lines"][0]
            assert it.ranks.held == set() and awake(engine)

    asyncio.run(run())


def test_a_judge_sleeps_with_its_weights_and_wakes_up_without_a_sync(serve, stack):
    engine, judge = stack.enter_context(vllm()), stack.enter_context(vllm())

    async def run() -> None:
        async with serve([engine], (judge,)) as it:
            await it.step(0)
            assert not awake(judge)
            await it.service.sync_weights(1)
            assert judge.asleep == frozenset() and not judge.paused
            slept = [recorded.query["level"] for recorded in judge.requests if recorded.path == "/sleep"]
            assert slept == ["1"] and "/update_weights" not in judge.paths()
            assert [recorded.query["level"] for recorded in engine.requests if recorded.path == "/sleep"] == ["2"]

    asyncio.run(run())


def test_a_judge_that_dies_while_it_wakes_up_is_not_woken_in_the_fleet(serve, stack):
    engine, judge = (stack.enter_context(vllm()) for _ in range(2))

    async def run():
        async with serve([engine], (judge,)) as r:
            await r.step(0)
            await r.service.sync_weights(1)
            await r.service.next_batch(1)
            await r.service.free_gpus()
            side = r.service._side.started[0]
            judge.delay("/resume", 0.3)
            waking = asyncio.create_task(r.service.sync_weights(2))
            before = judge.paths().count("/resume")
            while judge.paths().count("/resume") == before:
                await asyncio.sleep(0.01)
            side.fleet.process_exited(judge.url, "killed")
            await waking
            assert side.fleet.member(judge.url).state is State.DEAD

    asyncio.run(run())


def test_a_judge_that_sleeps_to_disk_drops_its_weights_and_has_them_again_before_its_cache(serve, stack):
    engine, judge = stack.enter_context(vllm()), stack.enter_context(vllm())

    async def run() -> None:
        async with serve([engine], (judge,), from_disk=True) as it:
            await it.step(0)
            assert not awake(judge) and judge.tensors == {}
            await it.service.sync_weights(1)
            assert judge.asleep == frozenset() and not judge.paused and judge.tensors == {"of the checkpoint": True}
            control = [r for r in judge.requests if r.path in ("/sleep", "/wake_up", "/rltool/reload_weights")]
            assert [(r.path, r.query.get("level") or r.query.get("tags")) for r in control] == [
                ("/sleep", "2"), ("/wake_up", "weights"), ("/rltool/reload_weights", None), ("/wake_up", "kv_cache"),
            ]  # fmt: skip
            judge.fail("/rltool/reload_weights", 500, times=1)
            await it.service.next_batch(1)
            await it.service.free_gpus()
            await it.service.sync_weights(2)
            assert it.processes.log == ["end"], "one that has no weights is not asked, but started again"

    asyncio.run(run())


def test_an_engine_that_does_not_sleep_is_ended_and_back_in_the_engines_next_turn(serve, stack):
    stubborn, other = stack.enter_context(vllm()), stack.enter_context(vllm())

    async def run() -> None:
        async with serve([stubborn, other]) as it:
            await it.service.sync_weights(0)
            await it.service.next_batch(0)
            stubborn.fail("/sleep", 500)
            await it.service.free_gpus()
            assert it.processes.log == ["end"], "and it is not started while the trainer works"
            assert it.states() == [State.DEAD, State.ASLEEP]
            async with asyncio.timeout(60):  # until it is on hold: a turn that ends before would end it once more
                while not it.service._restarts._may_start._waiters:
                    await asyncio.sleep(0.01)
            await it.step(1)
            await it.step(2)
            assert it.processes.log == ["end", "start"]
            assert it.states() == [State.ASLEEP] * 2 and stubborn.tensors == {}

    asyncio.run(run())


@pytest.mark.parametrize("tag", ["weights", "kv_cache"])
def test_an_engine_that_does_not_wake_up_is_ended_and_the_others_go_on(serve, stack, tag):
    stuck, other = stack.enter_context(vllm()), stack.enter_context(vllm())
    wakes_up = stuck._wake_up

    async def wake_up(recorded):
        if recorded.query["tags"] == tag:
            raise RuntimeError("CUDA out of memory")
        return await wakes_up(recorded)

    async def run() -> None:
        async with serve([stuck, other]) as it:
            await it.step(0)
            stuck._wake_up = wake_up
            report = await it.service.sync_weights(1)
            assert report.updated == (other.url,) and set(report.failed) == {stuck.url}
            assert it.processes.log[0] == "end"
            await it.service.next_batch(1)

    asyncio.run(run())


def test_an_engine_that_holds_up_a_sync_is_in_the_next_one_again(serve, stack):
    """A sync alone wakes it up: one that was left out would be ended."""
    sick, other = stack.enter_context(vllm()), stack.enter_context(vllm())

    async def run() -> None:
        async with serve([sick, other]) as it:
            await it.step(0)
            sick.hang("/update_weights")
            report = await it.service.sync_weights(1)
            assert report.updated == (other.url,)
            assert "/update_weights" in report.failed[sick.url] and "left out" not in report.failed[sick.url]
            await it.service.next_batch(1)
            await it.service.free_gpus()
            sick.heal()
            report = await it.service.sync_weights(2)
            assert set(report.updated) == {sick.url, other.url} and it.processes.log == []

    asyncio.run(run())


def test_an_engine_that_dies_while_the_trainer_works_is_started_in_the_engines_turn(serve, stack):
    victim, other = stack.enter_context(vllm()), stack.enter_context(vllm())

    async def run() -> None:
        async with serve([victim, other]) as it:
            await it.step(0)
            await asyncio.to_thread(victim.die)
            it.processes.exited = {victim.url: "killed"}
            restarts = it.service._restarts
            while not (restarts._may_start._waiters or it.processes.log):  # it is due, and either waits or not
                await asyncio.sleep(0.01)
            assert it.processes.log == [] and it.states()[0] is State.DEAD
            await it.step(1)
            await it.step(2)
            assert it.states() == [State.ASLEEP] * 2

    asyncio.run(run())


def test_the_trainer_waits_for_an_engine_that_is_loading(serve, stack):
    victim, other = stack.enter_context(vllm()), stack.enter_context(vllm())

    async def run() -> None:
        async with serve([victim, other]) as it:
            await it.service.sync_weights(0)
            await it.service.next_batch(0)
            await asyncio.to_thread(victim.die)
            victim.fail("/health", 503)
            it.processes.engines[victim.url].heal = lambda: None  # it loads, and answers nothing yet
            it.processes.exited = {victim.url: "killed"}
            while State.STARTING not in it.states():
                await asyncio.sleep(0.01)
            freeing, probes = asyncio.create_task(it.service.free_gpus()), victim.paths().count("/health")
            while victim.paths().count("/health") < probes + 3:
                await asyncio.sleep(0.01)
            assert not freeing.done() and "train" not in it.ranks.log
            victim.faults.clear()
            await freeing
            assert it.states() == [State.ASLEEP] * 2

    asyncio.run(run())
