"""Adapters under names at engines: published, sampled with, unloaded; never a name for two of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rltool.engines.adapters import NamedAdapters, adapter_name, adapter_obstacle, write_adapter
from rltool.engines.client import EngineClient
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.types import GenerateRequest, SamplingParams
from rltool.engines.weight_version import WeightVersion
from rltool.errors import EngineRejected, UsageError
from tests.contract.fakes.vllm import FakeVllm

REQUEST = GenerateRequest((3, 4), SamplingParams(max_tokens=2), "0" * 32)
Scenario = Callable[[NamedAdapters, EngineClient, FakeVllm, EngineEndpoint], Awaitable[None]]


def playing(scenario: Scenario, tmp_path: Path) -> None:
    async def run() -> None:
        with FakeVllm(key="k" * 16) as engine:
            (tmp_path / "key").write_text("k" * 16)
            endpoint = EngineEndpoint(url=engine.url, dialect="vllm", key_file=tmp_path / "key")
            async with EngineClient() as client:
                endpoint = endpoint.probed(await client.probe(endpoint))
                await scenario(NamedAdapters(client, deadline=5.0), client, engine, endpoint)

    asyncio.run(run())


def adapter(tmp_path: Path, name: str) -> Path:
    tensors: dict[str, Any] = {"base_model.model.x.lora_A.weight": torch.zeros(2, 3)}
    return write_adapter(tmp_path / name, {"r": 2}, tensors.items())


def test_requests_are_sampled_with_the_adapter_that_they_name_until_it_is_unloaded(tmp_path):
    async def scenario(adapters, client, engine, endpoint):
        assert await adapters.publish("a-v1", adapter(tmp_path, "a-v1"), [endpoint]) == {}
        assert await adapters.publish("a-v2", adapter(tmp_path, "a-v2"), [endpoint]) == {}
        for name in ("a-v1", "a-v2"):
            await client.generate(endpoint, adapters.sampling_with(name, REQUEST), timeout=60.0)
        assert engine.sampled_with == ["a-v1", "a-v2"]
        assert await adapters.unload("a-v1") == {} and list(engine.adapters) == ["a-v2"]
        with pytest.raises(UsageError, match="not published"):
            adapters.sampling_with("a-v1", REQUEST)
        with pytest.raises(EngineRejected, match="a-v1"):  # never the model alone
            await client.generate(endpoint, replace(REQUEST, adapter="a-v1"), timeout=60.0)
        assert "/pause" not in engine.paths()

    playing(scenario, tmp_path)


def test_a_name_is_never_taken_again(tmp_path):
    async def scenario(adapters, client, engine, endpoint):
        one, other = adapter(tmp_path, "one"), adapter(tmp_path, "other")
        await adapters.publish("a", one, [endpoint])
        with pytest.raises(UsageError, match="one adapter for ever"):
            await adapters.publish("a", other, [endpoint])
        await adapters.unload("a")
        with pytest.raises(UsageError, match="one adapter for ever"):
            await adapters.publish("a", one, [endpoint])
        with pytest.raises(UsageError, match="exists"):
            adapter(tmp_path, "one")

    playing(scenario, tmp_path)


def test_an_engine_that_was_started_again_gets_it_again_and_another_call_loads_nothing_twice(tmp_path):
    async def scenario(adapters, client, engine, endpoint):
        directory = adapter(tmp_path, "a")
        for _ in range(2):
            assert await adapters.publish("a", directory, [endpoint]) == {}
        assert engine.paths().count("/v1/load_lora_adapter") == 1
        engine.forget()
        revived = endpoint.probed(await client.probe(endpoint))
        assert await adapters.publish("a", directory, [revived]) == {}
        assert engine.adapters == {"a": str(directory)}

    playing(scenario, tmp_path)


def test_names_tell_attempts_and_steps_apart():
    run = "0" * 32
    names = {adapter_name(WeightVersion(run, attempt, step)) for attempt in range(2) for step in range(3)}
    assert len(names) == 6 and adapter_name(WeightVersion(run, 1, 123)) == f"{run}-1-v000123"


@pytest.mark.parametrize(
    ("rank", "slots", "why"),
    [
        (0, 0, "takes no adapters"), (8, 4, "up to rank 8"), (16, 3, "holds 3 adapters"), (16, 4, None),
        (None, None, "earlier rltool"),
    ],
)
def test_an_engine_that_cannot_take_the_runs_adapters_is_refused_by_what_it_reports(rank, slots, why, tmp_path):
    async def scenario(adapters, client, engine, endpoint):
        engine.lora_rank, engine.lora_slots = rank, slots
        found = adapter_obstacle(await client.probe(endpoint), 16, 4)
        assert (found is None) if why is None else why in found

    playing(scenario, tmp_path)
