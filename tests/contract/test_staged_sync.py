"""Staged syncs: buckets come over a real gloo group while the engine generates, and it is paused only to load them."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest
import torch

from rltool.config.rollout import WeightsConfig
from rltool.engines.client import EngineClient
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet import Fleet, State
from rltool.engines.weight_version import WeightVersion
from rltool.errors import UsageError
from rltool.weights.sync import WeightSync
from rltool.weights.sync_report import WeightSyncFailed
from rltool.weights.transport import choose
from rltool.weights.verify import ValueCheck
from tests.contract.fakes.sglang import EXPECTED_KEY as KEY
from tests.contract.fakes.sglang import VOCAB_SIZE, FakeSglang
from tests.contract.fakes.vllm import FakeVllm
from tests.ranks import SenderRanks

DEADLINE = 3.0
CONFIG = WeightsConfig(bucket_bytes=40, transport="gloo", staged=True)


def version(step: int) -> WeightVersion:
    return WeightVersion("0" * 32, 1, step)


class Ranks(SenderRanks):
    def weights(self, step):
        changing = {"a": torch.full((2, 9), float(step)), "c": torch.ones(7) + step}
        return changing | {"b": torch.arange(5, dtype=torch.bfloat16)}

    async def logprobs(self, batch):
        return batch.rollout_logprobs.clone()


@pytest.fixture
def two():
    with ExitStack() as stack:
        yield [stack.enter_context(FakeVllm(key=KEY)) for _ in range(2)]


def syncing(engines, directory, scenario):
    """Run `scenario(sync, fleet, ranks)` with these engines probed."""
    (directory / "key").write_text(KEY)

    async def run():
        async with EngineClient() as client:
            fleet, endpoints, infos, ranks = Fleet(), {}, {}, Ranks(CONFIG, directory, deadline=DEADLINE)
            for engine in engines:
                url = engine.url
                endpoints[url] = EngineEndpoint(url=url, dialect="vllm", key_file=directory / "key")
                fleet.add(url, takes_weights=True)
                sent_at = fleet.member(url).since
                info = infos[url] = await client.probe(endpoints[url])
                fleet.probe_succeeded(url, sent_at=sent_at, boot_id=info.boot_id, version=info.weight_version)
            sync = WeightSync(
                client, fleet, endpoints, infos, ranks, CONFIG, ValueCheck(VOCAB_SIZE, 1.0, 1e-3, 256),
                trainer_device="cpu", step_deadline=DEADLINE, bucket_deadline=DEADLINE, directory=directory,
            )  # fmt: skip
            try:
                await scenario(sync, fleet, ranks)
            finally:
                ranks.sender.close()

    asyncio.run(run())


def assert_has(engine, ranks, step):
    wanted = ranks.weights(step)
    assert engine.version == str(version(step)) and engine.tensors.keys() == wanted.keys()
    assert all(torch.equal(engine.tensors[name], wanted[name]) for name in wanted)


def test_engines_are_paused_when_they_have_every_bucket(two, tmp_path):
    async def scenario(sync, fleet, ranks):
        for step in range(3):
            report = await sync.sync(version(step))
            assert report.failed == {}
            for engine in two:
                assert_has(engine, ranks, step)
                wanted = ("/rltool/prefetch", "/pause", "/start_weight_update", "/update_weights", "/resume")
                paths = [path for path in engine.paths() if path in wanted]
                assert paths[-len(wanted) :] == list(wanted)

    syncing(two, tmp_path, scenario)


def test_an_engine_that_takes_no_bucket_fails_unpaused_and_the_others_go_on(two, tmp_path):
    async def scenario(sync, fleet, ranks):
        await sync.sync(version(0))
        two[1].fail("/rltool/prefetch", status=500)
        report = await sync.sync(version(1))
        assert report.updated == (two[0].url,) and set(report.failed) == {two[1].url}
        assert_has(two[0], ranks, 1)
        assert two[1].version == str(version(0)) and two[1].paths().count("/pause") == 1
        assert fleet.member(two[1].url).state is State.STALE
        two[1].heal()
        await sync.sync(version(1), only={two[1].url})
        assert_has(two[1], ranks, 1)

    syncing(two, tmp_path, scenario)


def test_an_engine_that_dies_while_buckets_come_is_no_fault_of_the_others(two, tmp_path):
    async def scenario(sync, fleet, ranks):
        await sync.sync(version(0))
        two[1].reset("/rltool/prefetch")
        two[0].reset("/rltool/prefetch")
        with pytest.raises(WeightSyncFailed):
            await sync.sync(version(1))
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
