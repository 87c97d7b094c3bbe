"""weights.delta: patches over the transfer group, into fake engines with the plugin's real taking of them. gloo is
real, NCCL a fake between threads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
import torch

from rltool.config.rollout import WeightsConfig
from rltool.engines.delta import messages
from rltool.engines.delta.patch import bits
from rltool.engines.delta.rebuild import Rebuilt
from rltool.engines.fleet.fleet import State
from rltool.engines.plugin import prefetch as prefetching
from rltool.weights.sync_report import WeightSyncFailed
from rltool.weights.transports import nccl_sender
from tests.contract import sync_rig
from tests.contract.fakes import nccl as fake_nccl
from tests.contract.fakes.vllm import FakeVllm
from tests.contract.sync_rig import KEY, Rig, version
from tests.ranks import SenderRanks

DEADLINE = 3.0


class Ranks(SenderRanks):
    """A few elements change at each step."""

    def weights(self, step):
        tensors = {
            "a.weight": torch.arange(600.0).reshape(20, 30),
            "b.weight": torch.arange(50, dtype=torch.bfloat16),
            "c.bias": torch.full((7,), 0.5),
            "empty": torch.zeros(0),
        }
        for past in range(step):
            tensors["a.weight"][past % 20, 3] += past + 1
            tensors["b.weight"][past % 50] = -past
        return tensors

    async def logprobs(self, batch):
        return batch.rollout_logprobs.clone()


@pytest.fixture(params=["gloo", "nccl"])
def transport(request, monkeypatch) -> str:
    if request.param == "nccl":
        fake_nccl.installed(monkeypatch)
        monkeypatch.setattr(nccl_sender, "COMPLETE_SECONDS", 0.5)
    return request.param


@pytest.fixture
def taken(monkeypatch) -> list[tuple[str, bool]]:
    """(version, whether all of it came), of each version that an engine has got."""
    found: list[tuple[str, bool]] = []

    def take(copy, receive, buckets, name) -> Rebuilt:
        got = messages.take(copy, receive, buckets, name)
        found.append((name, got.anchor))
        return got

    monkeypatch.setattr(prefetching, "take", take)
    return found


@pytest.fixture
def syncing(transport, two, tmp_path) -> Callable[..., None]:
    """Runs a scenario with two engines."""

    def syncing(scenario: Callable[[Rig[Ranks]], Awaitable[None]], **config: Any) -> None:
        async def run() -> None:
            weights = WeightsConfig(bucket_bytes=200, transport=transport, delta=True, **config)
            device = "cuda" if transport == "nccl" else "cpu"
            for engine in two:
                engine.device = device
            ranks = partial(Ranks, deadline=DEADLINE)
            async with sync_rig.rig(two, ranks, weights, tmp_path, deadline=DEADLINE, trainer_device=device) as r:
                await scenario(r)

        asyncio.run(run())

    return syncing


def assert_has(engine: FakeVllm, ranks: Ranks, step: int) -> None:
    wanted = ranks.weights(step)
    assert engine.version == str(version(step)) and engine.tensors.keys() == wanted.keys()
    assert all(torch.equal(bits(engine.tensors[name]), bits(wanted[name])) for name in wanted)


def of_step(taken: list[tuple[str, bool]], step: int) -> list[bool]:
    """Of each engine that took this version: whether it got all of it."""
    return sorted(whole for name, whole in taken if name == str(version(step)))


def test_engines_get_patches_while_they_generate_and_are_paused_to_load_them(two, syncing, taken):
    reports = []

    async def scenario(r):
        for step in range(7):
            report = await r.sync.sync(version(step))
            assert set(report.updated) == {engine.url for engine in two} and report.failed == {}
            reports.append(report)
            for engine in two:
                assert_has(engine, r.ranks, step)
                wanted = ("/rltool/prefetch", "/rltool/update_weights", "/rltool/finish_weight_update")
                assert [path for path in engine.paths() if path in wanted][-len(wanted) :] == list(wanted)
                assert not engine.paused and "/resume" not in engine.paths()
        both = [of_step(taken, step) for step in range(7)]
        assert both == [[step % 3 == 0] * 2 for step in range(7)], "every third version goes out whole"
        for step, report in enumerate(reports):
            patches = report.memory.host - (2400 + 100) - report.bytes  # beside two buckets and the copy of the weights
            if step % 3 == 0:
                assert patches == 0 == report.memory.device
                assert report.patch_bytes is None and "weights/patch_bytes" not in report.metrics()
            else:
                assert 0 < report.metrics()["weights/patch_bytes"] < report.bytes / 3
                assert 0 < patches <= report.metrics()["weights/patch_bytes"]
                assert "; patches of 0.000" in report.line()

    syncing(scenario, anchor_every=3)


def test_a_late_engine_and_a_restarted_one_get_all_weights_and_the_others_patches(two, syncing, taken, stack):
    late = stack.enter_context(FakeVllm(key=KEY))

    async def scenario(r):
        late.device = two[0].device
        for step in range(3):
            await r.sync.sync(version(step))
        two[0].forget()
        await r.probe(two[0])
        await r.add(late)
        await r.sync.sync(version(3))
        for engine in (*two, late):
            assert_has(engine, r.ranks, 3)
        assert of_step(taken, 3) == [False, True, True]
        await r.sync.sync(version(4))
        for engine in (*two, late):
            assert_has(engine, r.ranks, 4)
        assert of_step(taken, 4) == [False] * 3

    syncing(scenario)


def test_an_engine_that_missed_a_version_gets_all_of_it_and_breaks_no_other_chain(two, syncing, taken):
    async def scenario(r):
        await r.sync.sync(version(0))
        two[1].fail("/rltool/prefetch", status=409, body={"error": "out of memory"})
        report = await r.sync.sync(version(1))
        assert report.updated == (two[0].url,) and "out of memory" in report.failed[two[1].url]
        assert_has(two[0], r.ranks, 1)
        assert two[1].paths().count("/rltool/update_weights") == 1, "it was not paused a second time"
        assert r.fleet.member(two[1].url).state is State.STALE
        two[1].heal()
        await r.sync.sync(version(1), only={two[1].url})
        assert_has(two[1], r.ranks, 1)
        await r.sync.sync(version(2))
        for engine in two:
            assert_has(engine, r.ranks, 2)
        assert [of_step(taken, step) for step in range(3)] == [[True, True], [False, True], [False, False]]

    syncing(scenario)


def test_a_version_that_only_some_were_sent_breaks_the_chain_of_the_others(two, syncing, taken):
    async def scenario(r):
        await r.sync.sync(version(0))
        await r.sync.sync(version(1), only={two[0].url})
        await r.sync.sync(version(2))
        for engine in two:
            assert_has(engine, r.ranks, 2)
        assert of_step(taken, 2) == [False, True]

    syncing(scenario)


def test_an_engine_whose_copy_is_not_what_the_trainer_takes_it_for_is_an_error_and_gets_all(two, syncing, taken):
    async def scenario(r):
        await r.sync.sync(version(0))
        two[1].prefetcher._copy.held = None
        report = await r.sync.sync(version(1))
        assert report.updated == (two[0].url,) and "and it holds None" in report.failed[two[1].url]
        assert two[1].version == str(version(0)) and not two[1].paused
        await r.sync.sync(version(1), only={two[1].url})
        assert_has(two[1], r.ranks, 1)

    syncing(scenario)


def test_bytes_that_change_on_the_way_are_found(two, syncing, taken):
    async def scenario(r):
        await r.sync.sync(version(0))
        received = two[1]._received

        def damaged(size):
            flat = received(size)
            if size > 16:  # no header
                flat[size // 2] += 1
            return flat

        two[1]._received = damaged
        report = await r.sync.sync(version(1))
        assert report.updated == (two[0].url,) and set(report.failed) == {two[1].url}
        assert two[1].version == str(version(0)) and two[1].paths().count("/rltool/update_weights") == 1
        two[1]._received = received
        await r.sync.sync(version(1), only={two[1].url})
        assert_has(two[1], r.ranks, 1)

    syncing(scenario)


def test_a_restarted_trainer_sends_all_weights(two, syncing, taken):
    async def scenario(r):
        await r.sync.sync(version(0))
        await r.sync.sync(version(1))
        r.ranks.sender.close()
        assert not r.ranks.sender._encoder._copy, "the copy of the weights goes with its connections"
        r.restart()
        await r.sync.sync(version(2))
        for engine in two:
            assert_has(engine, r.ranks, 2)
        assert of_step(taken, 2) == [True, True]

    syncing(scenario)


def test_a_trainer_that_fails_half_way_frees_the_engines_and_sends_all_weights_next(two, syncing, taken):
    async def scenario(r):
        await r.sync.sync(version(0))
        stream = r.ranks.stream

        def cut_off(step):
            r.ranks.stream = stream
            yield next(stream(step))
            raise RuntimeError("out of memory")

        r.ranks.stream = lambda step: cut_off(step) if step == 1 else stream(step)
        with pytest.raises(RuntimeError, match="out of memory"):
            await r.sync.sync(version(1))
        assert all(not engine.paused and engine.version == str(version(0)) for engine in two)
        await r.sync.sync(version(1))
        for engine in two:
            assert_has(engine, r.ranks, 1)
        assert of_step(taken, 1) == [True, True]

    syncing(scenario)


def test_an_engine_that_dies_meanwhile_is_no_fault_of_the_others(two, syncing, taken):
    async def scenario(r):
        await r.sync.sync(version(0))
        two[1].reset("/rltool/prefetch")
        report = await r.sync.sync(version(1))
        assert report.updated == (two[0].url,)
        assert_has(two[0], r.ranks, 1)
        two[1].heal()
        two[0].reset("/rltool/prefetch")
        two[1].reset("/rltool/prefetch")
        with pytest.raises(WeightSyncFailed):
            await r.sync.sync(version(2))
        for engine in two:
            engine.heal()
        await r.sync.sync(version(2))
        for engine in two:
            assert_has(engine, r.ranks, 2)

    syncing(scenario)


@pytest.mark.parametrize("transport", ["nccl"], indirect=True)
def test_the_workers_of_one_engine_get_the_same(two, syncing):
    two[0].world_size = 2  # over gloo the fake has one

    async def scenario(r):
        for step in range(3):
            await r.sync.sync(version(step))
            assert_has(two[0], r.ranks, step)

    syncing(scenario)
