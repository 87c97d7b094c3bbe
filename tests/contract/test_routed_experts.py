"""Experts that engines chose, over real sockets: asked for, read, missing."""

from __future__ import annotations

import asyncio
import uuid

import pytest

from rltool.engines.client import EngineClient
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.types import GenerateRequest, Routing, SamplingParams
from rltool.errors import EngineError
from tests.contract.fakes.experts import chosen
from tests.contract.fakes.sglang import EXPECTED_KEY, FakeSglang
from tests.contract.fakes.vllm import FakeVllm

ROUTING = Routing(3, 2, 16, dense=(0,))
FAKES = {
    "vllm": lambda: FakeVllm(plugin=False),
    "vllm with the plugin": FakeVllm,
    "sglang": FakeSglang,
}


@pytest.fixture
def key(tmp_path):
    path = tmp_path / "key"
    path.write_text(EXPECTED_KEY)
    return path


def request():
    return GenerateRequest((5, 6, 7), SamplingParams(4), uuid.uuid4().hex, n=2, seed=1, routing=ROUTING)


@pytest.mark.parametrize("kind", FAKES)
def test_engines_tell_whether_they_return_experts_and_return_them(kind, key):
    async def run(engine) -> None:
        async with EngineClient() as client:
            where = EngineEndpoint(url=engine.url, key_file=key)
            info = await client.probe(where, timeout=60.0)
            assert info.routed_experts is True
            for completion in await client.generate(where.probed(info), request(), timeout=60.0):
                expected = chosen([5, 6, 7, *completion.token_ids], ROUTING)
                expected[:, 0] = 255
                assert completion.routed_experts.choices.tolist() == expected.ravel().tolist()
            assert len(expected) == 3 + 4 - 1

    with FAKES[kind]() as engine:
        engine.routing = ROUTING
        asyncio.run(run(engine))


@pytest.mark.parametrize("kind", FAKES)
def test_an_engine_without_the_flag_says_so_and_its_samples_are_not_taken(kind, key):
    async def run(engine) -> None:
        async with EngineClient() as client:
            where = EngineEndpoint(url=engine.url, key_file=key)
            info = await client.probe(where, timeout=60.0)
            assert info.routed_experts is False
            with pytest.raises(EngineError, match="--enable-return-routed-experts"):
                await client.generate(where.probed(info), request(), timeout=60.0, attempts=1)

    with FAKES[kind]() as engine:
        asyncio.run(run(engine))
