"""A transport per engine (weights.engines): one fleet and one gather, of which one engine is sent its tensors over
gloo, another fetches patches from a store, and an SGLang loads a directory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rltool.config.engine_weights import EngineWeights
from rltool.config.rollout import WeightsConfig
from rltool.engines.delta import chain
from rltool.engines.fleet.fleet import State
from tests import fleets
from tests.contract import sync_rig
from tests.contract.fakes.sglang import FakeSglang, Fault
from tests.contract.fakes.vllm import FakeVllm
from tests.contract.sync_rig import KEY, Rig, version
from tests.ranks import SenderRanks, slowly_changing

DEADLINE = 10.0
FAR_SECONDS = 1.0
"""What the far engine takes to fetch."""
ANCHOR_EVERY = 3
PREFETCH = "/rltool/prefetch"


class Ranks(SenderRanks):
    """A few elements change at each step. gathers: the steps of each send; after_send: awaited when all was sent, and
    before the answer."""

    def __init__(self, config: WeightsConfig, model_files: Path) -> None:
        super().__init__(config, model_files, deadline=DEADLINE)
        self.gathers: list[int] = []
        self.after_send: Callable[[], Any] = partial(asyncio.sleep, 0)

    def weights(self, step):
        return slowly_changing(step)

    async def send(self, version, urls):
        report = await super().send(version, urls)
        self.gathers.append(self.sent)
        await self.after_send()
        return report

    async def logprobs(self, batch):
        return batch.rollout_logprobs.clone()


class Fleet:
    """near: gloo, as [weights] has it; far: by its address, through a store; sglang: by its address, from a
    directory."""

    def __init__(self, near: FakeVllm, far: FakeVllm, sglang: FakeSglang) -> None:
        self.near, self.far, self.sglang = near, far, sglang
        self.all = (near, far, sglang)

    def of_sections(self, *more: EngineWeights) -> tuple[EngineWeights, ...]:
        return (
            *more,
            EngineWeights(match=self.far.url.removeprefix("http://"), transport="delta"),
            EngineWeights(group="far", transport="delta"),
            EngineWeights(match=f"*:{self.sglang.port}", transport="disk"),
        )


@pytest.fixture
def fleet(two, stack) -> Fleet:
    return Fleet(*two, stack.enter_context(FakeSglang()))


@asynccontextmanager
async def rig(
    fleet: Fleet, directory: Path, *, sections: Sequence[EngineWeights] = (), **config: Any
) -> AsyncIterator[Rig[Ranks]]:
    weights = WeightsConfig(
        bucket_bytes=200, store=str(directory / "store"), anchor_every=ANCHOR_EVERY,
        engines=fleet.of_sections(*sections), **config,
    )  # fmt: skip
    async with sync_rig.rig(fleet.all, Ranks, weights, directory, deadline=DEADLINE) as r:
        yield r


def files(directory: Path, step: int) -> set[str]:
    """Kinds of files that this version has in the store."""
    written = directory / "store" / chain.directory(str(version(step)))
    return {path.name.partition("-")[0] for path in written.glob("*.safetensors")}


def assert_has(engine: Any, ranks: Ranks, step: int) -> None:
    """Every tensor, bit by bit, and the version."""
    wanted = {n: t.reshape(-1).view(torch.uint8).numpy().tobytes() for n, t in ranks.weights(step).items()}
    if isinstance(engine, FakeSglang):
        assert engine.weights == wanted and engine.weight_version == str(version(step))
        return
    found = {n: t.reshape(-1).view(torch.uint8).numpy().tobytes() for n, t in engine.tensors.items()}
    assert found == wanted and engine.version == str(version(step)) and not engine.paused


def joined_over(engine: FakeVllm) -> list[str]:
    """The transports of its connections, in order."""
    bodies = [recorded.body for recorded in engine.requests if recorded.path == "/init_weight_transfer_engine"]
    return [body["init_info"]["transport"] for body in bodies]


def test_each_engine_is_reached_by_its_own_transport_in_every_sync_and_from_one_gather(fleet, tmp_path):
    async def scenario():
        async with rig(fleet, tmp_path) as r:
            for step in range(5):
                report = await r.sync.sync(version(step))
                assert set(report.updated) == {engine.url for engine in fleet.all} and report.failed == {}
                for engine in fleet.all:
                    assert_has(engine, r.ranks, step)
            assert r.ranks.gathers == [0, 1, 2, 3, 4]
            patch = {"patch"}
            assert [files(tmp_path, step) for step in range(5)] == [{"model"}, patch, patch, {"model", "patch"}, patch]

    asyncio.run(scenario())
    assert (joined_over(fleet.near), joined_over(fleet.far)) == (["gloo"], ["delta"])
    assert PREFETCH not in fleet.near.paths() and fleet.far.paths().count(PREFETCH) == 5
    assert fleet.sglang.seen["/update_weights_from_disk"] == 5
    assert "/init_weights_update_group" not in fleet.sglang.seen


def test_a_late_engine_gets_what_its_section_says_and_one_of_its_group_takes_anchor_and_chain(fleet, stack, tmp_path):
    far, near = (stack.enter_context(FakeVllm(key=KEY)) for _ in range(2))

    async def scenario():
        async with rig(fleet, tmp_path) as r:
            for step in range(2):
                await r.sync.sync(version(step))
            await r.add(far, group="far")
            await r.add(near)
            await r.sync.sync(version(1), only={far.url, near.url})
            for engine in (*fleet.all, far, near):
                assert_has(engine, r.ranks, 1)
            assert files(tmp_path, 1) == {"patch"}, "nothing was written for it"
            assert (await r.sync.sync(version(2))).failed == {}
            for engine in (*fleet.all, far, near):
                assert_has(engine, r.ranks, 2)

    asyncio.run(scenario())
    assert (joined_over(far), joined_over(near)) == (["delta"], ["gloo"])


def test_versions_that_the_far_engine_has_missed_are_one_patch(fleet, tmp_path):
    """The store has no version that nobody fetched."""

    async def scenario():
        async with rig(fleet, tmp_path) as r:
            await r.sync.sync(version(0))
            await r.sync.sync(version(1), only={fleet.near.url, fleet.sglang.url})
            assert files(tmp_path, 1) == set()
            assert (await r.sync.sync(version(2))).failed == {}
            assert files(tmp_path, 2) == {"patch"}
            for engine in fleet.all:
                assert_has(engine, r.ranks, 2)

    asyncio.run(scenario())


@pytest.mark.parametrize("sick", ["near", "far", "sglang"])
def test_one_that_fails_does_so_alone_and_the_next_sync_brings_it_back(fleet, tmp_path, sick):
    engine = getattr(fleet, sick)
    others = [other for other in fleet.all if other is not engine]

    async def scenario():
        async with rig(fleet, tmp_path) as r:
            await r.sync.sync(version(0))
            if sick == "sglang":
                engine.faults["/update_weights_from_disk"] = Fault(status=500)
            else:
                engine.fail({"near": "/update_weights", "far": PREFETCH}[sick], times=1)
            report = await r.sync.sync(version(1))
            assert report.failed.keys() == {engine.url} and set(report.updated) == {other.url for other in others}
            for other in others:
                assert_has(other, r.ranks, 1)
            assert r.fleet.member(engine.url).state is State.STALE
            assert (await r.sync.sync(version(2))).failed == {}
            for each in fleet.all:
                assert_has(each, r.ranks, 2)

    asyncio.run(scenario())


def test_a_store_that_cannot_be_written_costs_no_other_engine_its_weights(fleet, tmp_path):
    async def scenario():
        async with rig(fleet, tmp_path) as r:
            (tmp_path / "store").write_text("a file")
            report = await r.sync.sync(version(0))
            assert report.failed.keys() == {fleet.far.url} and "cannot write" in report.failed[fleet.far.url]
            for engine in (fleet.near, fleet.sglang):
                assert_has(engine, r.ranks, 0)
            (tmp_path / "store").unlink()
            assert (await r.sync.sync(version(1))).failed == {}
            for engine in fleet.all:
                assert_has(engine, r.ranks, 1)

    asyncio.run(scenario())


def test_sections_for_patches_and_staging_hold_for_their_engines_alone(fleet, stack, tmp_path):
    """Two more over gloo: one that gets patches over its group, one that stages."""
    patched, staged = (stack.enter_context(FakeVllm(key=KEY)) for _ in range(2))
    sections = [EngineWeights(match=patched.url, delta=True), EngineWeights(match=staged.url, staged=True)]

    async def scenario():
        async with rig(fleet, tmp_path, sections=sections, transport="gloo") as r:
            await r.add(patched)
            await r.add(staged)
            for step in range(4):
                report = await r.sync.sync(version(step))
                assert report.failed == {} and len(report.updated) == 5
                for engine in (*fleet.all, patched, staged):
                    assert_has(engine, r.ranks, step)
                assert (report.patch_bytes is None) == (step % ANCHOR_EVERY == 0)

    asyncio.run(scenario())
    for engine, is_patched in ((patched, True), (staged, False)):
        told = [recorded.body["announced"] for recorded in engine.requests if recorded.path == PREFETCH]
        assert [announced.get("delta", False) for announced in told] == [is_patched] * 4


def test_an_engine_that_cannot_take_what_its_section_says_is_told_which_that_is(fleet, tmp_path):
    sections = [EngineWeights(match=fleet.sglang.url, staged=True)]

    async def scenario():
        async with rig(fleet, tmp_path, sections=sections) as r:
            report = await r.sync.sync(version(0))
            assert report.failed.keys() == {fleet.sglang.url}
            told = report.failed[fleet.sglang.url]
            assert "cannot take staged weights" in told
            assert f'[[weights.engines]] with match = "{fleet.sglang.url}" decides' in told

    asyncio.run(scenario())


# -- each at its own pace


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("staged", [False, True])
def test_a_near_engine_goes_on_while_a_far_one_fetches_and_gets_new_requests_when_the_sync_has_ended(
    fleet, tmp_path, staged
):
    near, far = fleet.near, fleet.far

    async def scenario():
        async with rig(fleet, tmp_path, sections=[EngineWeights(match=near.url, staged=staged)]) as r:
            await r.sync.sync(version(0))
            far.delay(PREFETCH, FAR_SECONDS)
            syncing = asyncio.create_task(r.sync.sync(version(1)))
            await until(lambda: near.version == str(version(1)) and not near.paused)
            assert far.version == str(version(0)) and not far.paused and not syncing.done()
            assert r.fleet.member(near.url).state is State.PAUSED
            report = await syncing
            assert report.failed == {} and report.seconds > FAR_SECONDS > report.paused
            assert report.phases["transfer"] > FAR_SECONDS > report.phases["finish"]
            for engine in fleet.all:
                assert_has(engine, r.ranks, 1)
            assert r.states() == [State.READY] * 3

    asyncio.run(scenario())


def test_a_staged_engine_generates_until_all_was_sent_to_everybody(fleet, tmp_path):
    near = fleet.near
    during: list[bool] = []

    async def scenario():
        async with rig(fleet, tmp_path, sections=[EngineWeights(match=near.url, staged=True)]) as r:
            await r.sync.sync(version(0))

            async def slowly():
                await until(lambda: near.paths().count(PREFETCH) == 2)
                await asyncio.sleep(0.3)  # for the answer, after which nothing else would hold it up
                during.append(near.paused)

            r.ranks.after_send = slowly
            report = await r.sync.sync(version(1))
            assert report.failed == {} and during == [False]
            assert_has(near, r.ranks, 1)

    asyncio.run(scenario())


def test_halves_of_a_pair_go_on_together(fleet, tmp_path):
    """Or a request would meet new weights at one, and at the other old ones."""
    near, far = fleet.near, fleet.far
    went_on: dict[str, float] = {}

    async def scenario():
        async with rig(fleet, tmp_path, pause_mode="abort") as r:
            for engine, role in ((near, "prefill"), (far, "decode")):
                fleets.describe(r.fleet, engine.url, endpoint={"role": role})
            await r.sync.sync(version(0))
            far.delay(PREFETCH, FAR_SECONDS)
            syncing = asyncio.create_task(r.sync.sync(version(1)))
            await until(lambda: near.version == str(version(1)))
            while not syncing.done():
                await asyncio.sleep(0.01)
                for engine in (near, far):
                    if engine.version == str(version(1)) and not engine.paused:
                        went_on.setdefault(engine.url, time.monotonic())
                if near.url in went_on:
                    assert far.version == str(version(1)), "it still generates with the old weights"
            assert (await syncing).failed == {} and near.url in went_on
            for engine in (near, far):
                assert_has(engine, r.ranks, 1)

    asyncio.run(scenario())
