"""Where generation requests go, against fake engines on real sockets: balance, failures, limits, versions, aborts."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import pytest

from rltool.engines.client import EngineClient
from rltool.engines.dialects.table import dialect
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet.engine_set import EngineSet
from rltool.engines.fleet.fleet import Fleet, State
from rltool.engines.types import BOOT_ID_HEADER, Completion, GenerateRequest, SamplingParams, TokenStream
from rltool.engines.weight_version import Lineage
from rltool.errors import EngineRejected, EngineTimedOut
from rltool.rollout.serving import data_plane
from rltool.rollout.serving.data_plane import DataPlane, PoisonousRequest, Trace
from rltool.rollout.serving.versions import VersionBook
from tests import fleets
from tests.contract.fakes.sglang import EXPECTED_KEY, FakeSglang, Fault
from tests.contract.fakes.vllm import FakeVllm

GENERATE = "/inference/v1/generate"
ABORT = "/inference/v1/abort_requests"
RUN = "a" * 32
LONG = 60.0
"""Seconds: far more than anything here takes."""


def request(number: int = 0, *, tokens: int = 4, n: int = 1, session: str = "") -> GenerateRequest:
    sampling = SamplingParams(max_tokens=tokens)
    return GenerateRequest((2, 3), sampling, f"{number:032x}", n=n, seed=number, session=session)


class Rig:
    """READY engines at step 0 of the run, and a data plane over them."""

    def __init__(self, client: EngineClient, engines: list[FakeVllm], **options: Any) -> None:
        self.client, self.engines, self.fleet = client, engines, Fleet()
        self.book = VersionBook(Lineage(RUN, 0))
        for engine in engines:
            fleets.add_probed(self.fleet, engine.url)
        settings = {"router": None, "requests_per_engine": 64, "deadline": LONG, "judge": self.book}
        self.plane = DataPlane(EngineSet(self.fleet, client), **{**settings, **options})
        self.sync(0)

    @property
    def endpoints(self) -> dict[str, EngineEndpoint]:
        """As they are now."""
        return {member.url: member.endpoint for member in self.fleet.members()}

    def pause(self, *engines: FakeVllm) -> None:
        for engine in engines or self.engines:
            self.fleet.pause(engine.url)
            self.fleet.update_began(engine.url)

    def finish(self, step: int, *engines: FakeVllm) -> None:
        version = self.book.begin(step)
        for engine in engines or self.engines:
            self.fleet.update_finished(engine.url, version)
            engine.version = str(version)
        self.fleet.advance(version)
        for engine in engines or self.engines:
            self.fleet.resume(engine.url)
        self.book.publish(step)
        self.plane.changed()

    def sync(self, step: int, *engines: FakeVllm) -> None:
        self.pause(*engines)
        self.finish(step, *engines)

    def state(self, engine: FakeVllm) -> State:
        return self.fleet.member(engine.url).state

    def generated(self) -> list[int]:
        """Generation requests that each engine has got so far."""
        return [engine.paths().count(GENERATE) for engine in self.engines]


@asynccontextmanager
async def rig(*engines: FakeVllm, **options: Any) -> AsyncIterator[Rig]:
    async with EngineClient() as client:
        yield Rig(client, list(engines), **options)


async def until(condition: Callable[[], bool], what: str) -> None:
    for _ in range(int(LONG / 0.005)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"never happened: {what}")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def router_key(tmp_path):
    path = tmp_path / "router-key"
    path.write_text(EXPECTED_KEY)
    return path


@pytest.fixture
def two(stack):
    return [stack.enter_context(FakeVllm()) for _ in range(2)]


def test_requests_go_to_the_least_loaded_engine(two):
    slow = two[0]
    slow.seconds = LONG

    async def run():
        async with rig(*two) as r:
            held = asyncio.create_task(r.plane.generate(request(0, tokens=10), group=7))
            await until(lambda: slow.batch.running == 1, "the first engine generates")
            for number in range(1, 4):
                await r.plane.generate(request(number))
            assert r.generated() == [1, 3], "the engine that is busy gets nothing further"
            assert r.plane.in_flight == 1
            await r.plane.abort()
            [completion] = await held
            assert completion.finish_reason == "abort" and r.plane.in_flight == 0

    asyncio.run(run())


def test_requests_of_a_session_stay_at_one_engine_while_it_has_a_slot_and_serves(two):
    first, second = two

    async def run():
        async with rig(*two, requests_per_engine=2) as r:

            async def held(*requests):
                """Requests that the first engine keeps."""
                first.seconds = LONG
                tasks = [asyncio.create_task(r.plane.generate(one, group=7)) for one in requests]
                await until(lambda: first.batch.running == len(tasks), "the first engine generates")
                first.seconds = 0.0
                return tasks

            async def end(tasks):
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

            async def ask(number, session):
                before = r.generated()
                await r.plane.generate(request(number, session=session))
                [engine] = [e for e, was, now in zip(two, before, r.generated(), strict=True) if now > was]
                return engine

            assert await ask(0, "a") is first
            one = await held(request(1, tokens=10))
            assert await ask(2, "a") is first, "which has more to do, and the prefix"
            assert await ask(3, "b") is second and await ask(4, "") is second
            await end(one)
            both = await held(request(5, tokens=10, session="a"), request(6, tokens=10, session="a"))
            assert await ask(7, "a") is second, "the slots of the first are taken"
            await end(both)
            assert await ask(8, "a") is second, "where it has its newest prefix"
            second.die()
            await r.plane.generate(request(9, session="a"))
            assert await ask(10, "a") is first

    asyncio.run(run())


def test_a_session_of_another_process_goes_on_at_the_engine_that_it_had(two):
    first, second = two

    async def run():
        async with rig(*two) as r:

            async def ask(number, session):
                trace = Trace()
                await r.plane.generate(request(number, session=session), trace=trace)
                return trace.engine

            assert await ask(0, "new") == first.url
            r.plane.settle("old", first.url)
            assert await ask(1, "old") == first.url, "though the second has no session"
            r.plane.settle("old", second.url)
            assert [await ask(2, "old"), await ask(3, "old")] == [second.url] * 2
            r.plane.settle("old", "http://127.0.0.1:1")
            assert await ask(4, "old") == second.url, "an engine that is not there"

    asyncio.run(run())


def test_sessions_that_have_long_ended_are_forgotten(two, monkeypatch):
    monkeypatch.setattr(data_plane, "SESSIONS", 2)

    async def run():
        async with rig(*two) as r:
            for number, session in enumerate("abca"):
                await r.plane.generate(request(number, session=session))
            assert list(r.plane._homes) == ["c", "a"]

    asyncio.run(run())


def test_new_sessions_go_to_the_engine_with_the_fewest_of_those_with_the_fewest_requests(two):
    first, second = two

    async def run():
        async with rig(*two) as r:

            async def ask(number, session):
                trace = Trace()
                await r.plane.generate(request(number, session=session), trace=trace)
                return trace.engine

            assert [await ask(n, name) for n, name in enumerate("abcd")] == [first.url, second.url] * 2
            assert [await ask(n, name) for n, name in enumerate("badc", 4)] == [
                second.url, first.url, second.url, first.url,
            ]  # fmt: skip
            r.plane.forget("b")
            r.plane.forget("d")
            assert [await ask(n, name) for n, name in enumerate("ef", 8)] == [second.url] * 2
            second.die()
            assert await ask(10, "e") == first.url
            r.plane.forget("e")
            r.plane.forget("never heard of")
            assert list(r.plane._homes) == ["a", "c", "f"] and r.plane._loads.sessions == {first.url: 2, second.url: 1}

    asyncio.run(run())


def test_a_trace_names_the_engine_that_answered_and_the_failures_before(two):
    first, second = two
    first.fail(GENERATE, 500, times=1)

    async def run():
        async with rig(*two) as r:
            trace = Trace()
            await r.plane.generate(request(), trace=trace)
            assert trace.engine == second.url
            [failure] = trace.failures
            assert first.url in str(failure) and "500" in str(failure)

    asyncio.run(run())


def test_requests_are_spread_over_all_engines(two):
    for engine in two:
        engine.seconds = 0.2

    async def run():
        async with rig(*two) as r:
            await asyncio.gather(*(r.plane.generate(request(number)) for number in range(16)))
            assert r.generated() == [8, 8]

    asyncio.run(run())


@pytest.mark.parametrize("fault", ["fail", "reset", "die"])
def test_an_engine_that_fails_is_reported_and_the_request_goes_elsewhere(two, fault):
    sick, healthy = two
    sick.die() if fault == "die" else getattr(sick, fault)(GENERATE)

    async def run():
        async with rig(*two) as r:
            for number in range(4):
                [completion] = await r.plane.generate(request(number))
                assert completion.finish_reason == "length"
            assert r.state(sick) is State.SUSPECT and "requests in a row failed" in r.fleet.member(sick.url).reason
            assert r.state(healthy) is State.READY and r.generated()[1] == 4
            assert r.plane.counts["failed_requests"] == 2 and r.plane.in_flight == 0

    asyncio.run(run())


def test_the_engine_that_has_just_failed_a_request_is_not_asked_next(two):
    two[0].fail(GENERATE)

    async def run():
        async with rig(*two) as r:
            await r.plane.generate(request())
            assert r.generated() == [1, 1]

    asyncio.run(run())


def test_a_single_engine_that_recovers_gets_its_request_again(two):
    engine, _ = two
    engine.fail(GENERATE, 503, times=1)

    async def run():
        async with rig(engine) as r:
            assert await r.plane.generate(request())
            assert r.generated() == [2] and r.state(engine) is State.READY

    asyncio.run(run())


def test_a_refusal_is_raised_at_once_with_its_status_and_is_nobodys_fault(two):
    for engine in two:
        engine.fail(GENERATE, 422)

    async def run():
        async with rig(*two) as r:
            with pytest.raises(EngineRejected, match="answered 422") as error:
                await r.plane.generate(request())
            assert error.value.status == 422
            assert sum(r.generated()) == 1 and r.fleet.serving() == tuple(e.url for e in two)
            assert r.plane.counts["failed_requests"] == 0 and r.plane.in_flight == 0

    asyncio.run(run())


@pytest.mark.parametrize("engines", [1, 2])
def test_a_key_that_cannot_be_read_for_a_moment_is_a_failure_of_that_engine_and_is_tried_again(two, tmp_path, engines):
    key_file, chosen = tmp_path / "key", two[:engines]
    key_file.write_text("")

    async def run():
        async with rig(*chosen) as r:
            for url in r.endpoints:
                fleets.describe(r.fleet, url, endpoint={"key_file": key_file})
            waiting = asyncio.create_task(r.plane.generate(request()))
            await until(lambda: r.plane.counts["failed_requests"] > 0, "it fails")
            key_file.write_text("key")
            assert len(await waiting) == 1 and sum(r.generated()) == 1

    asyncio.run(run())


def test_requests_wait_while_nothing_serves_and_go_on_after_the_sync(two):
    async def run():
        async with rig(*two) as r:
            r.pause()
            waiting = [asyncio.create_task(r.plane.generate(request(number))) for number in range(6)]
            await asyncio.sleep(0.1)
            assert r.generated() == [0, 0] and not any(task.done() for task in waiting)
            r.finish(1)
            found = [await task for task in waiting]
            assert {span.version for [c] in found for span in c.versions} == {f"{RUN}:0:1"}

    asyncio.run(run())


def test_a_request_that_engines_fail_on_while_they_serve_others_is_given_up(two):
    two[0].fail(GENERATE, 500)

    async def run():
        async with rig(*two) as r:
            r.fleet.process_exited(two[1].url, "killed by the kernel")
            task = asyncio.create_task(r.plane.generate(request()))
            for proof in range(3):
                await until(lambda: r.state(two[0]) is State.SUSPECT or task.done(), "it fails")
                assert task.done() is (proof == 2), "failures in a row at one engine count once"
                # A canary request shows that the engine works, so it was the request's fault.
                r.fleet.request_succeeded(two[0].url, sent_at=r.fleet.member(two[0].url).since)
                r.plane.changed()
            with pytest.raises(PoisonousRequest) as error:
                await task
            text = str(error.value)
            assert "failed 3 times" in text and "answered 500" in text
            assert f"{two[0].url} is" in text and f"{two[1].url} is dead (killed by the kernel)" in text
            assert r.plane.in_flight == 0 and r.plane.counts["poisonous_requests"] == 1

    asyncio.run(run())


@pytest.mark.parametrize("streamed", [False, True])
def test_requests_that_paused_engines_refuse_go_on_after_the_pause_and_are_nobodys_fault(
    stack, monkeypatch, streamed
):
    """A vLLM 0.33 without the plugin, for requests that are on their way when the pause comes."""
    monkeypatch.setattr(data_plane, "RETRY_SECONDS", 0.01)
    engines = [stack.enter_context(FakeVllm(plugin=False)) for _ in range(3)]

    async def run():
        async with rig(*engines) as r:
            for engine in engines:
                engine.engine_version = "0.33.0"
                await r.client.run(r.endpoints[engine.url], dialect("vllm").pause("abort"), timeout=LONG)
            tasks = [
                asyncio.create_task(
                    r.plane.generate(request(number), stream=TokenStream(lambda piece: None) if streamed else None)
                )
                for number in range(6)
            ]
            await until(lambda: min(r.generated()) > 3, "all refuse them")
            for engine in engines:
                await r.client.run(r.endpoints[engine.url], dialect("vllm").resume(), timeout=LONG)
            assert {completion.finish_reason for task in tasks for completion in await task} == {"length"}
            assert {r.state(engine) for engine in engines} == {State.READY}
            assert r.plane.counts.total() == 0

    asyncio.run(run())


def test_an_engine_that_says_for_longer_than_a_request_may_take_that_it_is_paused_fails_requests(stack, monkeypatch):
    """Another trainer has paused it, and is gone."""
    monkeypatch.setattr(data_plane, "RETRY_SECONDS", 0.01)
    engine = stack.enter_context(FakeVllm(plugin=False))

    async def run():
        async with rig(engine, deadline=0.5) as r:
            engine.engine_version = "0.33.0"
            await r.client.run(r.endpoints[engine.url], dialect("vllm").pause("abort"), timeout=LONG)
            task = asyncio.create_task(r.plane.generate(request(0)))
            await until(lambda: r.plane.counts["failed_requests"] > 0, "it fails them")
            assert min(r.generated()) > 3
            await r.client.run(r.endpoints[engine.url], dialect("vllm").resume(), timeout=LONG)
            task.cancel()

    asyncio.run(run())


def test_an_engine_that_keeps_a_request_beyond_the_deadline_has_failed_and_another_gets_it(two):
    two[0].hang(GENERATE)

    async def run():
        async with rig(*two, deadline=0.3) as r:
            for number in range(2):
                assert await r.plane.generate(request(number))
            reason = r.fleet.member(two[0].url).reason
            assert r.state(two[0]) is State.SUSPECT
            assert "within 0.3 s" in reason and "deadlines.generate has passed" in reason

    asyncio.run(run())


def test_a_request_that_is_given_up_as_its_deadline_passes_leaves_no_failure_unheard(two, monkeypatch):
    unheard: list[dict[str, Any]] = []

    async def times_out(*_: Any, **__: Any) -> None:
        try:
            await asyncio.sleep(LONG)
        except asyncio.CancelledError:
            raise EngineTimedOut("no answer within 0.3 s") from None

    async def run():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
        async with rig(*two) as r:
            monkeypatch.setattr(r.client, "generate", times_out)
            task = asyncio.create_task(r.plane.generate(request()))
            await until(lambda: r.plane.in_flight == 1, "it is sent")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert r.plane.counts["failed_requests"] == 1
            del task
            gc.collect()

    asyncio.run(run())
    assert unheard == []


@pytest.mark.parametrize(
    "leaves",
    [
        lambda fleet, url: fleet.process_exited(url, "killed"),
        lambda fleet, url: fleet.version_refused(url, "foreign weights", sent_at=fleet.member(url).since),
    ],
    ids=["dead", "stale"],
)
def test_requests_of_an_engine_that_leaves_service_are_withdrawn_and_sent_again(two, leaves):
    two[0].seconds = LONG

    async def run():
        async with rig(*two) as r:
            task = asyncio.create_task(r.plane.generate(request(tokens=10)))
            await until(lambda: two[0].batch.running == 1, "the first engine generates")
            leaves(r.fleet, two[0].url)
            r.plane.changed()
            assert len((await asyncio.wait_for(task, LONG / 2))[0].token_ids) == 10
            assert r.generated() == [1, 1] and r.plane.counts == {"withdrawn_requests": 1}
            await until(lambda: two[0].batch.running == 0, "the first engine is rid of it")

    asyncio.run(run())


def test_a_paused_or_leaving_engine_keeps_its_requests(two):
    two[0].seconds = 0.3

    async def run():
        async with rig(*two) as r:
            task = asyncio.create_task(r.plane.generate(request(tokens=10)))
            await until(lambda: two[0].batch.running == 1, "the first engine generates")
            r.sync(1, two[0])
            r.fleet.drain(two[0].url, "removed by its owner")
            r.plane.changed()
            await task
            assert r.generated() == [1, 0] and not r.plane.counts

    asyncio.run(run())


def test_with_fewer_engines_than_min_serving_nothing_is_sent(two):
    async def run():
        async with rig(*two, min_serving=2) as r:
            r.fleet.process_exited(two[1].url, "killed")
            task = asyncio.create_task(r.plane.generate(request()))
            await asyncio.sleep(0.05)
            assert r.generated() == [0, 0]
            fleets.add_probed(r.fleet, "http://127.0.0.1:1", takes_weights=False)
            r.plane.changed()
            assert await task and r.generated() == [1, 0]

    asyncio.run(run())


# -- limits


class Counting(FakeVllm):
    """Remembers how many generation requests were with it at most, and in which order they came."""

    def __init__(self, shared: dict[str, int] | None = None) -> None:
        super().__init__()
        self.order: list[str] = []
        self.shared = shared if shared is not None else {"now": 0, "most": 0}
        self._mutex = threading.Lock()

    async def _sample(self, body):
        with self._mutex:
            self.order.append(body["request_id"])
            self.shared["now"] += 1
            self.shared["most"] = max(self.shared["most"], self.shared["now"])
        try:
            return await super()._sample(body)
        finally:
            with self._mutex:
                self.shared["now"] -= 1


def test_the_limit_of_requests_is_reached_and_never_passed(stack):
    shared = {"now": 0, "most": 0}
    engines = [stack.enter_context(Counting(shared)) for _ in range(2)]
    for engine in engines:
        engine.seconds = 0.05

    async def run():
        async with rig(*engines, requests_per_engine=3) as r:
            await asyncio.gather(*(r.plane.generate(request(number)) for number in range(60)))
            assert shared["most"] == 6
            shared["most"] = 0
            r.plane.limit = 2
            r.plane.changed()
            await asyncio.gather(*(r.plane.generate(request(number)) for number in range(20)))
            assert shared["most"] == 2
            r.plane.limit, shared["most"] = None, 0
            r.fleet.process_exited(engines[1].url, "gone")
            await asyncio.gather(*(r.plane.generate(request(number)) for number in range(20)))
            assert shared["most"] == 3, "one engine serves"

    asyncio.run(run())


def test_requests_are_sent_in_the_order_in_which_they_came(stack):
    engine = stack.enter_context(Counting())

    async def run():
        async with rig(engine, requests_per_engine=1) as r:
            await asyncio.gather(*(r.plane.generate(request(number)) for number in range(30)))
            assert engine.order == [request(number).request_id for number in range(30)]

    asyncio.run(run())


def test_one_who_asks_again_and_again_does_not_overtake_one_who_waits(stack):
    engine = stack.enter_context(Counting())
    engine.seconds = 0.05

    async def run():
        async with rig(engine, requests_per_engine=1) as r:

            async def again_and_again():
                for number in range(6):
                    await r.plane.generate(request(number))

            busy = asyncio.create_task(again_and_again())
            await until(lambda: engine.shared["now"] == 1, "the first request is there")
            await r.plane.generate(request(99))
            await busy
            assert engine.order.index(request(99).request_id) == 1

    asyncio.run(run())


def test_waiters_that_are_cancelled_leave_no_slot_behind(stack):
    engine = stack.enter_context(Counting())
    engine.seconds = 0.05

    async def run():
        async with rig(engine, requests_per_engine=2) as r:
            tasks = [asyncio.create_task(r.plane.generate(request(number))) for number in range(40)]
            await until(lambda: engine.shared["now"] == 2, "two are generated")
            for task in tasks[::2]:  # one of those that are with the engine, and every other of those that wait
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            assert [isinstance(outcome, asyncio.CancelledError) for outcome in ended] == [True, False] * 20
            assert r.plane.in_flight == 0
            engine.shared["most"] = 0
            await asyncio.gather(*(r.plane.generate(request(number)) for number in range(10)))
            assert engine.shared["most"] == 2, "both slots are there"

    asyncio.run(run())


def test_a_waiter_that_is_cancelled_in_its_turn_passes_it_on(stack):
    engine = stack.enter_context(Counting())

    async def run():
        async with rig(engine, requests_per_engine=1) as r:
            r.pause()
            first, second = (asyncio.create_task(r.plane.generate(request(number))) for number in range(2))
            await asyncio.sleep(0.02)
            r.finish(1)  # the first's turn has come, and before it runs ...
            first.cancel()
            assert await asyncio.wait_for(second, LONG)
            assert engine.order == [request(1).request_id]

    asyncio.run(run())


# -- versions


@pytest.mark.parametrize(
    ("version", "reason"),
    [("default", "foreign"), (f"{'b' * 32}:0:0", "foreign"), (f"{RUN}:1:0", "foreign"), (f"{RUN}:0:9", "unpublished")],
)
def test_tokens_of_weights_that_are_not_this_runs_are_never_returned(two, version, reason):
    wrong = two[0]

    async def run():
        async with rig(*two) as r:
            wrong.version = version
            found = [await r.plane.generate(request(number)) for number in range(3)]
            assert {span.version for [c] in found for span in c.versions} == {f"{RUN}:0:0"}
            assert r.state(wrong) is State.STALE and version in r.fleet.member(wrong.url).reason
            assert r.plane.counts == {f"refused_{reason}": 1} and r.generated() == [1, 3]
            r.sync(1)
            assert r.state(wrong) is State.READY

    asyncio.run(run())


def test_without_another_engine_a_request_waits_for_the_sync_of_the_one_that_was_refused(two):
    async def run():
        async with rig(two[0]) as r:
            two[0].version = "default"
            task = asyncio.create_task(r.plane.generate(request()))
            await until(lambda: r.state(two[0]) is State.STALE, "its tokens are refused")
            await asyncio.sleep(0.3)
            assert r.generated() == [1], "a stale engine is not asked again"
            r.sync(1)
            assert {span.version for [c] in [await task] for span in c.versions} == {f"{RUN}:0:1"}

    asyncio.run(run())


def test_tokens_of_a_sync_that_is_under_way_are_taken(two):
    async def run():
        async with rig(*two) as r:
            for engine in two:
                engine.version = str(r.book.begin(1))
            [completion] = await r.plane.generate(request())
            assert completion.versions[0].version == f"{RUN}:0:1" and not r.plane.counts

    asyncio.run(run())


def test_an_engine_that_missed_a_sync_is_stale_and_its_tokens_are_judged_by_their_age(two):
    """The fleet thinks that it has the new weights; its answer shows the old ones."""
    behind, current = two

    async def run():
        async with rig(*two) as r:
            r.sync(1)
            behind.version = f"{RUN}:0:0"
            [completion] = await r.plane.generate(request())
            assert completion.versions[0].version == f"{RUN}:0:0"
            assert r.state(behind) is State.STALE and "after the sync to step 1" in r.fleet.member(behind.url).reason
            assert r.plane.counts == {"stale_engine": 1} and r.state(current) is State.READY

    asyncio.run(run())


def test_a_request_that_a_sync_has_overtaken_is_no_sign_of_a_missed_one(two):
    engine = two[0]
    engine.seconds = LONG

    async def run():
        async with rig(engine) as r:
            running = asyncio.create_task(r.plane.generate(request(tokens=10)))
            await until(lambda: engine.batch.running == 1, "tokens of step 0")
            r.sync(1)
            await r.plane.abort()
            [completion] = await running
            assert completion.versions[0].version == f"{RUN}:0:0"
            assert r.state(engine) is State.READY and not r.plane.counts

    asyncio.run(run())


# -- aborts


def aborted_ids(engine: FakeVllm) -> list[str]:
    return [name for recorded in engine.requests if recorded.path == ABORT for name in recorded.body["request_ids"]]


def test_an_abort_by_group_reaches_each_engine_with_exactly_what_it_has_of_that_group(two):
    for engine in two:
        engine.seconds = LONG

    async def run():
        async with rig(*two) as r:
            tasks = {n: asyncio.create_task(r.plane.generate(request(n, tokens=10), group=n)) for n in range(4)}
            await until(lambda: sum(e.batch.running for e in two) == 4, "all four are generated")
            assert await r.plane.abort((1, 2)) == {}
            for number in (1, 2):
                [completion] = await tasks[number]
                assert completion.finish_reason == "abort" and completion.token_ids
            wanted = {f"generate-tokens-{request(n).request_id}" for n in (1, 2)}
            told = [set(aborted_ids(engine)) for engine in two]
            assert [len(ids) for ids in told] == [1, 1] and set.union(*told) == wanted
            assert not tasks[0].done() and not tasks[3].done()
            assert await r.plane.abort() == {}
            for number in (0, 3):
                [completion] = await tasks[number]
                assert completion.finish_reason == "abort"
            assert await r.plane.abort() == {} and all(e.paths().count(ABORT) == 2 for e in two), (
                "nothing is left to abort"
            )

    asyncio.run(run())


def test_an_abort_names_the_engine_that_did_not_take_it_and_ends_the_others(two):
    for engine in two:
        engine.seconds = LONG
    two[0].fail(ABORT, 500)

    async def run():
        async with rig(*two) as r:
            tasks = [asyncio.create_task(r.plane.generate(request(n, tokens=10), group=n)) for n in range(2)]
            await until(lambda: all(e.batch.running == 1 for e in two), "one at each")
            failures = await r.plane.abort()
            assert failures.keys() == {two[0].url} and "answered 500" in failures[two[0].url]
            await until(lambda: any(task.done() for task in tasks), "the other engine's request ends")
            assert not all(task.done() for task in tasks)
            for task in tasks:
                task.cancel()

    asyncio.run(run())


# -- through a router


def test_with_a_router_requests_go_there_and_aborts_to_the_engines(stack, two, router_key):
    router = stack.enter_context(FakeSglang())
    router.weight_version = f"{RUN}:0:0"
    router._changed()
    router.seconds = LONG

    async def run(key_file):
        endpoint = EngineEndpoint(url=router.url, dialect="sglang", key_file=key_file)
        async with rig(*two, router=endpoint) as r:
            task = asyncio.create_task(r.plane.generate(request(tokens=10), group=1))
            await until(lambda: router.batch.running == 1, "the router has it")
            assert r.plane.in_flight == 1 and r.generated() == [0, 0]
            await r.plane.abort((1,))
            await until(lambda: all(aborted_ids(engine) for engine in two), "each engine is told")
            assert router.seen["/abort_request"] == 0
            router.batch.abort_prefix("")
            task.cancel()
            return list(aborted_ids(two[0]))

    found = asyncio.run(run(router_key))
    assert found == [f"generate-tokens-{name}" for name in dialect("sglang").request_ids(request())]


def test_behind_a_router_a_failure_is_nobodys_and_the_request_is_repeated_there(stack, two, router_key):
    router = stack.enter_context(FakeSglang(weight_version=f"{RUN}:0:0"))
    router.faults["/generate"] = Fault(times=2, status=503)

    async def run(key_file):
        endpoint = EngineEndpoint(url=router.url, dialect="sglang", key_file=key_file)
        async with rig(*two, router=endpoint) as r:
            completions: list[Completion] = await r.plane.generate(request(n=2))
            assert len(completions) == 2 and r.fleet.serving() == tuple(e.url for e in two)
            r.pause()
            waiting = asyncio.create_task(r.plane.generate(request(5)))
            await asyncio.sleep(0.05)
            assert not waiting.done(), "behind a router, too, nothing is sent while nobody serves"
            waiting.cancel()

    asyncio.run(run(router_key))


def test_behind_a_router_what_was_sent_before_an_engine_failed_is_sent_again(stack, two, router_key):
    router = stack.enter_context(FakeSglang(weight_version=f"{RUN}:0:0"))
    router.seconds = LONG

    async def run(key_file):
        endpoint = EngineEndpoint(url=router.url, dialect="sglang", key_file=key_file)
        async with rig(*two, router=endpoint) as r:
            task = asyncio.create_task(r.plane.generate(request(tokens=10)))
            await until(lambda: router.batch.running == 1, "the router has it")
            router.seconds = 0.0
            r.fleet.process_exited(two[0].url, "killed")
            r.plane.changed()
            assert await asyncio.wait_for(task, LONG / 2)
            assert r.plane.counts == {"withdrawn_requests": 1} and router.seen["/generate"] == 2

    asyncio.run(run(router_key))


def test_what_is_sent_again_has_an_id_of_its_own_for_an_engine_that_has_not_noticed_still_knows_the_old_one(
    stack, two, router_key
):
    router = stack.enter_context(FakeSglang(weight_version=f"{RUN}:0:0", notices_disconnects=False))
    router.seconds = LONG

    async def run(key_file):
        endpoint = EngineEndpoint(url=router.url, dialect="sglang", key_file=key_file)
        async with rig(*two, router=endpoint) as r:
            task = asyncio.create_task(r.plane.generate(request(5), group=3))
            await until(lambda: router.batch.running == 1, "the router has it")
            router.seconds = 0.0
            r.fleet.process_exited(two[0].url, "killed")
            r.plane.changed()
            [sent_again] = await asyncio.wait_for(task, LONG / 2)
            [alone] = await r.plane.generate(request(5).again())
            assert sent_again.token_ids == alone.token_ids, "the seed is the same"

    asyncio.run(run(router_key))


@pytest.mark.parametrize("named", [True, False])
def test_behind_a_router_a_failure_is_the_engines_that_the_reply_names_else_all_have_to_show_that_they_work(
    stack, two, router_key, named
):
    router = stack.enter_context(FakeSglang(weight_version=f"{RUN}:0:0"))
    if named:
        router.response_headers = {BOOT_ID_HEADER: two[1].boot_id}
    router.faults["/generate"] = Fault(times=1, status=500)

    async def run(key_file):
        endpoint = EngineEndpoint(url=router.url, dialect="sglang", key_file=key_file)
        async with rig(*two, router=endpoint) as r:
            for engine in two:
                member = r.fleet.member(engine.url)
                fleets.answers(r.fleet, engine.url, sent_at=member.since, boot_id=engine.boot_id)
            task = asyncio.create_task(r.plane.generate(request()))
            await until(lambda: r.plane.counts["failed_requests"] == 1, "the failure")
            assert set(r.fleet.canaries_due()) == ({two[1].url} if named else {e.url for e in two})
            assert await task
            succeeded = [r.fleet.member(engine.url).last_success_at is not None for engine in two]
            assert succeeded == [False, named]

    asyncio.run(run(router_key))


@pytest.mark.parametrize("named", [True, False])
def test_behind_a_router_a_request_is_given_up_after_failures_between_which_all_that_may_have_had_it_worked(
    stack, two, router_key, named, monkeypatch
):
    monkeypatch.setattr(data_plane, "RETRY_SECONDS", 0.001)
    router = stack.enter_context(FakeSglang(weight_version=f"{RUN}:0:0"))
    router.faults["/generate"] = Fault(times=1000, status=500)
    if named:
        router.response_headers = {BOOT_ID_HEADER: two[0].boot_id}

    async def run(key_file):
        endpoint = EngineEndpoint(url=router.url, dialect="sglang", key_file=key_file)
        async with rig(*two, router=endpoint) as r:
            for engine in two:
                since = r.fleet.member(engine.url).since
                fleets.answers(r.fleet, engine.url, sent_at=since, boot_id=engine.boot_id)

            async def works(engine: FakeVllm) -> None:
                """Its canary request succeeds, and then the request fails twice again."""
                r.fleet.request_succeeded(engine.url, sent_at=r.fleet.member(engine.url).since)
                r.plane.changed()
                failed = r.plane.counts["failed_requests"]
                await until(lambda: task.done() or r.plane.counts["failed_requests"] > failed + 1, "it fails again")

            task = asyncio.create_task(r.plane.generate(request()))
            await until(lambda: r.plane.counts["failed_requests"] >= 1, "the first failure")
            for _ in range(2):
                await works(two[1])
                assert not task.done(), "the other one may have failed it every time"
                await works(two[0])
            with pytest.raises(PoisonousRequest, match="failed 3 times at engines that serve other requests"):
                await task

    asyncio.run(run(router_key))


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_router_that_has_nobody_to_send_it_to_proves_nothing_against_a_request(
    stack, two, router_key, status, monkeypatch
):
    monkeypatch.setattr(data_plane, "RETRY_SECONDS", 0.05)  # longer than it takes to say that the engines work
    router = stack.enter_context(FakeSglang(weight_version=f"{RUN}:0:0"))
    router.faults["/generate"] = Fault(times=5, status=status)

    async def run(key_file):
        endpoint = EngineEndpoint(url=router.url, dialect="sglang", key_file=key_file)
        async with rig(*two, router=endpoint) as r:
            task = asyncio.create_task(r.plane.generate(request()))
            for failed in range(1, 6):
                await until(lambda failed=failed: r.plane.counts["failed_requests"] == failed, "it fails")
                for engine in two:
                    r.fleet.request_succeeded(engine.url, sent_at=r.fleet.member(engine.url).since)
            assert await task

    asyncio.run(run(router_key))


def test_a_reply_that_cannot_be_used_is_a_failure_like_any_other(two):
    two[0].missing_logprobs = True

    async def run():
        async with rig(*two) as r:
            assert await r.plane.generate(request())
            assert r.generated() == [1, 1] and r.plane.counts["failed_requests"] == 1

    asyncio.run(run())
