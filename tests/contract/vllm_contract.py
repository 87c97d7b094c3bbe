"""Assertions about a vLLM server started by rltool, run on the fake (contract) and on the real one (e2e)."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import accumulate

import pytest

from rltool.engines.client import EngineClient
from rltool.engines.dialects.supported import refusal
from rltool.engines.dialects.table import dialect
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet.lease import ask_lease
from rltool.engines.types import (
    Completion,
    EngineLoad,
    GenerateRequest,
    Holder,
    HttpRequest,
    SamplingParams,
    TokenStream,
)
from rltool.errors import EngineError, EngineRejected
from rltool.weights.transport import PausingControl, transport
from rltool.weights.transports.nccl_vllm import STOCK
from rltool.weights.transports.vllm import bucket_request

PROMPT = (40, 41, 17, 90, 33, 5)
SECONDS = 60.0
ARRIVAL_SECONDS = 0.5
"""A request that was sent is known to the server after this; no route tells, and a paused engine's metrics stand
still."""
DIALECT = dialect("vllm")


def request(**changes) -> GenerateRequest:
    sampling = {"max_tokens": 12, "ignore_eos": True} | changes.pop("sampling", {})
    return GenerateRequest(
        **(
            {"prompt_ids": PROMPT, "sampling": SamplingParams(**sampling), "request_id": uuid.uuid4().hex, "seed": 5}
            | changes
        )
    )


async def samples_of_a_prompt_are_distinct_and_repeatable(client: EngineClient, engine: EngineEndpoint) -> None:
    # Hot: other tests may have trained the engine's weights until it is nearly sure of each token.
    hot = {"temperature": 2.0}  # vLLM takes no more
    first = await client.generate(engine, request(n=4, sampling=hot), timeout=SECONDS)
    again = await client.generate(engine, request(n=4, sampling=hot), timeout=SECONDS)
    assert [sample.token_ids for sample in first] == [sample.token_ids for sample in again]
    assert len({sample.token_ids for sample in first}) == 4
    # sample i of a group is the sample that its own seed gives
    (third,) = await client.generate(engine, request(n=1, seed=7, sampling=hot), timeout=SECONDS)
    assert third.token_ids == first[2].token_ids


async def a_completion_has_one_logprob_per_token_and_spans_over_all(
    client: EngineClient, engine: EngineEndpoint
) -> None:
    (sample,) = await client.generate(engine, request(), timeout=SECONDS)
    assert len(sample.token_ids) == len(sample.logprobs) == 12
    assert sample.finish_reason == "length"
    assert all(value < 0 for value in sample.logprobs)
    assert [(span.start, span.end) for span in sample.versions] == [(0, 12)]


async def a_stop_token_ends_a_sample_and_is_part_of_it(client: EngineClient, engine: EngineEndpoint) -> None:
    (free,) = await client.generate(engine, request(), timeout=SECONDS)
    stop = free.token_ids[4]
    (stopped,) = await client.generate(engine, request(sampling={"stop_token_ids": (stop,)}), timeout=SECONDS)
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]


async def arrays_say_what_vllms_own_route_says(client: EngineClient, engine: EngineEndpoint) -> None:
    own, arrays = (engine.model_copy(update={"plugin": plugin}) for plugin in (False, True))
    (free,) = await client.generate(own, request(), timeout=SECONDS)
    for asked in (request(n=3), request(sampling={"stop_token_ids": (free.token_ids[4],)})):
        expected = await client.generate(own, asked, timeout=SECONDS)
        found = await client.generate(arrays, replace(asked, request_id=uuid.uuid4().hex), timeout=SECONDS)
        assert [(s.token_ids, s.finish_reason, s.versions) for s in found] == [
            (s.token_ids, s.finish_reason, s.versions) for s in expected
        ]
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)


async def a_prompt_that_was_seen_is_reported_as_cached(client: EngineClient, engine: EngineEndpoint) -> None:
    """By each of the three routes; of several samples vLLM counts one, which says nothing of the others."""
    generator = random.Random(uuid.uuid4().int)
    for route in (
        engine.model_copy(update={"plugin": False}),
        engine.model_copy(update={"plugin": True}),
        engine.model_copy(update={"dialect": "sglang"}),
    ):
        prompt = tuple(generator.randrange(2, 100) for _ in range(200))
        found = [
            (await client.generate(route, request(prompt_ids=prompt), timeout=SECONDS))[0].cached_tokens
            for _ in range(2)
        ]
        assert found[0] == 0 and found[1] is not None and 100 < found[1] < 200, found
    several = await client.generate(engine, request(prompt_ids=prompt, n=2), timeout=SECONDS)
    assert [sample.cached_tokens for sample in several] == [None, None]


async def a_sampling_mask_is_what_top_p_and_top_k_left(client: EngineClient, engine: EngineEndpoint) -> None:
    """That probabilities within it sum to 1 is checked by the dialects."""
    found = []
    for plugin in (False, True):
        asked = request(n=2, sampling={"top_p": 0.8, "top_k": 4, "return_sampling_mask": True})
        found.append(await client.generate(engine.model_copy(update={"plugin": plugin}), asked, timeout=SECONDS))
    own, arrays = found
    for mine, theirs in zip(own, arrays, strict=True):
        mask = mine.sampling_mask
        assert mask is not None and mask == theirs.sampling_mask and mine.token_ids == theirs.token_ids
        assert len(mask.counts) == 12 and set(mask.counts) <= {1, 2, 3, 4}
        ends = list(accumulate(mask.counts))
        places = [mask.ids[end - count : end] for end, count in zip(ends, mask.counts, strict=True)]
        assert all(token in place for token, place in zip(mine.token_ids, places, strict=True))
    (only_k,) = await client.generate(
        engine, request(sampling={"top_k": 3, "return_sampling_mask": True}), timeout=SECONDS
    )
    assert only_k.sampling_mask is not None and list(only_k.sampling_mask.counts) == [3] * 12
    (plain,) = await client.generate(engine, request(), timeout=SECONDS)
    assert plain.sampling_mask is None


async def generate_of_sglang_gives_the_same_sample(client: EngineClient, engine: EngineEndpoint) -> None:
    """Through the SGLang dialect, as through sglang-router."""
    as_sglang = engine.model_copy(update={"dialect": "sglang"})
    mine: list[Completion] = await client.generate(engine, request(n=2), timeout=SECONDS)
    theirs = await client.generate(as_sglang, request(n=2), timeout=SECONDS)
    assert [sample.token_ids for sample in theirs] == [sample.token_ids for sample in mine]
    for a, b in zip(mine, theirs, strict=True):
        assert b.logprobs == pytest.approx(a.logprobs, abs=1e-5)
        assert (b.finish_reason, b.versions) == (a.finish_reason, a.versions)


async def a_stream_is_the_whole_reply_in_pieces(client: EngineClient, engine: EngineEndpoint) -> None:
    """By the plugin's own route, and as through sglang-router."""
    [whole] = await client.generate(engine, request(), timeout=SECONDS)
    for route in (engine.model_copy(update=change) for change in ({"plugin": True}, {"dialect": "sglang"})):
        pieces: list[Completion] = []
        found = await client.stream(route, request(), TokenStream(pieces.append), timeout=SECONDS)
        assert (found.token_ids, found.finish_reason, found.versions) == (
            whole.token_ids, whole.finish_reason, whole.versions,
        )  # fmt: skip
        assert found.logprobs == pytest.approx(whole.logprobs, abs=1e-5)
        assert [token for piece in pieces for token in piece.token_ids] == [*whole.token_ids]
        too_long = request(prompt_ids=PROMPT * 1000)
        with pytest.raises(EngineRejected) as refused:
            await client.stream(route, too_long, TokenStream(pieces.append), timeout=SECONDS)
        assert refused.value.status == 400


