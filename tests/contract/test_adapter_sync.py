"""Syncs of adapters alone, over a real gloo group and a directory: engines serve on, each sequence has one version, and
no answer is the model's own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

import pytest
import torch

from rltool.config.rollout import WeightsConfig
from rltool.engines.adapters import adapter_name
from rltool.engines.fleet.fleet import Fleet, State
from rltool.engines.types import Completion, GenerateRequest, SamplingParams
from rltool.engines.weight_version import Lineage
from rltool.errors import RltoolError
from rltool.megatron.export_plan import ExportPlan
from rltool.rollout.serving.data_plane import DataPlane
from rltool.rollout.serving.versions import VersionBook
from rltool.weights.adapter_sync import AdapterSync
from rltool.weights.sync import SyncDeadlines
from rltool.weights.sync_report import SyncReport, WeightSyncFailed
from rltool.weights.verify.comparison import Comparison
from rltool.weights.verify.implied_checksums import adapter_checksums
from rltool.weights.verify.values import ValueCheck
from tests.contract import sync_rig
from tests.contract.fakes.sglang import VOCAB_SIZE
from tests.contract.fakes.vllm import FakeVllm
from tests.contract.sync_rig import KEY, RUN, version
from tests.ranks import SenderRanks, plan_of

DEADLINE = 3.0
CONFIG = WeightsConfig(bucket_bytes=40, lora_sync="adapter")
A, B = "base_model.model.x.lora_A.weight", "base_model.model.x.lora_B.weight"


class Ranks(SenderRanks):
    """shift: by how much the engines' log-probabilities are wrong."""

    shift = 0.0

    @cached_property
    def plan(self) -> ExportPlan:
        return replace(plan_of(self.weights(0)), peft={"r": 2, "lora_alpha": 4})

    def weights(self, step):
        return {A: torch.full((2, 5), float(step)), B: torch.ones(3, 2) * (step + 1)}

    async def logprobs(self, batch):
        return batch.rollout_logprobs + self.shift

    async def weight_checksums(self, layout):
        return adapter_checksums(self.plan, self.weights(1).items(), layout)


class Run:
    """Engines, a data plane over them and the sync of adapters to them."""

    def __init__(self, rig: sync_rig.Rig[Ranks], deadline: float) -> None:
        self.rig, self.engines, self.ranks = rig, rig.engines, rig.ranks
        self.fleet = rig.fleet = Fleet(labelled=False)
        self.book = VersionBook(Lineage(RUN, 1, adapters=True))
        self.plane = DataPlane(rig.set, router=None, requests_per_engine=64, deadline=60.0, judge=self.book)
        self.sync_to = AdapterSync(
            rig.set, rig.sync.trainer, rig.config, ValueCheck(VOCAB_SIZE, 1.0, 1e-3, 256),
            SyncDeadlines(deadline, deadline), in_use=self.plane.samples_with,
        )  # fmt: skip

    async def sync(self, step: int, **options: object) -> SyncReport:
        report = await self.sync_to.sync(self.book.begin(step), **options)  # type: ignore[arg-type]
        self.book.publish(step)
        self.plane.changed()
        return report

    async def sample(self) -> Completion:
        request = GenerateRequest((2, 3), SamplingParams(max_tokens=4), "0" * 32).again()
        [completion] = await self.plane.generate(request, group=0)
        return completion

    def states(self) -> list[State]:
        return [self.fleet.member(engine.url).state for engine in self.engines]


def name(step: int) -> str:
    return adapter_name(version(step))


@pytest.fixture
def engines() -> Iterator[list[FakeVllm]]:
    """Two with rltool's plugin."""
    with ExitStack() as stack:
        made = [stack.enter_context(FakeVllm(key=KEY)) for _ in range(2)]
        for engine in made:
            engine.lora_rank, engine.lora_slots = 8, 3
        yield made


def playing(
    engines: list[FakeVllm], directory: Path, scenario: Callable[[Run], Awaitable[None]], *,
    config: WeightsConfig = CONFIG, deadline: float = DEADLINE,
) -> None:  # fmt: skip
    async def run() -> None:
        ranks = partial(Ranks, deadline=DEADLINE)
        async with sync_rig.rig([], ranks, config, directory, deadline=DEADLINE) as rig:
            made = Run(rig, deadline)
            for engine in engines:
                await rig.add(engine)
            await scenario(made)
        # Whatever a scenario did.
        asked = {path for engine in engines for path in engine.paths()}
        assert not asked & {"/pause", "/sleep", "/start_weight_update", "/rltool/update_weights", "/reset_prefix_cache"}

    asyncio.run(run())


