"""A third engine is one file and one entry in ENGINES: a toy that generates and is launched, and has no other part."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from rltool.config.loader import load_config
from rltool.config.serve import ENGINES, EngineGroup
from rltool.config.train import TrainConfig
from rltool.engines.client import EngineClient
from rltool.engines.dialects.memory_flags import with_sleep_flags
from rltool.engines.dialects.protocol import Controls, Generates, Inspects, Launches
from rltool.engines.dialects.table import dialect
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.launch.engine_process import engine_spec
from rltool.engines.launch.plan import Host, Model, Settings, engine_slots, plan_engines, seat_slots
from rltool.engines.types import GenerateRequest, SamplingParams
from rltool.errors import UsageError
from rltool.training.checks.preflight import check_fleet, probe_fleet, resolve_endpoints
from rltool.weights.sleep import check_can_sleep
from tests.contract.fakes.toy import FakeToy

CAN_BE_LEFT_OUT = {
    "counters", "parse_counters", "stream", "parse_event", "max_logprobs", "no_adapters", "no_fp8", "no_routed_experts",
    "no_fp8_after_sleep", "not_exact", "takes_rendezvous_port", "too_long",
}  # fmt: skip
SECONDS = 60.0


@pytest.fixture(autouse=True)
def known(monkeypatch):
    monkeypatch.setitem(ENGINES, "toy", "tests.contract.fakes.toy:ToyDialect")


def ask(engine: EngineEndpoint, scenario):
    async def main():
        async with EngineClient() as client:
            return await scenario(client, engine.probed(await client.probe(engine)))

    return asyncio.run(main())


def test_it_is_recognised_by_its_answer_and_generates_through_the_client():
    async def scenario(client, engine):
        assert engine.dialect == "toy"
        request = GenerateRequest((5, 6), SamplingParams(3), "a" * 32, n=2)
        await client.health(engine, timeout=SECONDS)
        await client.abort(engine, client.request_ids(engine, request), timeout=SECONDS)
        assert (await client.load(engine, timeout=SECONDS)).running == 3
        return await client.generate(engine, request, timeout=SECONDS)

    with FakeToy() as server:
        found = ask(EngineEndpoint(url=server.url), scenario)
        aborted = {path for path in server.paths() if path.startswith("/sample/")}
    assert [one.token_ids for one in found] == [(0, 1, 2)] * 2
    assert aborted == {f"/sample/{'a' * 32}-{index:04d}" for index in range(2)}


def plan(**group):
    slots = engine_slots([EngineGroup(engine="toy", **group)])
    settings = Settings({"policy": Model(Path("/m"))}, Path("/run/key"), Path("/run/state"))
    return plan_engines(slots, seat_slots(slots, [Host("h", gpus=(0, 1, 2, 3))]), settings, lambda *_: 20000)


def test_it_is_started_by_the_plan():
    specs = [engine_spec(launch) for launch in plan(count=2, tp=2, flags=("--x",)).launches]
    assert [spec.argv[1:] for spec in specs] == [("-m", "toy", "/m", "--port=20000", "--x")] * 2
    assert [spec.environment["TOY_GPUS"] for spec in specs] == ["0,1", "2,3"]
    assert specs[0].url == "http://127.0.0.1:20000"


@pytest.mark.parametrize(
    ("group", "why"),
    [
        ({"role": "prefill"}, "decode go together"),
        ({"count": 2, "engines_per_gpu": 2}, "Toy engines cannot be given a part of a GPU's memory"),
        ({"return_routed_experts": True}, "Toy does not return routed experts .*: it has no such flag"),
    ],
)
def test_a_plan_with_what_it_does_not_have_is_refused_by_name(group, why):
    with pytest.raises(UsageError, match=why):
        plan(**group)


def test_it_is_not_synced_put_to_sleep_or_inspected(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen2ForCausalLM"], "vocab_size": 100}))
    with FakeToy() as server:
        sets = [f'model.path="{tmp_path}"', f'engines.external=["{server.url}"]']
        config = load_config(TrainConfig, [], sets).config
        fleet = probe_fleet(resolve_endpoints(config), timeout=SECONDS)
        check_fleet(fleet, config, None)  # to generate alone
        with pytest.raises(UsageError, match="is of Toy, .* cannot pause it, put it to sleep, or send it weights"):
            check_fleet(fleet, config, "cpu")
        with pytest.raises(UsageError, match="is of Toy, .* no checksums"):
            ask(EngineEndpoint(url=server.url), lambda client, engine: client.checksums(engine, timeout=SECONDS))
    with pytest.raises(UsageError, match="is of Toy"):
        check_can_sleep(fleet.infos, "cuda", updated=True)
    with pytest.raises(UsageError, match="Toy engines cannot sleep"):
        with_sleep_flags(EngineGroup(engine="toy"), "cuda")


@pytest.mark.parametrize("name", [*ENGINES, "toy"])
def test_a_dialect_has_all_data_and_functions_of_its_parts(name):
    for found in {dialect(name), dialect(name, plugin=True)}:
        for part in (p for p in (Generates, Controls, Inspects, Launches) if isinstance(found, p)):
            stubs = {n for n, f in vars(part).items() if callable(f) and getattr(type(found), n) is f and n[0] != "_"}
            assert stubs <= CAN_BE_LEFT_OUT
            assert all(hasattr(found, n) for n in part.__annotations__)
