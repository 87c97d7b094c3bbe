"""What a trainer that died leaves at its engines, and that one call takes it away."""

from __future__ import annotations

import asyncio

import pytest

from rltool.engines.client import EngineClient, RetryPolicy
from rltool.engines.dialects.table import dialect
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet.resume import TRANSFER_GROUP, resume_engines
from rltool.engines.types import Holder
from rltool.weights.transport import Rendezvous, transport
from tests.contract.fakes.sglang import FakeSglang


def resume(*engines, before=None):
    async def work():
        async with EngineClient(retry=RetryPolicy(attempts=1)) as client:
            for engine in engines if before else ():
                await client.run(engine, before, timeout=60.0)
            return await resume_engines(client, engines, timeout=60.0, holder=Holder("a" * 32, "r", "h", 1))

    return asyncio.run(work())


@pytest.fixture
def engine(fake_vllm, key_file):
    return EngineEndpoint(url=fake_vllm.url, dialect="vllm", key_file=key_file)


def test_a_paused_engine_leaves_its_group_before_it_goes_on(fake_vllm, engine):
    control = transport("vllm", "disk").control
    joined = control.init(Rendezvous("disk", 2, TRANSFER_GROUP), rank_offset=1, timeout_seconds=5)
    before = [*joined, *dialect("vllm").pause("keep"), *control.begin()]
    [result] = resume(engine, before=before)
    assert (result.url, result.was_paused, result.error) == (engine.url, True, None)
    assert not fake_vllm.paused and not fake_vllm.updating
    paths = fake_vllm.paths()
    assert paths.index("/shutdown_weight_transfer_engine") < paths.index("/resume")


def test_an_engine_that_nobody_paused_is_left_serving_and_its_dialect_is_asked_for(fake_vllm, key_file):
    [result] = resume(EngineEndpoint(url=fake_vllm.url, key_file=key_file))
    assert (result.was_paused, result.error) == (False, None)


def test_a_group_that_cannot_be_shut_down_does_not_keep_the_engine_paused(fake_vllm, engine):
    fake_vllm.fail("/shutdown_weight_transfer_engine", 500)
    [result] = resume(engine, before=dialect("vllm").pause("keep"))
    assert not fake_vllm.paused
    assert result.error is None and result.transfer.startswith("no transfer group shut down")


def test_an_engine_that_is_gone_is_a_result_and_does_not_keep_the_others_waiting(fake_vllm, engine, tmp_path):
    (tmp_path / "sglang-key").write_text("fake-key")
    with FakeSglang() as sglang:
        dead = EngineEndpoint(url="http://127.0.0.1:9", dialect="vllm")
        results = resume(engine, dead, EngineEndpoint(url=sglang.url, key_file=tmp_path / "sglang-key"))
    assert [result.error is None for result in results] == [True, False, True]
    assert "127.0.0.1:9" in results[1].error
