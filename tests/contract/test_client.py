"""EngineClient against a fake vLLM with faults: what is retried, what is not, and what the user reads in the end."""

import asyncio
import uuid

import pytest

from rltool.engines.client import EngineClient, RetryPolicy, _Temporary
from rltool.engines.dialects.table import dialect
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.types import GenerateRequest, HttpRequest, SamplingParams
from rltool.errors import EngineError, EngineRejected, EngineUnreachable, MissingLogprobs, UsageError
from rltool.weights.transport import transport
from tests.contract.fakes.server import FakeServer

GENERATE = "/inference/v1/generate"
QUICK = RetryPolicy(attempts=4, first_delay=0.001, longest_delay=0.002)


@pytest.fixture
def engine(fake_vllm, key_file):
    return EngineEndpoint(url=fake_vllm.url, dialect="vllm", key_file=key_file)


def run(scenario, retry=QUICK):
    """The result of `await scenario(client)`."""

    async def main():
        async with EngineClient(retry=retry) as client:
            return await scenario(client)

    return asyncio.run(main())


def request(n=1, max_tokens=3):
    return GenerateRequest((5, 6, 7), SamplingParams(max_tokens), uuid.uuid4().hex, n=n, seed=1)


def generate(engine, timeout=60.0, **changes):
    return run(lambda client: client.generate(engine, request(**changes), timeout=timeout))


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_generation_is_sent_again_after_a_temporary_failure(fake_vllm, engine, status):
    fake_vllm.fail(GENERATE, status, times=2)
    assert len(generate(engine)) == 1
    assert fake_vllm.paths() == [GENERATE] * 3


def test_a_generation_is_sent_again_after_a_reset_connection(fake_vllm, engine):
    fake_vllm.reset(GENERATE, times=1)
    assert len(generate(engine)) == 1
    assert fake_vllm.paths() == [GENERATE] * 2
    first, second = (recorded.body for recorded in fake_vllm.requests)
    assert first.pop("request_id") != second.pop("request_id"), "the first may still be at work"
    assert first == second


def test_retries_end(fake_vllm, engine):
    fake_vllm.fail(GENERATE, 500, body={"error": {"message": "the engine core is dead"}})
    with pytest.raises(EngineError, match=r"answered 500.*the engine core is dead.*gave up after 4 attempts"):
        generate(engine)
    assert len(fake_vllm.requests) == 4


@pytest.mark.parametrize("fault", ["500", "reset"])
def test_a_caller_with_other_engines_has_a_generation_sent_once(fake_vllm, engine, fault):
    if fault == "500":
        fake_vllm.fail(GENERATE, 500)
    else:
        fake_vllm.reset(GENERATE)
    with pytest.raises(EngineError, match=r"gave up after 1 attempt\)"):
        run(lambda client: client.generate(engine, request(), timeout=60.0, attempts=1))
    assert len(fake_vllm.requests) == 1


def test_the_last_failure_is_raised_itself_with_whatever_it_knows(engine, monkeypatch):
    class Overloaded(EngineError):
        def __init__(self, retry_after):
            super().__init__("overloaded")
            self.retry_after = retry_after

    async def send(self, *arguments, **options):
        raise _Temporary(Overloaded(retry_after=7)) from OSError("the cause")

    monkeypatch.setattr(EngineClient, "_send", send)
    with pytest.raises(Overloaded, match=r"overloaded \(gave up after 4 attempts\)") as caught:
        generate(engine)
    assert caught.value.retry_after == 7


@pytest.mark.parametrize("status", [400, 403, 404, 422])
def test_another_4xx_is_never_sent_again_and_is_quoted(fake_vllm, engine, status):
    fake_vllm.fail(GENERATE, status, body={"error": "prompt too long"})
    with pytest.raises(EngineRejected, match=rf"{GENERATE} answered {status}.*prompt too long") as caught:
        generate(engine)
    assert caught.value.status == status
    assert "[5, 6, 7]" in str(caught.value)  # the request that was refused
    assert len(fake_vllm.requests) == 1


def test_a_wrong_key_is_named_as_the_cause(fake_vllm, engine, key_file):
    key_file.write_text("wrong")
    with pytest.raises(EngineRejected, match="bearer key is missing, wrong") as caught:
        generate(engine)
    assert caught.value.status == 401


def test_a_request_that_hangs_ends_at_its_deadline(fake_vllm, engine):
    fake_vllm.hang(GENERATE)
    with pytest.raises(EngineUnreachable, match=rf"POST {engine.url}{GENERATE}: no answer within 0.2 s"):
        generate(engine, timeout=0.2)


def test_waiting_between_attempts_counts_against_the_deadline(fake_vllm, engine):
    fake_vllm.fail(GENERATE, 503)
    slow = RetryPolicy(attempts=9, first_delay=60.0, longest_delay=60.0)
    with pytest.raises(EngineUnreachable, match=r"within 0.2 s.*before that.*answered 503"):
        run(lambda client: client.generate(engine, request(), timeout=0.2), retry=slow)
    assert len(fake_vllm.requests) == 1


