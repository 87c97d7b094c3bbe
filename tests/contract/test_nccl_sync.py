"""Whole syncs over NCCL (a fake one between threads, real bytes) into fake engines, with rltool's plugin or not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import pytest
import torch

from rltool.config.rollout import WeightsConfig
from rltool.engines.fleet import State
from rltool.weights.transports import nccl_sender
from tests.contract import sync_rig
from tests.contract.fakes import nccl as fake_nccl
from tests.contract.sync_rig import Rig, version
from tests.ranks import SenderRanks

DEADLINE = 3.0
STEPS = ("/rltool/update_weights", "/rltool/finish_weight_update")
BREAKS_AT = 2


class Ranks(SenderRanks):
    """breaks: the stream of the next version does, in its middle."""

    breaks = False

    def weights(self, step):
        return {f"t{number}": torch.full((4,), float(10 * step + number)) for number in range(5)}

    def stream(self, step):
        for number, pair in enumerate(super().stream(step)):
            if self.breaks and number == BREAKS_AT:
                raise OSError("planned")
            yield pair

    async def weight_metadata(self):
        return [meta for meta, _ in super().stream(0)]

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


def assert_has(engine, ranks, step):
    wanted = ranks.weights(step)
    assert engine.version == str(version(step)) and not engine.paused
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


def test_what_the_trainer_gave_up_half_way_never_becomes_a_version(two, syncing):
    """The engines may get all broadcasts that they wait for, with other bytes, and answer that all is well."""

    async def scenario(r):
        await r.sync.sync(version(0))
        r.ranks.breaks = True
        with pytest.raises(OSError, match="planned"):
            await r.sync.sync(version(1))
        for engine in two:
            assert engine.paths().count(STEPS[0]) == 2 and engine.paths().count(STEPS[1]) == 1
            assert not engine.paused
            if engine.version != "incomplete":  # it was told to leave before it had anything
                assert_has(engine, r.ranks, 0)
            assert r.fleet.member(engine.url).state is State.STALE
        r.ranks.breaks = False
        assert (await r.sync.sync(version(2))).failed == {}
        for engine in two:
            assert_has(engine, r.ranks, 2)

    syncing(scenario)
