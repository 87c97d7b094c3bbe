"""Staged syncs: buckets come over a real gloo group while the engine generates, and it is paused only to load them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rltool.config.rollout import WeightsConfig
from rltool.engines.client import EngineClient
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet.fleet import State
from rltool.errors import UsageError
from rltool.weights.sync_report import WeightSyncFailed
from rltool.weights.transport import choose
from tests.contract import sync_rig
from tests.contract.fakes.sglang import FakeSglang
from tests.contract.sync_rig import KEY, Rig, version
from tests.ranks import SenderRanks

DEADLINE = 3.0
CONFIG = WeightsConfig(bucket_bytes=40, transport="gloo", staged=True)
PLUGIN_STEPS = ("/rltool/update_weights", "/rltool/finish_weight_update")
STEPS = ("/rltool/prefetch", "/pause", "/start_weight_update", "/update_weights", PLUGIN_STEPS[1], "/resume")


class Ranks(SenderRanks):
    def weights(self, step):
        changing = {"a": torch.full((2, 9), float(step)), "c": torch.ones(7) + step}
        return changing | {"b": torch.arange(5, dtype=torch.bfloat16)}

    async def logprobs(self, batch):
        return batch.rollout_logprobs.clone()


def syncing(
    engines: Any, directory: Path, scenario: Callable[[Rig[Ranks]], Awaitable[None]], config: WeightsConfig = CONFIG
) -> None:
    async def run() -> None:
        ranks = partial(Ranks, deadline=DEADLINE)
        async with sync_rig.rig(engines, ranks, config, directory, deadline=DEADLINE) as r:
            await scenario(r)

    asyncio.run(run())


def assert_has(engine, ranks, step):
    wanted = ranks.weights(step)
    assert engine.version == str(version(step)) and engine.tensors.keys() == wanted.keys()
    assert all(torch.equal(engine.tensors[name], wanted[name]) for name in wanted)


def test_engines_are_paused_when_they_have_every_bucket(two, tmp_path):
    async def scenario(r):
        for step in range(3):
            report = await r.sync.sync(version(step))
            assert report.failed == {}
            for engine in two:
                assert_has(engine, r.ranks, step)
                asked = [path for path in engine.paths() if path in (*STEPS, *PLUGIN_STEPS)]
                assert asked[-3:] == ["/rltool/prefetch", *PLUGIN_STEPS] and not engine.paused

    syncing(two, tmp_path, scenario)


@pytest.mark.parametrize("how", ["staged", "delta"])
def test_with_auto_each_engine_of_a_mixed_fleet_gets_what_it_can(two, tmp_path, how):
    """In one sync, from one gather: those with our plugin are paused when they have every bucket, SGLang before."""

    async def scenario(r):
        for step in range(3):
            report = await r.sync.sync(version(step))
            assert report.failed == {} and len(report.updated) == 3
            for engine in two:
                assert_has(engine, r.ranks, step)
            assert sglang.weight_version == str(version(step))
            assert torch.frombuffer(bytearray(sglang.weights["c"]), dtype=torch.float32)[0] == 1.0 + step
        for engine in two:
            asked = [path for path in engine.paths() if path in ("/rltool/prefetch", *PLUGIN_STEPS)]
            assert asked == ["/rltool/prefetch", *PLUGIN_STEPS] * 3
        assert sglang.seen["/pause_generation"] == 3

    config = WeightsConfig(bucket_bytes=40, transport="gloo", **{how: "auto"})
    with FakeSglang() as sglang:
        syncing([*two, sglang], tmp_path, scenario, config)


def test_an_engine_that_takes_no_bucket_fails_unpaused_and_the_others_go_on(two, tmp_path):
    async def scenario(r):
        await r.sync.sync(version(0))
        two[1].fail("/rltool/prefetch", status=500)
        report = await r.sync.sync(version(1))
        assert report.updated == (two[0].url,) and set(report.failed) == {two[1].url}
        assert_has(two[0], r.ranks, 1)
        assert two[1].version == str(version(0)) and two[1].paths().count("/rltool/update_weights") == 1
        assert r.fleet.member(two[1].url).state is State.STALE
        two[1].heal()
        await r.sync.sync(version(1), only={two[1].url})
        assert_has(two[1], r.ranks, 1)

    syncing(two, tmp_path, scenario)


@pytest.mark.parametrize("step", PLUGIN_STEPS)
@pytest.mark.parametrize("status", [404, 500])
def test_a_failed_update_is_that_engines_failure_and_the_next_sync_repairs(two, tmp_path, status, step):
    sick, healthy = two

    async def scenario(r):
        await r.sync.sync(version(0))
        sick.fail(step, status, times=1)
        report = await r.sync.sync(version(1))
        assert report.updated == (healthy.url,) and report.failed.keys() == {sick.url}
        assert str(status) in report.failed[sick.url] and step in report.failed[sick.url]
        assert not sick.paused and not healthy.paused
        assert sick.version != str(version(1)) and r.fleet.member(sick.url).state is State.STALE
        report = await r.sync.sync(version(2))
        assert report.failed == {}
        for engine in two:
            assert_has(engine, r.ranks, 2)

    syncing(two, tmp_path, scenario)


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_another_pause_is_asked_for_by_its_own_route(two, tmp_path, mode):
    async def scenario(r):
        await r.sync.sync(version(0))
        for engine in two:
            assert_has(engine, r.ranks, 0)
            assert [path for path in engine.paths() if path in STEPS] == list(STEPS)

    syncing(two, tmp_path, scenario, CONFIG.model_copy(update={"pause_mode": mode}))


def test_an_engine_that_dies_while_buckets_come_is_no_fault_of_the_others(two, tmp_path):
    async def scenario(r):
        await r.sync.sync(version(0))
        two[1].reset("/rltool/prefetch")
        two[0].reset("/rltool/prefetch")
        with pytest.raises(WeightSyncFailed):
            await r.sync.sync(version(1))
        assert not two[0].paused and not two[1].paused

    syncing(two, tmp_path, scenario)


def test_an_engine_that_cannot_stage_is_refused(tmp_path):
    with FakeSglang() as sglang:
        (tmp_path / "key").write_text(KEY)
        endpoint = EngineEndpoint(url=sglang.url, dialect="sglang", key_file=tmp_path / "key")

        async def probe():
            async with EngineClient() as client:
                return await client.probe(endpoint)

        with pytest.raises(UsageError, match="cannot take staged weights"):
            choose(asyncio.run(probe()), CONFIG, "cpu")


@pytest.mark.parametrize("transport", ["disk", "delta"])
def test_staging_what_lies_there_already_is_refused(transport):
    with pytest.raises(ValueError, match="staged has no effect"):
        WeightsConfig(transport=transport, staged=True, store="/x" if transport == "delta" else None)
