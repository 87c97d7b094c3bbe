"""The fleet monitor against fake engines on real sockets: probes, canary requests, what follows from transitions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import pytest

from rltool.engines.client import HEALTH_SECONDS, EngineClient
from rltool.engines.fleet.engine_set import EngineSet
from rltool.engines.fleet.fleet import Fleet, FleetPolicy, State, Transition
from rltool.engines.types import EngineLoad
from rltool.engines.weight_version import WeightVersion
from rltool.processes.tasks import beside
from rltool.rollout.serving import monitor
from rltool.rollout.serving.monitor import FleetMonitor, LoopLag
from tests import fleets
from tests.contract.fakes.vllm import FakeVllm

GENERATE = "/rltool/generate"
LONG = 60.0
"""Seconds: far more than anything here takes."""
QUICK = FleetPolicy(probe_seconds=0.02, canary_seconds=0.02, probes_to_suspect=2, probes_to_dead=4)


class Clock:
    """Real time, and what a test adds to it."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


class Router:
    """What the monitor tells the router's membership, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def note(self, transition: Transition) -> None:
        self.calls.append(f"{transition.url} {transition.after.value if transition.after else 'removed'}")

    async def reconcile(self) -> None:
        self.calls.append("reconcile")


class Rig:
    """Engines with weights of their own (nobody syncs), READY, and a monitor that is not started."""

    def __init__(self, client: EngineClient, engines: list[FakeVllm], policy: FleetPolicy, **options: Any) -> None:
        self.clock = Clock()
        self.fleet = Fleet(policy, clock=self.clock)
        self.lines: list[str] = []
        self.changes = 0
        for engine in engines:
            fleets.add_probed(self.fleet, engine.url, takes_weights=False)
        self.fleet.take_transitions()
        self.monitor = FleetMonitor(
            EngineSet(self.fleet, client, self.lines.append), on_change=self._changed, **options
        )

    def _changed(self) -> None:
        self.changes += 1

    def state(self, engine: FakeVllm) -> State:
        return self.fleet.member(engine.url).state


@asynccontextmanager
async def rig(*engines: FakeVllm, policy: FleetPolicy = QUICK, **options: Any) -> AsyncIterator[Rig]:
    async with EngineClient() as client:
        made = Rig(client, list(engines), policy, **options)
        try:
            yield made
        finally:
            await made.monitor.close()


def asked_canaries():
    return [task for task in asyncio.all_tasks() if task.get_name().startswith("canary")]


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
def two(stack):
    return [stack.enter_context(FakeVllm()) for _ in range(2)]


# -- one probe


def test_a_probe_brings_what_the_engine_is_and_holds(two):
    engine = two[0]

    async def run():
        async with rig(engine) as r:
            assert not r.fleet.member(engine.url).endpoint.plugin, "it is not known yet"
            await r.monitor.probe(engine.url)
            endpoint = r.fleet.member(engine.url).endpoint
            assert (endpoint.dialect, endpoint.plugin, endpoint.boot_id, endpoint.weight_backend) == (
                "vllm",
                True,
                engine.boot_id,
                "rltool",
            )
            assert r.fleet.member(engine.url).info.vocab_size == engine.vocab_size
            assert r.fleet.member(engine.url).boot_id == engine.boot_id and r.state(engine) is State.READY

    asyncio.run(run())


@pytest.mark.parametrize("fault", ["fail", "reset", "die"])
def test_a_probe_that_fails_is_counted_against_the_engine(two, fault):
    engine = two[0]
    engine.die() if fault == "die" else getattr(engine, fault)("/health")

    async def run():
        async with rig(engine) as r:
            for expected in (State.READY, State.SUSPECT, State.SUSPECT, State.DEAD):
                await r.monitor.probe(engine.url)
                assert r.state(engine) is expected
            assert "4 probes in a row failed" in r.fleet.member(engine.url).reason

    asyncio.run(run())


def test_an_engine_whose_key_cannot_be_read_is_named_with_the_file_and_is_back_with_the_key(two, tmp_path):
    engine, key_file = two[0], tmp_path / "key"

    async def run():
        async with rig(engine) as r:
            fleets.describe(r.fleet, engine.url, endpoint={"key_file": key_file})
            for _ in range(2):
                await r.monitor.probe(engine.url)
            assert r.state(engine) is State.SUSPECT
            assert f"cannot read the key file {key_file}" in r.fleet.member(engine.url).reason
            assert engine.paths() == [], "nothing can be asked without it"
            key_file.write_text("key")
            r.monitor.start()
            await until(lambda: r.state(engine) is State.READY, "it shows that it works")

    asyncio.run(run())


def test_a_probe_whose_answer_makes_no_sense_is_one_that_fails(two):
    engine = two[0]
    engine.fail("/weight_info", 200, body={"half": "an answ"})

    async def run():
        async with rig(engine) as r:
            await r.monitor.probe(engine.url)
            await r.monitor.probe(engine.url)
            assert r.state(engine) is State.SUSPECT
            assert "makes no sense" in r.fleet.member(engine.url).reason

    asyncio.run(run())


@pytest.mark.parametrize(("late", "counted"), [(HEALTH_SECONDS, 0), (HEALTH_SECONDS / 10, 1)])
def test_a_probe_that_failed_while_our_own_loop_was_late_says_nothing(two, monkeypatch, late, counted):
    monkeypatch.setattr(monitor, "LAG_INTERVAL", 0.01)
    engine = two[0]
    engine.faults["/health"] = _slow_failure()

    async def run():
        async with rig(engine) as r, beside(r.monitor.lag.watch()):
            probing = asyncio.create_task(r.monitor.probe(engine.url))
            await until(lambda: "/health" in engine.paths(), "it is asked")
            r.clock.ahead += late  # as if the loop had stood still so long
            await until(lambda: r.monitor.lag.worst_since(0.0) > late / 2, "the lag is seen")
            await probing
            assert r.fleet.member(engine.url).probe_failures == counted

    asyncio.run(run())


def _slow_failure():
    from tests.contract.fakes.server import Fault

    return Fault(delay=0.3, status=503)


def test_loop_lag_is_measured_and_old_lag_is_not_held_against_anybody():
    async def run():
        clock = Clock()
        lag = LoopLag(clock=clock)
        async with beside(lag.watch()):
            await asyncio.sleep(0)  # it has begun
            clock.ahead += 7.0
            await until(lambda: lag.worst_since(0.0) > 6.0, "it is seen")
            assert lag.worst_since(clock() + 1.0) == 0.0

    asyncio.run(run())


# -- the task


def test_a_restarted_engine_is_known_by_its_boot_id(two):
    engine = two[0]

    async def run():
        async with rig(engine) as r:
            r.monitor.start()
            await until(lambda: r.fleet.member(engine.url).boot_id == engine.boot_id, "it is known")
            engine.die()
            await until(lambda: r.state(engine) is State.DEAD, "it is given up")
            engine.forget()
            engine.start()
            await until(lambda: r.state(engine) is State.READY, "it is back")
            assert r.fleet.member(engine.url).boot_id == engine.boot_id == r.fleet.member(engine.url).endpoint.boot_id

    asyncio.run(run())


def test_an_engine_that_fails_requests_is_sent_one_token_until_it_works_again(two):
    wedged, healthy = two

    async def run():
        async with rig(*two) as r:
            wedged.fail(GENERATE)
            for _ in range(QUICK.incidents_to_suspect):
                r.clock.ahead += 1.0
                r.fleet.request_failed(wedged.url, "answered 500", sent_at=r.clock())
            assert r.state(wedged) is State.SUSPECT
            r.monitor.start()
            await until(lambda: wedged.paths().count(GENERATE) > 0, "a canary request")
            assert r.state(wedged) is not State.READY
            wedged.heal()
            await until(lambda: r.state(wedged) is State.READY, "it works again")
            bodies = [recorded.body for recorded in wedged.requests if recorded.path == GENERATE]
            assert all((b["sampling_params"]["max_tokens"], b["sampling_params"]["n"]) == (1, 1) for b in bodies)
            assert GENERATE not in healthy.paths(), "who works gets none"

    asyncio.run(run())


def test_an_engine_whose_canary_requests_keep_failing_is_given_up(two):
    engine = two[0]

    async def run():
        async with rig(engine) as r:
            engine.fail(GENERATE)
            for _ in range(QUICK.incidents_to_suspect):
                r.clock.ahead += 1.0
                r.fleet.request_failed(engine.url, "answered 500", sent_at=r.clock())
            r.monitor.start()
            await until(lambda: r.state(engine) is State.DEAD, "it is given up, though it answers probes")
            assert "canary request" in r.fleet.member(engine.url).reason

    asyncio.run(run())


@pytest.mark.parametrize("queue", [True, False], ids=["behind others", "alone"])
def test_a_canary_request_that_times_out_counts_unless_it_had_to_queue(two, monkeypatch, queue):
    monkeypatch.setattr("rltool.rollout.serving.monitor.CANARY_SECONDS", 0.2)
    engine = two[0]
    engine.hang(GENERATE)

    asked = []

    async def load(endpoint, **_):
        asked.append(endpoint.url)
        return EngineLoad(running=4, waiting=int(queue), kv_cache_usage=0.5)

    async def run():
        async with rig(engine) as r:
            monkeypatch.setattr(r.monitor._client, "load", load)
            r.fleet.request_lost()  # has it show that it works
            r.monitor.start()
            await until(lambda: bool(asked), "the first one has timed out")
            if queue:
                await until(lambda: not asked_canaries(), "it has been judged")
                assert r.state(engine) is State.READY and r.fleet.member(engine.url).incidents == 0
            else:
                await until(lambda: r.state(engine) is not State.READY, "it has failed twice")

    asyncio.run(run())


def test_engines_that_leave_are_not_probed(two):
    async def run():
        async with rig(*two) as r:
            r.fleet.drain(two[0].url, "leaves")
            r.monitor.start()
            await until(lambda: two[1].paths().count("/health") > 2, "the other one is probed")
            assert "/health" not in two[0].paths()

    asyncio.run(run())


def test_a_bug_of_ours_does_not_end_the_probing(two, monkeypatch):
    def bug(fleet):
        raise KeyError("ours")

    monkeypatch.setattr(Fleet, "tick", bug)

    async def run():
        async with rig(*two) as r:
            r.monitor.start()
            await until(lambda: r.monitor.counts["monitor_failures"] > 1, "it goes on after the first")
            before = two[0].paths().count("/health")
            await until(lambda: two[0].paths().count("/health") > before + 1, "engines are probed as ever")
            assert any(line.startswith("fleet monitor: KeyError") for line in r.lines)

    asyncio.run(run())


# -- transitions


def test_transitions_are_logged_and_announced_and_reach_the_router_before_it_is_compared(two):
    sick, healthy = two

    async def run():
        router = Router()
        async with rig(*two, router=router) as r:
            r.fleet.process_exited(sick.url, "killed")
            await r.monitor.carry_out()
            assert r.lines == [f"engine {sick.url}: ready -> dead: killed"] and r.changes == 1
            fleets.answers(r.fleet, sick.url, sent_at=r.clock())
            r.fleet.drain(healthy.url, "asked to leave")
            await r.monitor.carry_out()
            r.fleet.remove(healthy.url, "left")
            await r.monitor.carry_out()
            assert router.calls == [
                f"{sick.url} dead", "reconcile", f"{sick.url} ready", f"{healthy.url} draining", "reconcile",
                f"{healthy.url} removed", "reconcile",
            ]  # fmt: skip
            assert [t.after for t in r.monitor.recent] == [State.DEAD, State.READY, State.DRAINING, None]
            assert r.monitor.counts == {"dead": 1, "ready": 1, "draining": 1, "removed": 1} and r.changes == 3

    asyncio.run(run())


def test_the_router_is_compared_as_often_as_engines_are_probed(two):
    async def run():
        router = Router()
        async with rig(*two, router=router) as r:
            r.monitor.start()
            await until(lambda: router.calls.count("reconcile") > 2, "it is compared again and again")
            assert set(router.calls) == {"reconcile"}

    asyncio.run(run())


def test_a_pause_for_a_sync_is_no_news(two):
    async def run():
        async with rig() as r:
            for engine in two:
                fleets.add_probed(r.fleet, engine.url)
            await r.monitor.carry_out()
            r.lines.clear()
            version = WeightVersion("a" * 32, 0, 0)
            for engine in two:
                r.fleet.pause(engine.url)
                r.fleet.update_began(engine.url)
                r.fleet.update_finished(engine.url, version)
            r.fleet.advance(version)
            for engine in two:
                r.fleet.resume(engine.url)
            await r.monitor.carry_out()
            assert r.lines == []

    asyncio.run(run())


def test_an_engine_that_left_while_it_was_asked_stays_forgotten(two):
    engine = two[0]

    async def run():
        async with rig(*two) as r:
            engine.delay("/health", 0.3)
            probing = asyncio.create_task(r.monitor.probe(engine.url))
            await until(lambda: "/health" in engine.paths(), "it is asked")
            r.fleet.drain(engine.url, "leaves")
            r.fleet.remove(engine.url, "left")
            await probing
            await r.monitor.probe(engine.url)
            assert r.fleet.find(engine.url) is None

    asyncio.run(run())


def test_an_engine_of_ours_that_died_is_started_again(two):
    async def run():
        restarted = []

        async def restart(url: str) -> None:
            restarted.append(url)

        async with rig(*two, restart=restart) as r:
            r.fleet.process_exited(two[1].url, "killed")
            await r.monitor.carry_out()
            await r.monitor.carry_out()
            assert restarted == [two[1].url], "once"

    asyncio.run(run())