async def generate_of_sglang_returns_a_list_for_several_samples(client: EngineClient, engine: EngineEndpoint) -> None:
    body = {"rid": uuid.uuid4().hex, "input_ids": list(PROMPT), "return_logprob": True}
    body["sampling_params"] = {"max_new_tokens": 3, "n": 2, "sampling_seed": 5, "ignore_eos": True, "top_k": -1}
    reply = await client.request(
        engine.url, HttpRequest("POST", "/generate", body), key=engine.read_key(), timeout=SECONDS, retry=False
    )
    assert [len(sample["output_ids"]) for sample in reply] == [3, 3]
    meta = reply[1]["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 3}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(PROMPT), 3)
    assert [entry[1:] for entry in meta["output_token_logprobs"]] == [[token, None] for token in reply[1]["output_ids"]]


async def a_parameter_that_is_not_known_is_refused_by_name(client: EngineClient, engine: EngineEndpoint) -> None:
    body = {"input_ids": list(PROMPT), "sampling_params": {"max_new_tokens": 3, "frobnicate": 2}}
    with pytest.raises(EngineRejected, match="frobnicate") as caught:
        await client.request(
            engine.url, HttpRequest("POST", "/generate", body), key=engine.read_key(), timeout=SECONDS, retry=True
        )
    assert caught.value.status == 400


async def requests_that_cannot_work_are_rejected_with_the_reason(client: EngineClient, engine: EngineEndpoint) -> None:
    for changes, reason in (
        ({"prompt_ids": (5, 4000)}, "vocabulary"),
        ({"prompt_ids": (5,) * 300}, "maximum model length"),
    ):
        with pytest.raises(EngineRejected, match=reason) as caught:
            await client.generate(engine, request(**changes), timeout=SECONDS)
        assert caught.value.status == 400


async def a_probe_finds_what_the_engine_is(client: EngineClient, engine: EngineEndpoint) -> None:
    info = await client.probe(engine.model_copy(update={"dialect": None}))
    assert (info.dialect, info.model_id) == ("vllm", "policy") and refusal("vllm", info.engine_version) is None
    assert (info.world_size, info.vocab_size, info.dtype, info.max_model_len) == (1, 120, "float32", 256)
    assert (info.weight_backend, info.plugin, info.paused) == ("rltool", True, False)
    assert info.boot_id == engine.boot_id
    assert info.model_config["model_type"] == "qwen2"
    assert info.weight_version


async def a_pause_is_seen_by_a_probe_and_ends_with_resume(client: EngineClient, engine: EngineEndpoint) -> None:
    engine_dialect = dialect("vllm")
    await client.run(engine, engine_dialect.pause("keep"), timeout=SECONDS)
    try:
        assert (await client.probe(engine)).paused is True
        await client.health(engine)
    finally:
        await client.run(engine, engine_dialect.resume(), timeout=SECONDS)
    assert (await client.probe(engine)).paused is False


async def a_sleeping_engine_holds_requests_back_until_its_cache_is_awake(
    client: EngineClient, engine: EngineEndpoint
) -> None:
    """A vLLM on the CPU keeps its memory, and all the rest is as on a GPU."""
    await client.sleep(engine, 2, timeout=SECONDS)
    try:
        assert (await client.probe(engine)).paused is True
        await client.health(engine)
        (held_back,) = await at_work(client, engine, request())
        await client.wake(engine, ["weights"], timeout=SECONDS)
        assert (await client.probe(engine)).paused is True and not held_back.done()
    finally:
        await client.wake(engine, timeout=SECONDS)
    assert [sample.finish_reason for sample in await held_back] == ["length"]
    assert (await client.probe(engine)).paused is False


async def an_aborting_pause_ends_what_is_there_and_has_what_comes_wait(
    client: EngineClient, engine: EngineEndpoint
) -> None:
    """vLLM 0.33 by itself refuses what comes (503), and a router would take the engine out."""
    async with paused(client, engine):
        (ended,) = await at_work(client, engine, request(n=2))
        await client.run(engine, DIALECT.pause("abort"), timeout=SECONDS)
        assert [sample.finish_reason for sample in await ended] == ["abort", "abort"]
        waits = asyncio.create_task(client.generate(engine, request(), timeout=SECONDS, attempts=1))
        await asyncio.sleep(ARRIVAL_SECONDS)
        assert (await client.probe(engine)).paused is True and not waits.done()
    assert [sample.finish_reason for sample in await waits] == ["length"]


async def a_sleep_of_level_0_keeps_requests_until_the_scheduler_is_woken(
    client: EngineClient, engine: EngineEndpoint
) -> None:
    """How a stock server is paused for weights over NCCL."""
    control = STOCK.control
    assert isinstance(control, PausingControl)
    (kept,) = await at_work(client, engine, request(sampling=LONG))  # the real server has not ended it yet
    await client.run(engine, control.pause(), timeout=SECONDS)
    try:
        assert (await client.probe(engine)).paused is True
        (held_back,) = await at_work(client, engine, request(sampling=LONG))
        assert not held_back.done()
        await client.run(engine, control.finish("v")[1:], timeout=SECONDS)
    finally:
        await client.run(engine, control.resume(), timeout=SECONDS)
    for (sample,) in await asyncio.gather(kept, held_back):
        assert (sample.finish_reason, len(sample.token_ids)) == ("length", LONG["max_tokens"])
    assert (await client.probe(engine)).paused is False


LONG = {"max_tokens": 240}
"""Takes the real server some tenths of a second at least."""


@contextlib.asynccontextmanager
async def paused(client: EngineClient, engine: EngineEndpoint) -> AsyncIterator[None]:
    await client.run(engine, DIALECT.pause("keep"), timeout=SECONDS)
    try:
        yield
    finally:
        await client.run(engine, DIALECT.resume(), timeout=SECONDS)


async def at_work(
    client: EngineClient, engine: EngineEndpoint, *requests: GenerateRequest
) -> list[asyncio.Task[list[Completion]]]:
    """The requests, sent and all in the engine's hands."""
    tasks = [asyncio.create_task(client.generate(engine, request, timeout=SECONDS)) for request in requests]
    await asyncio.sleep(ARRIVAL_SECONDS)
    return tasks


async def an_abort_ends_our_own_requests_alone(client: EngineClient, engine: EngineEndpoint) -> None:
    """Waiting in a paused engine; 70 samples are two requests, the second with a suffixed id; by either route."""
    as_sglang = engine.model_copy(update={"dialect": "sglang"})
    ours, theirs = request(n=70, sampling=LONG), request(n=2, sampling=LONG)
    async with paused(client, engine):
        through_plugin, direct = request(n=3, sampling=LONG), ours
        tasks = [*await at_work(client, as_sglang, through_plugin), *await at_work(client, engine, direct, theirs)]
        ids = [*client.request_ids(as_sglang, through_plugin), *client.request_ids(engine, direct)]
        async with asyncio.timeout(SECONDS):
            while not (tasks[0].done() and tasks[1].done()):  # a busy server may not have them yet
                await client.abort(engine, ids, timeout=SECONDS)
                await asyncio.wait(tasks[:2], timeout=0.2, return_when=asyncio.ALL_COMPLETED)
        assert not tasks[2].done()
    assert [sample.finish_reason for task in tasks[:2] for sample in task.result()] == ["abort"] * 73
    assert [(sample.finish_reason, len(sample.token_ids)) for sample in await tasks[2]] == [("length", 240)] * 2


async def an_aborted_sample_has_its_tokens_so_far(client: EngineClient, engine: EngineEndpoint) -> None:
    """Frozen in the middle: the tokens are those that an uninterrupted sample begins with."""
    asked = request(n=2, sampling=LONG)
    whole = await client.generate(engine, asked, timeout=SECONDS)
    again = replace(asked, request_id=uuid.uuid4().hex)
    seconds = 0.05
    for _ in range(20):  # until a pause meets it half-way, however fast the server is
        task = asyncio.create_task(client.generate(engine, again, timeout=SECONDS))
        await asyncio.sleep(seconds)
        async with paused(client, engine):
            while not task.done():  # a busy server may not have it yet
                await client.abort(engine, client.request_ids(engine, again), timeout=SECONDS)
                await asyncio.wait([task], timeout=0.2)
            cut = await task
        if all(0 < len(sample.token_ids) < 240 for sample in cut):
            break
        seconds *= 0.6 if cut[0].token_ids else 1.7
        again = replace(asked, request_id=uuid.uuid4().hex)
    assert [sample.finish_reason for sample in cut] == ["abort", "abort"]
    for part, sample in zip(cut, whole, strict=True):
        assert 0 < len(part.token_ids) == len(part.logprobs) < 240
        assert part.token_ids == sample.token_ids[: len(part.token_ids)]
        assert [(span.start, span.end) for span in part.versions] == [(0, len(part.token_ids))]


async def aborting_what_is_not_there_changes_nothing(client: EngineClient, engine: EngineEndpoint) -> None:
    async with paused(client, engine):
        asked = request(n=2)
        (task,) = await at_work(client, engine, asked)
        await client.abort(engine, [uuid.uuid4().hex, asked.request_id[:-1]], timeout=SECONDS)
        await client.abort(engine, [], timeout=SECONDS)
    assert [sample.finish_reason for sample in await task] == ["length", "length"]


async def the_load_tells_what_runs_and_what_waits(client: EngineClient, engine: EngineEndpoint) -> None:
    """64 sequences at once (max_num_seqs of our launch line): of 96 samples 32 wait."""
    while (await client.load(engine)).running:  # what the clauses before have left to be counted down
        await asyncio.sleep(0.05)
    assert await client.load(engine) == EngineLoad(0, 0, 0.0)
    tasks = [
        asyncio.create_task(client.generate(engine, request(n=n, sampling=LONG), timeout=SECONDS)) for n in (64, 32)
    ]
    seen = []
    while not all(task.done() for task in tasks):
        seen.append(await client.load(engine))
        await asyncio.sleep(0.01)
    assert any((load.running, load.waiting) == (64, 32) and 0 < load.kv_cache_usage < 1 for load in seen), seen
    await asyncio.gather(*tasks)


async def an_update_without_a_transfer_or_a_start_is_an_error(client: EngineClient, engine: EngineEndpoint) -> None:
    control = transport("vllm", "disk").control
    await client.run(engine, control.leave("g"), timeout=SECONDS)
    with pytest.raises(EngineError, match="no transfer was initialised"):
        await client.run(engine, control.begin(), timeout=SECONDS)
    with pytest.raises(EngineError, match="start_weight_update must be called"):
        await client.run(engine, [bucket_request((), path="/none")], timeout=SECONDS)
    with pytest.raises(EngineError, match="finish_weight_update called without"):
        await client.run(engine, control.finish("v"), timeout=SECONDS)


async def a_leased_engine_is_controlled_by_its_holder_alone(client: EngineClient, engine: EngineEndpoint) -> None:
    """Of two runs; the second steals it, and the first hears of that even when the second has gone."""
    first, second = (Holder(letter * 32, f"run-{letter}", "host", number) for number, letter in enumerate("ab", 1))
    async with EngineClient(run=first.run) as one, EngineClient(run=second.run) as two:
        assert (await ask_lease(one, engine, "acquire", first, SECONDS)).granted
        try:
            assert (await client.probe(engine)).lease.holder == first
            assert (await ask_lease(two, engine, "acquire", second, SECONDS)).taken_by == first
            for stranger in (client, two):
                with pytest.raises(EngineRejected, match=r"leased by run run-a \(pid 1 on host\)") as refused:
                    await stranger.run(engine, DIALECT.pause("keep"), timeout=SECONDS)
                assert refused.value.status == 409
            assert len((await two.generate(engine, request(), timeout=SECONDS))[0].token_ids) == 12
            async with paused(one, engine):
                assert (await client.probe(engine)).paused is True
            assert (await ask_lease(two, engine, "steal", second, SECONDS)).granted
            with pytest.raises(EngineRejected, match="taken over by run run-b"):
                await one.run(engine, DIALECT.leave_transfer("g"), timeout=SECONDS)
            async with paused(two, engine):
                assert (await client.probe(engine)).lease.holder == second
        finally:
            await ask_lease(two, engine, "release", second, SECONDS)
            await ask_lease(one, engine, "release", first, SECONDS)
        assert (await client.probe(engine)).lease is None
        assert (await ask_lease(one, engine, "renew", first, SECONDS)).taken_by == second


async def the_key_is_demanded_and_unknown_routes_do_not_exist(client: EngineClient, engine: EngineEndpoint) -> None:
    for path in ("/version", "/pause", "/collective_rpc"):
        with pytest.raises(EngineRejected) as caught:
            await client.request(engine.url, HttpRequest("POST", path), key="wrong", timeout=SECONDS, retry=False)
        assert caught.value.status == 401
    with pytest.raises(EngineRejected, match="/collective_rpc") as caught:
        await client.request(
            engine.url, HttpRequest("POST", "/collective_rpc", {}), key=engine.read_key(), timeout=SECONDS, retry=False
        )
    assert caught.value.status == 404


async def given_tokens_are_scored_as_they_were_when_they_were_sampled(
    client: EngineClient, engine: EngineEndpoint
) -> None:
    prompt = (*PROMPT, 7, 8)
    (sample,) = await client.generate(engine, request(prompt_ids=prompt), timeout=SECONDS)
    scores = await client.score(engine, (*prompt, *sample.token_ids), timeout=SECONDS)
    assert len(scores) == len(prompt) + len(sample.token_ids) - 1
    assert scores[len(prompt) - 1 :] == pytest.approx(sample.logprobs, abs=1e-4)


async def the_most_probable_tokens_of_each_place_come_with_the_scores(
    client: EngineClient, engine: EngineEndpoint
) -> None:
    (sample,) = await client.generate(engine, request(), timeout=SECONDS)
    tokens = (*PROMPT, *sample.token_ids)
    found = await client.score_topk(engine, tokens, 4, timeout=SECONDS)
    assert found.logprobs == pytest.approx(await client.score(engine, tokens, timeout=SECONDS), abs=1e-4)
    assert len(found.topk_ids) == len(found.topk_logprobs) == 4 * (len(tokens) - 1)
    for place, (token, own) in enumerate(zip(tokens[1:], found.logprobs, strict=True)):
        ids, values = (list(kept[4 * place : 4 * place + 4]) for kept in (found.topk_ids, found.topk_logprobs))
        assert len(set(ids)) == 4 and values == sorted(values, reverse=True) and sum(map(math.exp, values)) < 1 + 1e-5
        if token in ids:
            assert values[ids.index(token)] == pytest.approx(own, abs=1e-5)
        else:
            assert own <= values[-1] + 1e-5
    most = (await client.probe(engine)).max_logprobs
    assert most is not None
    with pytest.raises(EngineRejected, match=f"logprobs of {most + 1}, which is greater than max allowed: {most}"):
        await client.score_topk(engine, tokens, most + 1, timeout=SECONDS)


async def the_plugin_gives_the_checksums_that_vllm_has(client: EngineClient, engine: EngineEndpoint) -> None:
    info = await client.probe(engine)
    ours = await client.checksums(engine.model_copy(update={"plugin": info.plugin}), timeout=SECONDS)
    assert ours is not None and all(name.startswith("dp0:pp0:pcp0:tp0:") for name in ours)
    stock = engine.model_copy(update={"plugin": False})
    assert await client.checksums(stock, timeout=SECONDS) is None, "vLLM's own route also resets: it is closed"


CONTRACT = [
    given_tokens_are_scored_as_they_were_when_they_were_sampled,
    the_most_probable_tokens_of_each_place_come_with_the_scores,
    the_plugin_gives_the_checksums_that_vllm_has,
    samples_of_a_prompt_are_distinct_and_repeatable,
    a_completion_has_one_logprob_per_token_and_spans_over_all,
    a_stop_token_ends_a_sample_and_is_part_of_it,
    arrays_say_what_vllms_own_route_says,
    a_prompt_that_was_seen_is_reported_as_cached,
    a_sampling_mask_is_what_top_p_and_top_k_left,
    generate_of_sglang_gives_the_same_sample,
    a_stream_is_the_whole_reply_in_pieces,
    generate_of_sglang_returns_a_list_for_several_samples,
    a_parameter_that_is_not_known_is_refused_by_name,
    requests_that_cannot_work_are_rejected_with_the_reason,
    a_probe_finds_what_the_engine_is,
    a_pause_is_seen_by_a_probe_and_ends_with_resume,
    a_sleeping_engine_holds_requests_back_until_its_cache_is_awake,
    a_sleep_of_level_0_keeps_requests_until_the_scheduler_is_woken,
    an_aborting_pause_ends_what_is_there_and_has_what_comes_wait,
    an_abort_ends_our_own_requests_alone,
    an_aborted_sample_has_its_tokens_so_far,
    aborting_what_is_not_there_changes_nothing,
    the_load_tells_what_runs_and_what_waits,
    an_update_without_a_transfer_or_a_start_is_an_error,
    a_leased_engine_is_controlled_by_its_holder_alone,
    the_key_is_demanded_and_unknown_routes_do_not_exist,
]
