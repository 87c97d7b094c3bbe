"""Prefill and decode on different vLLM engines: who is sent what, and what happens when one of them fails, is paused,
or holds other weights. Fakes that keep and fetch caches in name."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from rltool.engines.client import EngineClient
from rltool.engines.fleet.fleet import State
from rltool.engines.types import Completion, TokenStream
from rltool.errors import EngineRejected
from tests import fleets
from tests.contract.fakes.vllm import FakeVllm
from tests.contract.test_data_plane import GENERATE, LONG, Rig, aborted_ids, request, until

PLUGIN = "/rltool/generate"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def prefiller(stack: ExitStack) -> FakeVllm:
    engine = stack.enter_context(FakeVllm())
    engine.kv_connector = True
    return engine


@pytest.fixture
def pair(stack) -> tuple[FakeVllm, FakeVllm]:
    return prefiller(stack), stack.enter_context(FakeVllm())


class Paired(Rig):
    """The first `prefill` engines are for prefill, the others for decode."""

    def __init__(self, client: EngineClient, engines: list[FakeVllm], prefill: int = 1, **options) -> None:
        super().__init__(client, engines, **options)
        for engine in engines[:prefill]:
            fleets.describe(self.fleet, engine.url, endpoint={"role": "prefill"})


def run(scenario, *engines: FakeVllm, **options) -> None:
    async def go() -> None:
        async with EngineClient() as client:
            await scenario(Paired(client, list(engines), **options))

    asyncio.run(go())


def calls(engine: FakeVllm) -> list[dict]:
    return [recorded.body for recorded in engine.requests if recorded.path in (GENERATE, PLUGIN)]


def test_each_sample_passes_through_both_and_is_the_one_that_a_single_engine_samples(stack, pair):
    prefill, decode = pair
    alone = stack.enter_context(FakeVllm())

    async def scenario(r: Paired) -> None:
        found = await r.plane.generate(request(7, tokens=5, n=3))
        async with EngineClient() as client:
            other = Rig(client, [alone]).endpoints[alone.url]
            wanted = await client.generate(other, request(7, tokens=5, n=3), timeout=LONG)
        assert [c.token_ids for c in found] == [c.token_ids for c in wanted]
        first, second = calls(prefill), calls(decode)
        assert [body["sampling_params"]["max_tokens"] for body in first] == [1, 1, 1]
        assert {body["kv_transfer_params"]["do_remote_decode"] for body in first} == {True}
        assert [body["sampling_params"]["max_tokens"] for body in second] == [5, 5, 5]
        fetched = [params["remote_request_id"] for params in decode.fetched]
        assert sorted(fetched) == sorted(body["request_id"] for body in first) and len(set(fetched)) == 3
        assert r.plane.in_flight == 0

    run(scenario, prefill, decode)


def test_engines_for_prefill_sample_nothing_and_count_for_no_limit(stack, pair):
    prefill, decode = pair
    decode.seconds = LONG

    async def scenario(r: Paired) -> None:
        held = [asyncio.create_task(r.plane.generate(request(i, tokens=10), group=i)) for i in range(3)]
        await until(lambda: decode.batch.running == 2, "as many as one engine takes")
        await asyncio.sleep(0.05)
        assert r.plane.in_flight == 2 and len(calls(prefill)) == 2
        await r.plane.abort()
        assert set(aborted_ids(prefill)) == set(aborted_ids(decode)) != set()
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)

    run(scenario, prefill, decode, requests_per_engine=2)


def test_without_an_engine_for_prefill_requests_wait(pair):
    prefill, decode = pair

    async def scenario(r: Paired) -> None:
        r.fleet.process_exited(prefill.url, "killed")
        r.plane.changed()
        waiting = asyncio.create_task(r.plane.generate(request()))
        await asyncio.sleep(0.05)
        assert not waiting.done() and calls(decode) == []
        waiting.cancel()

    run(scenario, prefill, decode)


def test_a_pair_has_the_same_weights(stack, pair):
    prefill, decode = pair

    async def scenario(r: Paired) -> None:
        r.sync(1, prefill)
        waiting = asyncio.create_task(r.plane.generate(request()))
        await asyncio.sleep(0.05)
        assert not waiting.done() and calls(prefill) == [], "the cache would be of other weights than those that sample"
        r.sync(1, decode)
        [completion] = await asyncio.wait_for(waiting, LONG)
        assert {span.version for span in completion.versions} == {decode.version}

    run(scenario, prefill, decode)


def test_a_cache_that_a_sync_overtook_is_not_used_and_no_engine_is_blamed(pair):
    prefill, decode = pair
    prefill.delay(GENERATE, 0.3)

    async def scenario(r: Paired) -> None:
        task = asyncio.create_task(r.plane.generate(request()))
        await until(lambda: len(calls(prefill)) == 1, "the prefill is asked")
        r.sync(1)
        assert await asyncio.wait_for(task, LONG)
        assert len(calls(prefill)) == 2 and len(calls(decode)) == 1
        assert [r.state(engine) for engine in pair] == [State.READY] * 2
        assert all(member.incidents == 0 for member in r.fleet.members())

    run(scenario, prefill, decode)


def test_a_stream_comes_as_the_second_of_them_makes_it(stack, pair):
    prefill, decode = pair
    alone = stack.enter_context(FakeVllm())
    decode.seconds = 3.0
    pieces: list[Completion] = []

    async def scenario(r: Paired) -> None:
        fleets.describe(r.fleet, decode.url, endpoint={"plugin": True})
        task = asyncio.create_task(r.plane.generate(request(7, tokens=50), stream=TokenStream(pieces.append)))
        await until(lambda: len(pieces) > 1, "tokens come")
        assert not task.done() and not calls(prefill)[0].get("stream") and calls(decode)[0]["stream"]
        [found] = await asyncio.wait_for(task, LONG)
        async with EngineClient() as client:
            [wanted] = await client.generate(
                Rig(client, [alone]).endpoints[alone.url], request(7, tokens=50), timeout=LONG
            )
        assert found.token_ids == wanted.token_ids and found.logprobs == wanted.logprobs
        assert [token for piece in pieces for token in piece.token_ids] == list(found.token_ids)
        assert len(decode.fetched) == 1

    run(scenario, prefill, decode)


@pytest.mark.parametrize("ends", ["cancelled", "late", "broken"])
def test_a_stream_that_ends_early_leaves_nothing_behind_and_what_came_is_kept(pair, ends):
    prefill, decode = pair
    decode.seconds = LONG
    pieces: list[Completion] = []

    async def scenario(r: Paired) -> None:
        fleets.describe(r.fleet, decode.url, endpoint={"plugin": True})
        task = asyncio.create_task(r.plane.generate(request(tokens=3000), stream=TokenStream(pieces.append)))
        await until(lambda: len(pieces) > 1, "tokens come")
        if ends == "cancelled":
            task.cancel()
        elif ends == "broken":
            decode.drop_connections()
        [found] = await asyncio.wait_for(asyncio.gather(task, return_exceptions=True), LONG / 2)
        if ends == "cancelled":
            assert isinstance(found, asyncio.CancelledError)
        else:
            assert found[0].finish_reason == "abort"
            assert [token for piece in pieces for token in piece.token_ids] == list(found[0].token_ids)
        await until(lambda: decode.batch.running == 0, "the engine hears of it")
        assert (len(calls(prefill)), len(calls(decode)), r.plane.in_flight) == (1, 1, 0)
        incidents = {member.url: member.incidents for member in r.fleet.members()}
        assert incidents == {prefill.url: 0, decode.url: int(ends != "cancelled")}

    run(scenario, prefill, decode, deadline=2.0 if ends == "late" else LONG)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_sample_of_other_weights_than_its_cache_is_not_used(pair, streamed):
    """A request that reaches the decode engine only after the sync is not aborted."""
    prefill, decode = pair
    decode.delay(PLUGIN, 0.3)
    pieces: list[Completion] = []

    async def scenario(r: Paired) -> None:
        fleets.describe(r.fleet, decode.url, endpoint={"plugin": True})
        stream = TokenStream(pieces.append) if streamed else None
        task = asyncio.create_task(r.plane.generate(request(), stream=stream))
        await until(lambda: len(calls(decode)) == 1, "the decode is asked")
        r.sync(1)
        [completion] = await asyncio.wait_for(task, LONG)
        assert len(calls(prefill)) == len(calls(decode)) == 2
        assert {span.version for span in completion.versions} == {decode.version}
        assert sum(len(piece.token_ids) for piece in pieces) == len(completion.token_ids) * streamed
        assert all(member.incidents == 0 for member in r.fleet.members())

    run(scenario, prefill, decode)


@pytest.mark.parametrize("failing", ["prefill", "decode"])
def test_a_failure_is_that_engines_and_the_request_goes_elsewhere(stack, failing):
    engines = [prefiller(stack), prefiller(stack), *(stack.enter_context(FakeVllm()) for _ in range(2))]
    broken = engines[0 if failing == "prefill" else 2]
    broken.fail(GENERATE, 500)

    async def scenario(r: Paired) -> None:
        for number in range(6):
            assert await r.plane.generate(request(number))
        incidents = {member.url: member.incidents for member in r.fleet.members()}
        assert incidents[broken.url] > 0 and sum(incidents.values()) == incidents[broken.url]

    run(scenario, *engines, prefill=2)


def test_an_engine_without_a_connector_is_told(stack):
    plain, decode = stack.enter_context(FakeVllm()), stack.enter_context(FakeVllm())

    async def scenario(r: Paired) -> None:
        task = asyncio.create_task(r.plane.generate(request()))
        await until(lambda: r.state(plain) is State.SUSPECT, "it cannot do what it is for")
        assert "--kv-transfer-config" in r.fleet.member(plain.url).reason
        task.cancel()

    run(scenario, plain, decode)


def test_a_refusal_is_final_whoever_refuses(pair):
    prefill, decode = pair
    prefill.vocab_size = 2

    async def scenario(r: Paired) -> None:
        with pytest.raises(EngineRejected, match="out of vocabulary"):
            await r.plane.generate(request())

    run(scenario, prefill, decode)