def test_an_engine_that_is_gone_is_unreachable(fake_vllm, engine):
    fake_vllm.die()
    with pytest.raises(EngineUnreachable, match=r"Connect.*gave up after 4 attempts"):
        generate(engine)


def test_an_engine_that_dies_during_a_request_is_unreachable(fake_vllm, engine):
    fake_vllm.hang(GENERATE)

    async def scenario(client):
        running = asyncio.create_task(client.generate(engine, request(), timeout=30))
        while not fake_vllm.requests:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(fake_vllm.die)
        with pytest.raises(EngineUnreachable):
            await running

    run(scenario)


@pytest.mark.parametrize("fault", ["500", "reset"])
def test_a_control_call_is_sent_once(fake_vllm, engine, fault):
    if fault == "500":
        fake_vllm.fail("/start_weight_update", 500)
    else:
        fake_vllm.reset("/start_weight_update")
    with pytest.raises(EngineError):
        run(lambda client: client.run(engine, transport("vllm", "gloo").control.begin(), timeout=60.0))
    assert fake_vllm.paths() == ["/start_weight_update"]


def test_an_abort_of_many_requests_tries_all_of_them_and_then_tells_of_the_one_that_failed(fake_vllm, engine):
    as_sglang = engine.model_copy(update={"dialect": "sglang"})  # /abort_request: a vLLM has no such route
    with pytest.raises(EngineRejected, match="/abort_request answered 404"):
        run(lambda client: client.abort(as_sglang, [f"{i:032d}" for i in range(100)], timeout=60.0))
    assert [recorded.body["rid"] for recorded in fake_vllm.requests] == [f"{i:032d}" for i in range(100)]


def test_an_abort_has_one_deadline_for_all_its_requests(fake_vllm, engine):
    fake_vllm.hang("/inference/v1/abort_requests")
    with pytest.raises(EngineUnreachable, match=r"no answer within 0\.\d+ s"):  # what is left of the 0.2 s
        run(lambda client: client.abort(engine, ["a" * 32], timeout=0.2))


def test_tokens_before_an_update_are_of_the_old_weights_and_tokens_after_it_of_the_new_ones(fake_vllm, engine):
    fake_vllm.seconds, fake_vllm.version = 0.3, "old"

    async def scenario(client):
        running = asyncio.create_task(client.generate(engine, request(max_tokens=100), timeout=30))
        await asyncio.to_thread(fake_vllm.wait_in_flight, 1)
        await client.run(engine, dialect("vllm").pause("keep"), timeout=60.0)
        fake_vllm.version = "new"
        await client.run(engine, dialect("vllm").resume(), timeout=60.0)
        return await running

    (sample,) = run(scenario)
    assert [span.version for span in sample.versions] == ["old", "new"]
    assert sample.versions[0].end == sample.versions[1].start and sample.versions[1].end == 100
    assert sample.finish_reason == "length"


def test_an_aborting_pause_cuts_what_runs_and_what_waits(fake_vllm, engine):
    fake_vllm.seconds, fake_vllm.batch.slots = 30.0, 2

    async def scenario(client):
        running = [
            asyncio.create_task(client.generate(engine, request(n=2, max_tokens=100), timeout=30)) for _ in range(2)
        ]
        while (fake_vllm.batch.running, fake_vllm.batch.waiting) != (2, 2):
            await asyncio.sleep(0.001)
        await client.run(engine, dialect("vllm").pause("abort"), timeout=60.0)
        return await asyncio.gather(*running)

    started, waited = sorted(run(scenario), key=lambda samples: -len(samples[0].token_ids))
    assert all(sample.finish_reason == "abort" for sample in [*started, *waited])
    assert all(0 < len(sample.token_ids) < 100 for sample in started) and all(
        sample.token_ids == () for sample in waited
    )


def test_a_404_on_a_control_route_is_no_success(fake_vllm, engine):
    fake_vllm.fail("/pause", 404)
    with pytest.raises(EngineRejected, match="no such route") as caught:
        run(lambda client: client.run(engine, dialect("vllm").pause("keep"), timeout=60.0))
    assert caught.value.status == 404


def test_control_calls_go_in_order_and_end_at_the_first_failure(fake_vllm, engine):
    fake_vllm.fail("/finish_weight_update", 500)
    with pytest.raises(EngineError):
        run(lambda client: client.run(engine, transport("vllm", "gloo").control.finish("v"), timeout=60.0))
    assert fake_vllm.paths() == ["/finish_weight_update"]  # and no /reset_prefix_cache


def test_a_status_that_a_request_tolerates_is_its_reply(fake_vllm, engine):
    fake_vllm.fail("/pause", 400)
    tolerant = HttpRequest("POST", "/pause", tolerate=(400,))
    assert run(lambda client: client.run(engine, [tolerant], timeout=60.0)) == [400]


