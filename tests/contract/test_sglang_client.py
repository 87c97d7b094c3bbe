"""rltool's client, dialect, fleet and gloo group against the fake SGLang, with a network in between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import torch
import torch.distributed
from safetensors.torch import save_file

from rltool.engines.client import EngineClient, RetryPolicy
from rltool.engines.dialects.table import dialect
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet import disaggregation
from rltool.engines.fleet.fleet import Fleet, State
from rltool.engines.transfer.wire import host_store
from rltool.engines.types import (
    EngineLoad,
    GenerateRequest,
    HttpRequest,
    Picture,
    SamplingParams,
    TensorMeta,
    TokenStream,
    VersionSpan,
)
from rltool.engines.weight_version import WeightVersion
from rltool.errors import (
    EngineError,
    EngineRejected,
    EngineUnreachable,
    MissingLogprobs,
    PicturesDiffer,
    UsageError,
)
from rltool.weights.transport import Rendezvous, transport
from rltool.weights.transports.sglang_group import open_sglang_group
from tests import fleets
from tests.contract.fakes.sglang import EXPECTED_KEY, PAD, FakeSglang, Fault

SPEAKS = dialect("sglang")
CONTROL = transport("sglang", "gloo").control
GROUP = "test-weights"
SECONDS = 60.0
TENSORS = {
    "embed": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "norm": torch.ones(5, dtype=torch.bfloat16),
    "bias": torch.tensor([0.5], dtype=torch.bfloat16),
}
BUCKET = tuple(
    TensorMeta(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in TENSORS.items()
)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    (tmp_path / "key").write_text(EXPECTED_KEY)
    return tmp_path / "key"


@pytest.fixture
def engine():
    with FakeSglang() as server:
        yield server


def endpoint(server: FakeSglang, key_file: Path | None, name: str | None = "sglang") -> EngineEndpoint:
    return EngineEndpoint(url=server.url, dialect=name, key_file=key_file)


def request(n: int = 1, seed: int = 3, max_tokens: int = 8, prompt: tuple[int, ...] = (1, 2, 3)) -> GenerateRequest:
    return GenerateRequest(prompt, SamplingParams(max_tokens), "ab" * 16, n=n, seed=seed)


def play(scenario: Callable[[EngineClient], Awaitable[None]]) -> None:
    async def run() -> None:
        async with EngineClient(retry=RetryPolicy(attempts=3, first_delay=0.01)) as client:
            await scenario(client)

    asyncio.run(asyncio.wait_for(run(), 60))


class Trainer:
    """The other side of a gloo sync, as one rank."""

    def __init__(self, client: EngineClient, where: EngineEndpoint) -> None:
        self.client, self.where = client, where

    async def tell(self, requests: list[HttpRequest]) -> list:
        return await self.client.run(self.where, requests, timeout=SECONDS)

    async def join(self):
        store = host_store("127.0.0.1", 0, SECONDS)
        meeting = Rendezvous("gloo", 2, GROUP, "127.0.0.1", store.port)
        init = CONTROL.init(meeting, rank_offset=1, timeout_seconds=SECONDS)
        opening = asyncio.to_thread(open_sglang_group, store, 2, GROUP, SECONDS)
        group, _ = await asyncio.gather(opening, self.tell(init))
        return group

    async def send(self, group, tensors=TENSORS, bucket=BUCKET) -> None:
        flat = torch.cat([tensor.flatten().view(torch.uint8) for tensor in tensors.values()])
        [(request, _)] = CONTROL.announce([bucket], Rendezvous("gloo", 2, GROUP), version="v1")
        announce = self.tell([request])
        await asyncio.gather(announce, asyncio.to_thread(lambda: group.broadcast(flat, 0).wait()))


# -- generation


def test_samples_of_one_prompt_are_distinct_and_the_same_again(engine, key_file):
    async def scenario(client):
        first = await client.generate(endpoint(engine, key_file), request(n=4), timeout=SECONDS)
        again = await client.generate(endpoint(engine, key_file), request(n=4), timeout=SECONDS)
        assert len({sample.token_ids for sample in first}) == 4
        assert first == again
        assert first[2].logprobs[5] == engine.logprob(seed=5, position=5)

    play(scenario)


@pytest.mark.parametrize("incremental", [True, False])
def test_a_stream_is_the_whole_reply_token_by_token(engine, key_file, incremental):
    engine.incremental = incremental

    async def scenario(client):
        [whole] = await client.generate(endpoint(engine, key_file), request(), timeout=SECONDS)
        engine.seconds, pieces = 0.2, []
        stream = TokenStream(pieces.append)
        assert await client.stream(endpoint(engine, key_file), request(), stream, timeout=SECONDS) == whole
        assert len(pieces) > 2
        assert [token for piece in pieces for token in piece.token_ids] == [*whole.token_ids]
        engine.drop_logprobs = True
        with pytest.raises(MissingLogprobs):
            await client.stream(endpoint(engine, key_file), request(), TokenStream(print), timeout=SECONDS)

    play(scenario)


@pytest.mark.parametrize("incremental", [True, False])
def test_a_stream_goes_on_over_a_sync(engine, key_file, incremental):
    engine.incremental, engine.seconds = incremental, 4.0  # for 8 tokens

    async def scenario(client):
        first = asyncio.Event()
        stream = TokenStream(lambda piece: first.set())
        asked = asyncio.create_task(client.stream(endpoint(engine, key_file), request(), stream, timeout=SECONDS))
        await first.wait()
        known = stream.completion()
        assert known.versions == (VersionSpan("default", 0, len(known.token_ids)),)
        trainer = Trainer(client, endpoint(engine, key_file))
        await trainer.tell([*SPEAKS.pause("keep"), *CONTROL.begin(), *CONTROL.finish("next"), *SPEAKS.resume()])
        found = await asked
        assert [span.version for span in found.versions] == ["default", "next"]
        assert (found.versions[0].end, found.versions[1].end) == (found.versions[1].start, len(found.token_ids))
        assert len(found.token_ids) == 8 and found.finish_reason == "length"

    play(scenario)


def test_a_request_without_the_key_is_refused_and_the_message_says_so(engine):
    async def scenario(client):
        with pytest.raises(EngineRejected, match="key_file") as refused:
            await client.generate(endpoint(engine, None), request(), timeout=SECONDS)
        assert refused.value.status == 401

    play(scenario)


def test_a_server_error_is_tried_again_and_a_400_is_not(engine, key_file):
    async def scenario(client):
        engine.faults["/generate"] = Fault(times=2, status=503)
        assert len(await client.generate(endpoint(engine, key_file), request(), timeout=SECONDS)) == 1
        assert engine.seen["/generate"] == 3

        engine.faults["/generate"] = Fault(times=1, status=400)
        with pytest.raises(EngineRejected, match="fault 400"):
            await client.generate(endpoint(engine, key_file), request(), timeout=SECONDS)
        assert engine.seen["/generate"] == 4

    play(scenario)


def test_a_reset_connection_is_tried_again(engine, key_file):
    async def scenario(client):
        engine.faults["/generate"] = Fault(times=1, reset=True)
        assert len(await client.generate(endpoint(engine, key_file), request(), timeout=SECONDS)) == 1

    play(scenario)


def test_an_engine_that_never_answers_is_given_up_at_the_deadline(engine, key_file):
    async def scenario(client):
        engine.faults["/generate"] = Fault(hang=True)
        with pytest.raises(EngineUnreachable, match=r"within 0\.2 s"):
            await client.generate(endpoint(engine, key_file), request(), timeout=0.2)

    play(scenario)


def test_an_engine_that_dies_under_a_request_is_unreachable(engine, key_file):
    engine.seconds = 100.0

    async def scenario(client):
        running = asyncio.create_task(
            client.generate(endpoint(engine, key_file), request(max_tokens=10_000), timeout=SECONDS)
        )
        await asyncio.to_thread(engine.wait_in_flight, 1)
        await asyncio.to_thread(engine.die)
        with pytest.raises(EngineUnreachable):
            await running

    play(scenario)


def test_a_foreign_token_id_kills_the_server_hence_the_check_before(engine, key_file):
    async def scenario(client):
        with pytest.raises(EngineUnreachable):
            await client.generate(endpoint(engine, key_file), request(prompt=(1, 100)), timeout=SECONDS)

    play(scenario)


def test_a_reply_without_logprobs_is_not_used(engine, key_file):
    engine.drop_logprobs = True

    async def scenario(client):
        with pytest.raises(MissingLogprobs, match="8 tokens and 0"):
            await client.generate(endpoint(engine, key_file), request(), timeout=SECONDS)

    play(scenario)


# -- probing and pausing


def test_an_address_alone_is_enough_to_find_out_what_it_is(engine, key_file):
    async def scenario(client):
        info = await client.probe(endpoint(engine, key_file, name=None))
        assert (info.dialect, info.model_id, info.world_size, info.paused) == ("sglang", "policy", 1, False)

    play(scenario)


def test_a_paused_engine_can_be_probed_and_says_so(engine, key_file):
    async def scenario(client):
        where = endpoint(engine, key_file)
        await client.run(where, SPEAKS.pause("keep"), timeout=SECONDS)
        assert (await client.probe(where)).paused is True
        with pytest.raises(EngineError, match="503"):
            await client.health(where)
        await client.run(where, SPEAKS.resume(), timeout=SECONDS)
        assert (await client.probe(where)).paused is False
        await client.health(where)

    play(scenario)


@pytest.mark.parametrize("version", ["0.5.17", "0.5.18", "0.5.19", "0.5.20"])
def test_an_earlier_version_is_probed_with_the_routes_that_it_has(version, key_file):
    async def scenario(client):
        where = endpoint(engine, key_file, name=None)
        info = await client.probe(where)
        where = endpoint(engine, key_file)
        await client.health(where)
        assert (info.engine_version, info.paused) == (version, False if version == "0.5.20" else None)
        await client.run(where, CONTROL.finish("v1"), timeout=SECONDS)
        again = await client.probe(where)
        assert again.boot_id == info.boot_id is not None and again.weight_version == "v1"

    with FakeSglang(version=version, weight_version=f"boot-{'ab' * 16}") as engine:
        play(scenario)


def test_a_kept_request_goes_on_after_a_sync_and_names_both_versions(engine, key_file):
    engine.seconds = 0.3

    async def scenario(client):
        where = endpoint(engine, key_file)
        running = asyncio.create_task(client.generate(where, request(max_tokens=60), timeout=SECONDS))
        await asyncio.to_thread(engine.wait_in_flight, 1)
        requests = [*SPEAKS.pause("keep"), *CONTROL.begin(), *CONTROL.finish("v1"), *SPEAKS.resume()]
        await client.run(where, requests, timeout=SECONDS)
        (sample,) = await running
        assert [span.version for span in sample.versions] == ["default", "v1"]
        assert sample.versions[0].end == sample.versions[1].start and sample.versions[1].end == 60
        assert sample.finish_reason == "length"

    play(scenario)


def test_a_sleeping_engine_takes_weights_before_its_cache_wakes_and_then_generates(engine, key_file):
    engine.seconds = 50.0

    async def scenario(client):
        where, trainer = endpoint(engine, key_file), Trainer(client, endpoint(engine, key_file))
        assert (await client.probe(where)).sleep_levels == (2,)
        running = asyncio.create_task(client.generate(where, request(max_tokens=60), timeout=SECONDS))
        await asyncio.to_thread(engine.wait_in_flight, 1)
        await client.sleep(where, 2, timeout=SECONDS)
        assert [sample.finish_reason for sample in await running] == ["abort"]
        assert (engine.asleep, engine.weights) == ({"weights", "kv_cache", "cuda_graph"}, {})
        engine.seconds = 0.0
        held_back = asyncio.create_task(client.generate(where, request(), timeout=SECONDS))

        await client.wake(where, ["weights"], timeout=SECONDS)
        group = await trainer.join()
        await trainer.tell(CONTROL.begin())
        await trainer.send(group)
        await trainer.tell(CONTROL.finish("v1"))
        assert not held_back.done()

        await client.wake(where, ["kv_cache"], timeout=SECONDS)
        (sample,) = await held_back
        assert [span.version for span in sample.versions] == ["v1"]
        assert set(engine.weights) == set(TENSORS) and engine.asleep == set()

    play(scenario)


def test_an_aborted_request_comes_back_with_what_it_has(engine, key_file):
    engine.seconds = 50.0

    async def scenario(client):
        where = endpoint(engine, key_file)
        running = asyncio.create_task(client.generate(where, request(max_tokens=10_000), timeout=SECONDS))
        await asyncio.to_thread(engine.wait_in_flight, 1)
        await client.run(where, [*SPEAKS.pause("abort"), *SPEAKS.resume()], timeout=SECONDS)
        (sample,) = await running
        assert sample.finish_reason == "abort" and 0 < len(sample.token_ids) == len(sample.logprobs) < 10_000

    play(scenario)


def test_an_abort_ends_our_own_requests_alone_and_they_come_back_with_what_they_have(engine, key_file):
    engine.seconds = 2.0

    async def scenario(client):
        where = endpoint(engine, key_file)
        ours, theirs = (GenerateRequest((1,), SamplingParams(100), letter * 32, n=2, seed=3) for letter in "ab")
        tasks = [asyncio.create_task(client.generate(where, asked, timeout=SECONDS)) for asked in (ours, theirs)]
        await asyncio.to_thread(engine.wait_in_flight, 4)
        await client.abort(where, [*client.request_ids(where, ours), "c" * 32, "a" * 32], timeout=SECONDS)
        cut, whole = [await task for task in tasks]
        assert all(
            sample.finish_reason == "abort" and 0 < len(sample.token_ids) == len(sample.logprobs) < 100
            for sample in cut
        )
        assert [(sample.finish_reason, len(sample.token_ids)) for sample in whole] == [("length", 100)] * 2

    play(scenario)


def test_a_paused_engine_ends_what_it_was_generating_but_does_not_know_yet_what_came_since(engine, key_file):
    engine.seconds = 5.0

    async def scenario(client):
        where = endpoint(engine, key_file)
        before, since = (GenerateRequest((1,), SamplingParams(100), letter * 32, seed=3) for letter in "ab")
        running = asyncio.create_task(client.generate(where, before, timeout=SECONDS))
        await asyncio.to_thread(engine.wait_in_flight, 1)
        await client.run(where, SPEAKS.pause("keep"), timeout=SECONDS)
        held_back = asyncio.create_task(client.generate(where, since, timeout=SECONDS))
        while engine.seen["/generate"] < 2:
            await asyncio.sleep(0.001)
        ids = [before.request_id, since.request_id]
        await client.abort(where, ids, timeout=SECONDS)
        (sample,) = await running
        assert sample.finish_reason == "abort" and 0 < len(sample.token_ids) < 100
        await client.run(where, SPEAKS.resume(), timeout=SECONDS)
        await asyncio.to_thread(engine.wait_in_flight, 1)
        assert not held_back.done()
        await client.abort(where, ids, timeout=SECONDS)
        (sample,) = await held_back
        assert sample.finish_reason == "abort" and 0 < len(sample.token_ids) < 100

    play(scenario)


def test_the_load_is_what_runs_what_waits_and_how_full_the_cache_is(engine, key_file):
    engine.seconds, engine.batch.slots, engine.batch.kv_tokens = 5.0, 2, 100

    async def scenario(client):
        where = endpoint(engine, key_file)
        assert await client.load(where) == EngineLoad(0, 0, 0.0)
        asked = request(n=3)
        task = asyncio.create_task(client.generate(where, asked, timeout=SECONDS))
        while not engine.batch.waiting:
            await asyncio.sleep(0.001)
        load = await client.load(where)
        assert (load.running, load.waiting) == (
            2,
            1,
        ) and 0.08 <= load.kv_cache_usage < 0.3  # two prompts of 3 tokens and more
        await client.abort(where, client.request_ids(where, asked), timeout=SECONDS)
        assert [sample.finish_reason for sample in await task] == ["abort"] * 3

    play(scenario)


# -- weights


def test_every_byte_arrives_over_gloo_and_generation_changes(engine, key_file):
    async def scenario(client):
        trainer = Trainer(client, endpoint(engine, key_file))
        (before,) = await client.generate(trainer.where, request(), timeout=SECONDS)
        group = await trainer.join()
        await trainer.tell([*SPEAKS.pause("keep"), *CONTROL.begin()])
        await trainer.send(group)
        assert engine.weight_version == "default"  # not before the end
        await trainer.tell([*CONTROL.finish("v1"), *SPEAKS.resume(), *CONTROL.leave(GROUP)])
        for name, tensor in TENSORS.items():
            assert engine.weights[name] == tensor.flatten().view(torch.uint8).numpy().tobytes()
        (after,) = await client.generate(trainer.where, request(), timeout=SECONDS)
        assert after.logprobs != before.logprobs
        assert [span.version for span in after.versions] == ["v1"]

    play(scenario)


def test_the_group_leaves_torchs_default_group_alone(engine, key_file, tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        default = torch.distributed.group.WORLD

        async def scenario(client):
            trainer = Trainer(client, endpoint(engine, key_file))
            group = await trainer.join()
            await trainer.tell(CONTROL.begin())
            await trainer.send(group)
            assert torch.distributed.group.WORLD is default

        play(scenario)
        total = torch.ones(1)
        torch.distributed.all_reduce(total)
        assert total.item() == 1
    finally:
        engine.die()
        for name in list(engine._groups):
            engine._leave(name)
        torch.distributed.destroy_process_group()


def test_a_trainer_that_waits_for_an_engine_gives_up_at_its_deadline():
    with pytest.raises(RuntimeError):
        open_sglang_group(host_store("127.0.0.1", 0, 0.5), 2, GROUP, 0.5)


def test_a_sync_that_failed_midway_does_not_block_the_next_one(engine, key_file):
    async def scenario(client):
        trainer = Trainer(client, endpoint(engine, key_file))
        await trainer.join()
        await trainer.tell(CONTROL.begin())  # and here the trainer dies
        with pytest.raises(EngineRejected, match="already open"):
            await trainer.tell(CONTROL.begin())

        await trainer.tell(CONTROL.leave(GROUP))
        group = await trainer.join()
        await trainer.tell(CONTROL.begin())
        await trainer.send(group)
        await trainer.tell(CONTROL.finish("v1"))
        assert engine.weight_version == "v1"
        await trainer.tell([*CONTROL.leave(GROUP), *CONTROL.leave(GROUP)])

    play(scenario)


def test_a_directory_is_loaded_once_it_is_complete(engine, key_file, tmp_path):
    async def scenario(client):
        (tmp_path / "v1").mkdir()
        files = [tmp_path / "v1" / f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
        save_file({"embed": TENSORS["embed"]}, files[0])
        save_file({"norm": TENSORS["norm"], "bias": TENSORS["bias"]}, files[1])
        where = endpoint(engine, key_file)
        meeting = Rendezvous("disk", 2, GROUP, directory=str(tmp_path))
        announced = transport("sglang", "disk").control.announce([BUCKET[:1], BUCKET[1:]], meeting, version="v1")
        requests = [request for request, _ in announced]
        await client.run(where, [*CONTROL.begin(), *requests, *CONTROL.finish("v1")], timeout=SECONDS)
        assert engine.seen["/update_weights_from_disk"] == 1
        assert set(engine.weights) == set(TENSORS)
        assert engine.weight_version == "v1"

    play(scenario)


def test_a_flush_that_is_refused_leaves_the_old_version_name(engine, key_file):
    async def scenario(client):
        engine.faults["/flush_cache"] = Fault(status=400)
        with pytest.raises(EngineRejected, match="flush_cache"):
            await client.run(endpoint(engine, key_file), [*CONTROL.begin(), *CONTROL.finish("v1")], timeout=SECONDS)
        assert engine.weight_version == "default"

    play(scenario)


# -- the fleet


def test_a_server_restarted_under_its_old_url_is_stale_whatever_version_it_claims(key_file):
    async def scenario(client):
        fleet = Fleet()

        async def probe(where: EngineEndpoint) -> None:
            sent_at = time.monotonic()
            try:
                await client.health(where)
                info = await client.probe(where)
            except EngineError as error:
                fleet.probe_failed(where.url, str(error), sent_at=sent_at)
            else:
                fleet.probe_succeeded(where.url, info, sent_at=sent_at)

        version = WeightVersion("ab" * 16, 0, 0)
        with FakeSglang(weight_version=str(version)) as first:
            where = endpoint(first, key_file)
            fleets.add(fleet, where)
            await probe(where)
            fleet.pause(where.url)
            fleet.update_began(where.url)
            fleet.update_finished(where.url, version)
            fleet.advance(version)
            fleet.resume(where.url)
            await probe(where)
            assert fleet.serving() == (where.url,)
        with FakeSglang(weight_version=str(version), port=first.port):
            await probe(where)
            assert fleet.member(where.url).state is State.STALE

    play(scenario)


# -- pictures


def seeing(n: int = 1) -> GenerateRequest:
    pictures = (Picture(1, 2, "data:A"), Picture(4, 3, "data:AB"))
    return GenerateRequest((5, PAD, PAD, 6, PAD, PAD, PAD, 7), SamplingParams(4), "cd" * 16, n=n, pictures=pictures)


def expanded(ids: list[int], urls: list[str], *, more: int = 1) -> list[int]:
    """As many tokens as a URL has letters behind its colon, and one."""
    left = iter(urls)
    return [out for token in ids for out in ([PAD] * (len(next(left)) - 5 + more) if token == PAD else [token])]


def test_an_engine_that_expands_pictures_as_the_trainer_does_samples_and_another_is_refused(engine, key_file):
    async def scenario(client: EngineClient) -> None:
        engine.expand = expanded
        found = await client.generate(endpoint(engine, key_file), seeing(2), timeout=30)
        assert [len(one.token_ids) for one in found] == [4, 4]
        assert engine.bodies["/generate"]["image_data"] == ["data:A", "data:AB"]
        again = await client.stream(endpoint(engine, key_file), seeing(), TokenStream(print), timeout=30)
        assert again.token_ids == (await client.generate(endpoint(engine, key_file), seeing(), timeout=30))[0].token_ids
        engine.expand = lambda ids, urls: expanded(ids, urls, more=2)
        with pytest.raises(PicturesDiffer, match="to 10 tokens, the trainer's 8"):
            await client.generate(endpoint(engine, key_file), seeing(), timeout=30)
        with pytest.raises(PicturesDiffer, match="to 10 tokens, the trainer's 8"):
            await client.stream(endpoint(engine, key_file), seeing(), TokenStream(print), timeout=30)
        engine.expand, engine.returns_prompt = expanded, False
        with pytest.raises(PicturesDiffer, match="does not say to which tokens"):
            await client.generate(endpoint(engine, key_file), seeing(), timeout=30)

    play(scenario)


def test_a_prefill_engine_and_another_are_asked_for_text_alone(engine, key_file):
    async def scenario(client: EngineClient) -> None:
        both = endpoint(engine, key_file)
        with pytest.raises(UsageError, match="a prefill engine with another takes text alone"):
            await disaggregation.generate(client, both, both, seeing(), timeout=30)

    play(scenario)