def in_flight(run: Run) -> asyncio.Task[Completion]:
    return asyncio.create_task(run.sample())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30.0):
        while not condition():
            await asyncio.sleep(0.005)


def test_each_engine_has_the_adapter_under_its_name_unscaled_and_serves_all_the_time(engines, tmp_path):
    async def scenario(run):
        assert (await run.sync(0)).failed == {}
        for step in (1, 2, 3):
            run.fleet.take_transitions()
            report = await run.sync(step)
            assert report.failed == {} and report.paused == 0.0 and run.states() == [State.READY] * 2
            for engine in engines:
                assert list(engine.adapters) == [name(step - 1), name(step)], "no request names the one before these"
                wanted = run.ranks.weights(step)
                held = engine.adapters[name(step)]
                assert held.keys() == wanted.keys() and all(torch.equal(held[n], wanted[n]) for n in wanted)
                assert engine.peft == {"r": 2, "lora_alpha": 4}, "which says how B A is scaled: once, by the engine"
            assert {span.version for span in (await run.sample()).versions} == {str(version(step))}
        assert all(None not in engine.sampled_with for engine in engines), "never the model alone"

    playing(engines, tmp_path, scenario)


def test_a_directory_does_for_stock_servers_and_the_bytes_are_the_same(tmp_path):
    from safetensors.torch import load_file

    async def scenario(run):
        for step in range(3):
            assert (await run.sync(step)).failed == {}
        [stock] = run.engines
        assert list(stock.adapters) == [name(1), name(2)]
        held, wanted = load_file(Path(stock.adapters[name(2)]) / "adapter_model.safetensors"), run.ranks.weights(2)
        assert held.keys() == wanted.keys() and all(torch.equal(held[n], wanted[n]) for n in wanted)
        assert {span.version for span in (await run.sample()).versions} == {str(version(2))}
        # A second sync of a version, as for an engine that comes late, loads no name twice.
        assert (await run.sync(2)).failed == {} and stock.paths().count("/v1/load_lora_adapter") == 3

    with FakeVllm(key=KEY, plugin=False) as stock:
        stock.lora_rank, stock.lora_slots = 8, 3
        playing([stock], tmp_path, scenario)


def test_a_request_in_flight_over_two_syncs_ends_under_the_version_that_it_began_with(engines, tmp_path):
    async def scenario(run):
        await run.sync(0)
        for engine in engines:
            engine.seconds = 3.0
        slow = [in_flight(run) for _ in range(2)]  # one at each
        await until(lambda: run.plane.in_flight == 2 and all(engine.batch.running for engine in engines))
        for engine in engines:
            engine.seconds = 0.0
        for step in (1, 2):
            assert (await run.sync(step)).failed == {}
            assert {span.version for span in (await run.sample()).versions} == {str(version(step))}
            assert all(name(0) in engine.adapters for engine in engines), "requests run with it"
        for task in slow:
            [span] = (await task).versions
            assert span.version == str(version(0)) and (span.start, span.end) == (0, 4)
        await run.sync(3)
        assert all(list(engine.adapters) == [name(2), name(3)] for engine in engines)

    playing(engines[:2], tmp_path, scenario)


def test_an_engine_whose_places_are_all_named_by_requests_is_waited_for_and_then_left_out_by_name(engines, tmp_path):
    async def scenario(run):
        [engine] = run.engines
        await run.sync(0)
        engine.seconds = 60.0
        slow = in_flight(run)
        await until(lambda: engine.batch.running == 1)
        engine.seconds = 0.0
        await run.sync(1)
        with pytest.raises(WeightSyncFailed, match="requests name all of them still.*--lora-slots"):
            await run.sync(2)
        assert name(0) in engine.adapters and name(2) not in engine.adapters
        slow.cancel()

    engines[0].lora_slots = 2
    playing(engines[:1], tmp_path, scenario, deadline=1.0)


def test_what_a_gateways_requests_run_with_stays_although_this_process_does_not_see_them(engines, tmp_path):
    async def scenario(run):
        [engine] = run.engines
        await run.sync(0)
        engine.busy_adapters = {name(0)}
        for step in (1, 2):
            await run.sync(step)
        assert name(0) in engine.adapters and name(1) in engine.adapters
        engine.busy_adapters = set()
        await run.sync(3)
        assert list(engine.adapters) == [name(2), name(3)]

    playing(engines[:1], tmp_path, scenario)