def test_more_than_a_hundred_generations_are_in_flight_at_once(fake_vllm, engine):
    async def scenario(client):
        await client.run(engine, dialect("vllm").pause("keep"), timeout=60.0)
        running = [asyncio.create_task(client.generate(engine, request(), timeout=30)) for _ in range(150)]
        while fake_vllm.paths().count(GENERATE) < 150:
            await asyncio.sleep(0.01)
        await client.run(engine, dialect("vllm").resume(), timeout=60.0)
        return await asyncio.gather(*running)

    assert len(run(scenario)) == 150


def test_samples_beyond_the_engines_limit_are_split_over_requests(fake_vllm, engine):
    samples = generate(engine, n=100)
    assert [recorded.body["sampling_params"]["n"] for recorded in fake_vllm.requests] == [64, 36]
    (alone,) = run(
        lambda client: client.generate(
            engine, GenerateRequest((5, 6, 7), SamplingParams(3), "a" * 32, seed=91), timeout=5
        )
    )
    assert alone.token_ids == samples[90].token_ids


def test_a_failing_part_of_a_request_cancels_the_others(fake_vllm, engine):
    fake_vllm.max_num_seqs = 50  # refuses the first part, of 64

    async def scenario(client):
        await client.run(engine, dialect("vllm").pause("keep"), timeout=60.0)  # the second part would wait for ever
        with pytest.raises(EngineRejected, match="max_num_seqs"):
            await client.generate(engine, request(n=100), timeout=30)

    run(scenario)


@pytest.mark.parametrize("knob", ["missing_logprobs", "sentinel_logprob"])
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_missing_logprob_is_an_error_whatever_stands_in_for_it(fake_vllm, engine, knob, kind):
    setattr(fake_vllm, knob, True)
    with pytest.raises(MissingLogprobs):
        generate(engine.model_copy(update={"dialect": kind}))


def test_too_few_samples_are_an_error(fake_vllm, engine):
    fake_vllm.wrong_count = True
    with pytest.raises(EngineError, match="returned 3 choices where 4"):
        generate(engine, n=4)


def test_the_key_travels_as_a_bearer_token(fake_vllm, engine):
    generate(engine)
    assert fake_vllm.requests[0].authorization == "Bearer test-key"


def test_a_cache_that_was_freed_alone_comes_back_and_the_weights_were_there_all_the_time(fake_vllm, engine):
    async def scenario(client):
        await client.sleep(engine, 1, ["kv_cache"], timeout=60.0)
        assert (fake_vllm.asleep, fake_vllm.paused) == ({"kv_cache"}, True)
        await client.wake(engine, ["kv_cache"], timeout=60.0)
        return await client.generate(engine, request(), timeout=60.0)

    assert len(run(scenario)) == 1
    assert fake_vllm.paths()[:3] == ["/pause", "/release_kv_cache_memory", "/wake_up"]


def test_an_engine_that_is_resumed_while_its_memory_is_away_answers_no_request(fake_vllm, engine):
    async def scenario(client):
        await client.sleep(engine, 2, timeout=60.0)
        await client.run(engine, dialect("vllm").resume(), timeout=60.0)
        await client.generate(engine, request(), timeout=60.0)

    with pytest.raises(EngineError, match="EngineCore encountered an issue"):
        run(scenario)


def test_a_probe_of_a_stock_server_finds_what_that_one_tells(fake_stock_vllm):
    fake_stock_vllm.world_size = 4
    info = run(lambda client: client.probe(EngineEndpoint(url=fake_stock_vllm.url)))
    assert (info.dialect, info.plugin, info.boot_id) == ("vllm", False, None)
    assert (info.world_size, info.vocab_size, info.dtype, info.weight_backend) == (4, 120, "float32", "nccl")
    assert info.weight_version == "default"


def test_a_server_without_control_routes_is_told_how_to_get_them(fake_stock_vllm):
    for path in ("/get_world_size", "/weight_info", "/is_paused", "/server_info"):
        fake_stock_vllm.fail(path, 404)
    with pytest.raises(EngineError, match="VLLM_SERVER_DEV_MODE=1"):
        run(lambda client: client.probe(EngineEndpoint(url=fake_stock_vllm.url)))


def test_a_server_that_is_no_engine_is_refused():
    from aiohttp import web

    class Stranger(FakeServer):
        async def handle(self, recorded):
            return web.Response(status=404)

    with Stranger() as server, pytest.raises(UsageError, match="is none of: vllm, sglang"):
        run(lambda client: client.probe(EngineEndpoint(url=server.url)))


def test_health_tells_the_reason_and_asks_once(fake_vllm, engine):
    run(lambda client: client.health(engine))
    fake_vllm.fail("/health", 503)
    with pytest.raises(EngineError, match="503"):
        run(lambda client: client.health(engine))
    assert fake_vllm.paths() == ["/health"] * 2


def test_a_revived_engine_has_another_boot_id_and_no_version(fake_vllm, engine):
    fake_vllm.version = "ours"
    before = run(lambda client: client.probe(engine))
    fake_vllm.die()
    fake_vllm.forget()
    fake_vllm.start()
    after = run(lambda client: client.probe(engine))
    assert before.weight_version == "ours" and after.weight_version == "default"
    assert before.boot_id != after.boot_id
