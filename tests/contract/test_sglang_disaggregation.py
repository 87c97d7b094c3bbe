"""SGLang's prefill and decode engines: who is sent what, what they are checked by, and what a sync does to them. Fakes
whose decode engines answer differently where the cache is of other weights than theirs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rltool.config.rollout import WeightsConfig
from rltool.engines.client import EngineClient
from rltool.engines.dialects.table import dialect
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet import disaggregation
from rltool.engines.fleet.canary import canary
from rltool.engines.fleet.fleet import State
from rltool.engines.types import Completion, TokenStream
from rltool.errors import EngineError
from rltool.weights.sync_report import WeightSyncFailed
from tests import fleets
from tests.contract import sync_rig
from tests.contract.fakes import rooms
from tests.contract.fakes.sglang import EXPECTED_KEY, FakeSglang, Fault, _outcome
from tests.contract.sync_rig import version
from tests.contract.test_data_plane import LONG, Rig, request, until
from tests.ranks import SenderRanks

GENERATE = "/generate"
DEADLINE = 20.0


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def pair(stack) -> tuple[FakeSglang, FakeSglang]:
    return tuple(stack.enter_context(FakeSglang(role=role)) for role in ("prefill", "decode"))  # type: ignore[return-value]


class Paired(Rig):
    def __init__(self, client: EngineClient, engines: list[Any], key: Path, **options: Any) -> None:
        super().__init__(client, engines, **options)
        for engine in engines:
            half = {"role": engine.role, "bootstrap_port": engine.bootstrap_port}
            fleets.describe(self.fleet, engine.url, endpoint={"dialect": "sglang", "key_file": key, **half})

    def finish(self, step: int, *engines: Any) -> None:
        super().finish(step, *engines)
        for engine in engines or self.engines:
            engine.version, engine.weight_version = "0.5.23", str(self.book.lineage.version(step))
            engine._changed()


@pytest.fixture
def run(tmp_path):
    key = tmp_path / "key"
    key.write_text(EXPECTED_KEY)

    def go(scenario, *engines: FakeSglang, **options: Any) -> None:
        async def start() -> None:
            async with EngineClient() as client:
                await scenario(Paired(client, list(engines), key, **options))

        asyncio.run(start())

    return go


def test_both_are_asked_at_once_and_meet_in_a_room_of_each_sample(run, stack, pair):
    prefill, decode = pair
    prefill.bootstrap_port = 9123
    alone = stack.enter_context(FakeSglang())

    async def scenario(r: Paired) -> None:
        found = await r.plane.generate(request(7, tokens=5, n=3))
        async with EngineClient() as client:
            other = r.endpoints[decode.url].model_copy(update={"url": alone.url, "role": "regular"})
            wanted = await client.generate(other, request(7, tokens=5, n=3), timeout=LONG)
        assert [c.token_ids for c in found] == [c.token_ids for c in wanted]
        assert sorted(prefill.rooms) == sorted(decode.rooms) and len(set(decode.rooms)) == 3
        assert {(host, port) for host, port, _ in decode.rooms} == {("127.0.0.1", 9123)}
        assert r.plane.in_flight == 0

    run(scenario, prefill, decode)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_sync_aborts_both_and_what_was_sampled_is_kept(run, pair, streamed):
    decode = pair[1]
    decode.seconds = LONG
    pieces: list[Completion] = []

    async def scenario(r: Paired) -> None:
        before = str(r.book.lineage.version(0))
        stream = TokenStream(pieces.append) if streamed else None
        task = asyncio.create_task(r.plane.generate(request(tokens=100), group=3, stream=stream))
        await until(lambda: decode.batch.running == 1, "it is being sampled")
        await until(lambda: len(pieces) > 1 or not streamed, "tokens come as they are made")
        for engine in pair:
            await r.plane._client.run(r.endpoints[engine.url], dialect("sglang").pause("abort"), timeout=LONG)
        [completion] = await asyncio.wait_for(task, LONG)
        assert completion.finish_reason == "abort" and completion.token_ids
        assert {span.version for span in completion.versions} == {before}
        assert sum(len(piece.token_ids) for piece in pieces) == len(completion.token_ids) * streamed

    run(scenario, *pair)


@pytest.mark.parametrize("streamed", [False, True])
def test_what_was_sampled_with_other_weights_than_both_had_is_sampled_again_and_nobody_is_blamed(run, pair, streamed):
    prefill, decode = pair
    pieces: list[Completion] = []
    decode.batch.freeze()  # it holds requests back until it is resumed

    async def scenario(r: Paired) -> None:
        stream = TokenStream(pieces.append) if streamed else None
        task = asyncio.create_task(r.plane.generate(request(), stream=stream))
        await until(lambda: decode.seen[GENERATE] == 1 and prefill.seen[GENERATE] == 1, "both are asked")
        # Its word alone, as of a sync that went on while the fleet was told nothing: the fleet withdraws nothing here.
        decode.weight_version = prefill.weight_version = str(r.book.begin(1))
        decode._changed()
        decode.batch.resume()
        await until(lambda: decode.seen[GENERATE] >= 2, "it is asked again")
        assert all(member.incidents == 0 for member in r.fleet.members())
        decode.weight_version = prefill.weight_version = str(r.book.lineage.version(0))
        decode._changed()
        [completion] = await asyncio.wait_for(task, LONG)
        assert sum(len(piece.token_ids) for piece in pieces) == len(completion.token_ids) * streamed

    run(scenario, *pair)


@pytest.mark.parametrize("failing", ["prefill", "decode"])
def test_a_failure_is_that_engines_and_the_request_goes_elsewhere(run, stack, failing):
    engines = [stack.enter_context(FakeSglang(role=role)) for role in ("prefill", "prefill", "decode", "decode")]
    broken = engines[0 if failing == "prefill" else 2]
    broken.faults[GENERATE] = Fault(times=1000, status=500)

    async def scenario(r: Paired) -> None:
        for number in range(6):
            assert await r.plane.generate(request(number))
        incidents = {member.url: member.incidents for member in r.fleet.members()}
        assert incidents[broken.url] > 0 and sum(incidents.values()) == incidents[broken.url]

    run(scenario, *engines)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_canary_asks_one_alone(run, pair, role):
    engine = pair[("prefill", "decode").index(role)]

    async def scenario(r: Paired) -> None:
        client, endpoint = r.plane._client, r.endpoints[engine.url]
        await asyncio.wait_for(canary(client, endpoint, "generate", timeout=LONG), LONG)
        assert engine.bodies[GENERATE]["bootstrap_host"] == rooms.NOWHERE and engine.rooms == []
        engine.faults[GENERATE] = Fault(status=500)
        with pytest.raises(EngineError):
            await canary(client, endpoint, "generate", timeout=LONG)

    run(scenario, *pair)


def test_an_engine_that_was_named_by_address_tells_its_role(run, pair):
    pair[0].bootstrap_port = 9123

    async def scenario(r: Paired) -> None:
        named = [EngineEndpoint(url=e.url, key_file=r.endpoints[e.url].key_file) for e in pair]
        found = [one.probed(await r.plane._client.probe(one)) for one in named]
        assert [(e.role, e.bootstrap_port) for e in found] == [("prefill", 9123), ("decode", None)]
        assert not any(map(disaggregation.samples_alone, found))

    run(scenario, *pair)


# -- weight syncs


class Ranks(SenderRanks):
    """They score what engines sampled as an engine that holds `a` does, and their own with `shift`."""

    engine: FakeSglang
    asked = 0

    def weights(self, step):
        return {"a": torch.full((4,), float(step))}

    async def logprobs(self, batch):
        self.asked += 1
        values, ends = [], batch.lengths.cumsum(0).tolist()
        for length, end in zip(batch.lengths.tolist(), ends, strict=True):
            response = int(batch.loss_mask[end - length : end].sum())
            values += [0.0] * (length - response)
            values += [self.engine.logprob(1, position) for position in range(response)]
        return torch.tensor(values)


def synced(engines, directory: Path, scenario) -> None:
    async def go() -> None:
        config = WeightsConfig(bucket_bytes=64, transport="disk", pause_mode="abort")
        ranks = partial(Ranks, deadline=DEADLINE)
        async with sync_rig.rig(engines, ranks, config, directory, deadline=DEADLINE) as r:
            r.ranks.engine = engines[-1]
            await scenario(r)

    asyncio.run(go())


def test_a_sync_reaches_both_and_their_values_are_checked_together(pair, tmp_path):
    pair[1].seconds = 0.5  # so that both checks run at once

    async def scenario(r) -> None:
        report = await r.sync.sync(version(1))
        assert not report.failed
        assert sorted(report.updated) == sorted(engine.url for engine in pair)
        assert r.states() == [State.READY] * 2 and r.ranks.asked == 1
        assert pair[0].weights == pair[1].weights != {}

    synced(pair, tmp_path, scenario)


class Stuck(FakeSglang):
    """It says that it has loaded what it was sent."""

    async def _load_directory(self, request):
        return _outcome(True)


def test_a_prefill_engine_that_keeps_its_old_weights_is_found_by_what_the_decode_samples(stack, pair, tmp_path):
    prefill = stack.enter_context(Stuck(role="prefill"))

    async def scenario(r) -> None:
        assert "log-probabilities differ from the trainer's" in await _failed(r)
        assert r.states() == [State.STALE] * 2, "which of them it is, nobody knows"

    synced([prefill, pair[1]], tmp_path, scenario)


async def _failed(r) -> str:
    with pytest.raises(WeightSyncFailed) as raised:
        await r.sync.sync(version(1))
    return str(raised.value)


def test_one_that_has_nobody_to_sample_with_is_not_taken_on_trust(stack, tmp_path):
    engine = stack.enter_context(FakeSglang(role="decode"))

    async def scenario(r) -> None:
        assert "samples only together with a prefill engine, and none holds the same weights" in await _failed(r)
        assert r.states() == [State.STALE]

    synced([engine], tmp_path, scenario)


def test_what_samples_together_for_a_check_holds_the_same_weights(run, pair):
    prefill, decode = pair

    async def scenario(r: Paired) -> None:
        r.sync(1, prefill)

        async def ask() -> list[Completion]:
            engine = r.fleet.member(decode.url)
            return await disaggregation.generate_at(r.plane._client, r.fleet, engine, request(), timeout=LONG)

        with pytest.raises(EngineError, match="none holds the same weights"):
            await ask()
        r.sync(1, decode)
        assert await ask()

    run(scenario, prefill, decode)