def test_an_engine_that_was_started_again_is_given_nothing_until_it_has_the_present_adapter(engines, tmp_path):
    """Under the same URL, and before a probe has found it out: it refuses the name, and is never asked without one."""

    async def scenario(run):
        [engine] = run.engines
        await run.sync(0)
        await run.sync(1)
        engine.forget()
        asked = in_flight(run)
        await until(lambda: run.states() == [State.STALE])
        assert not asked.done() and engine.sampled_with == []
        await run.rig.probe(engine)
        assert run.states() == [State.STALE], "a probe alone does not bring it back"
        assert (await run.sync(1, only={engine.url})).updated == (engine.url,)
        assert list(engine.adapters) == [name(1)] and set(engine.sampled_with) == {name(1)}
        assert {span.version for span in (await asked).versions} == {str(version(1))}
        assert run.plane.counts["stale_engine"] == 1

    playing(engines[:1], tmp_path, scenario)


def test_without_a_published_adapter_a_request_is_an_error_and_reaches_no_engine(engines, tmp_path):
    async def scenario(run):
        [engine] = run.engines
        await run.sync(0)
        run.book.published = None
        with pytest.raises(RltoolError, match="no adapter is published"):
            await run.sample()
        assert engine.sampled_with == [name(0)], "the value check's alone"

    playing(engines[:1], tmp_path, scenario)


def test_what_a_trainer_that_died_has_left_gives_its_places_back(engines, tmp_path):
    async def scenario(run):
        [engine] = run.engines
        left = [adapter_name(replace(version(step), attempt=0)) for step in range(3)]
        engine.adapters = dict.fromkeys([*left[:2], "someone-elses"], "/somewhere")
        await run.sync(0)
        assert set(engine.adapters) == {left[1], "someone-elses", name(0)}
        await run.sync(1)
        assert set(engine.adapters) == {name(0), "someone-elses", name(1)}

    playing(engines[:1], tmp_path, scenario)


def test_an_engine_that_samples_otherwise_than_the_trainer_serves_nothing(engines, tmp_path):
    async def scenario(run):
        run.ranks.shift = 0.5
        with pytest.raises(WeightSyncFailed, match="differ from the trainer's by 5.00e-01") as caught:
            await run.sync(0)
        assert caught.value.values_differ and run.states() == [State.STALE]
        run.ranks.shift = 0.0
        assert (await run.sync(0)).failed == {} and run.states() == [State.READY]

    playing(engines[:1], tmp_path, scenario)


def test_an_engine_that_fails_is_left_out_alone_and_gets_the_next(engines, tmp_path):
    async def scenario(run):
        await run.sync(0)
        engines[0].lora_slots = 1  # it refuses: all places are taken
        report = await run.sync(1)
        assert list(report.failed) == [engines[0].url] and run.states() == [State.STALE, State.READY]
        engines[0].lora_slots = 3
        assert (await run.sync(2)).failed == {} and run.states() == [State.READY] * 2

    playing(engines, tmp_path, scenario)


def test_a_changed_tensor_of_an_adapter_is_found_by_name_and_values_are_compared_where_it_cannot_be_read(
    engines, tmp_path
):
    async def scenario(run):
        await run.sync(1)
        comparison = Comparison(
            run.rig.set, run.ranks, ValueCheck(VOCAB_SIZE, 1.0, 1e-3, 256), deadline=DEADLINE, adapter=run.book.adapter
        )
        found = await comparison.compare(list(run.fleet.members()))
        assert all(verdict.equal for verdict in found.values())
        assert all("2 of 2 parameters are bit-equal" in found[engine.url].lines[0] for engine in engines)
        assert "cannot be read from this engine" in found[stock.url].lines[0]
        engines[1].adapters[name(1)][B] *= 2  # as if the scale had been applied twice
        found = await comparison.compare(list(run.fleet.members()))
        assert [url for url, verdict in found.items() if not verdict.equal] == [engines[1].url]
        assert found[engines[1].url].lines[1] == "the first parameter that differs: x.lora_B"
        assert {named for engine in engines for named in engine.sampled_with} == {name(1)}, "nor the model alone"

    with FakeVllm(key=KEY, plugin=False) as stock:
        stock.lora_rank, stock.lora_slots = 8, 3
        playing([*engines, stock], tmp_path, scenario)
