"""A gateway's fleet follows a run's: sentence by sentence, then a seeded random walk of both."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from rltool.engines.fleet.fleet import Fleet, FleetPolicy, IllegalTransition, State
from rltool.engines.weight_version import WeightVersion
from rltool.gateway.fleet import EngineView, FleetView, FollowingFleet
from tests import fleets
from tests.clock import Clock

V0 = WeightVersion("a" * 32, 0, 0)
A, B, C = "http://a:1", "http://b:1", "http://c:1"
STEPS = [
    "add", "drain", "remove", "pause", "finish", "fail", "resume", "sleep", "exit", "restart", "probe", "refuse",
    *["sync"] * 6,
]  # fmt: skip
HEALTHY = FleetPolicy(probes_to_suspect=10**9, probes_to_dead=10**10)


def version(number: int) -> WeightVersion:
    return replace(V0, number=number)


class World:
    """The run's fleet (`run`), the gateway's (`own`), and a clock that both read."""

    def __init__(self, *urls: str, takes_weights: bool = True, policy: FleetPolicy | None = None) -> None:
        self.clock = Clock(1000.0)
        self.run = Fleet(policy or FleetPolicy(), clock=self.clock)
        self.own = FollowingFleet(policy or FleetPolicy(), clock=self.clock)
        self.boots: dict[str, int] = {}
        for url in urls:
            self.added(url, takes_weights=takes_weights)

    def later(self, seconds: float = 1.0) -> float:
        self.clock.now += seconds
        return self.clock.now

    def boot(self, url: str) -> str:
        return f"{url} {self.boots[url]}"

    def added(self, url: str, *, takes_weights: bool = True) -> None:
        self.boots.setdefault(url, 0)
        fleets.add(self.run, url, takes_weights=takes_weights)
        self.answers(url)

    def answers(self, url: str, *probers: Fleet) -> None:
        """A probe, of the run alone where no fleet is named."""
        for fleet in probers or (self.run,):
            fleets.answers(fleet, url, sent_at=self.later(), boot_id=self.boot(url))

    def restarts(self, url: str) -> None:
        self.boots[url] += 1

    def synced(self, number: int, *urls: str) -> None:
        self.later()
        for url in urls:
            self.run.pause(url)
        self.later()
        for url in urls:
            self.run.update_finished(url, version(number))
        self.run.advance(version(number))
        for url in urls:
            self.run.resume(url)

    def view(self) -> FleetView:
        return FleetView.from_json(FleetView.of(self.run, 0).to_json())

    def follow(self) -> tuple[str, ...]:
        """As Engines.apply; who serves then."""
        self.later()
        named: dict[str, EngineView] = {engine.endpoint.url: engine for engine in self.view().engines}
        for member in self.own.members():
            wanted = named.get(member.url)
            if wanted is None or (member.state is State.DRAINING and wanted.state is not State.DRAINING):
                self.own.leave(member.url)
        known = {member.url for member in self.own.members()}
        for url, engine in named.items():
            if url not in known:
                self.own.join(engine)
        self.own.follow(tuple(named.values()))
        return self.own.serving()

    def own_state(self, url: str) -> State:
        return self.own.member(url).state


def test_a_view_comes_back_from_its_line_as_it_was():
    world = World(A, B)
    world.synced(3, A)
    view = world.view()
    assert FleetView.from_json(view.to_json()) == view and "\n" not in view.to_json()
    assert [(e.state, e.version) for e in view.engines] == [(State.READY, version(3)), (State.STALE, None)]


def test_engines_serve_from_the_first_sync_on_at_the_run_s_version():
    world = World(A, B)
    assert world.follow() == ()
    world.synced(0, A, B)
    assert world.follow() == (A, B)
    assert world.own.version == version(0) == world.own.member(A).version
    world.synced(1, A, B)
    assert world.follow() == (A, B) and world.own.version == version(1)


def test_one_that_missed_a_sync_serves_again_after_the_next():
    world = World(A, B)
    world.synced(0, A, B)
    world.follow()
    world.synced(1, A)
    assert world.follow() == (A,) and world.own_state(B) is State.STALE
    world.synced(1, B)
    assert world.follow() == (A, B)


def test_a_paused_or_leaving_engine_keeps_what_it_has_and_gets_nothing():
    world = World(A, B)
    world.synced(0, A, B)
    world.follow()
    world.run.pause(A)
    world.run.drain(B, "told to")
    assert world.follow() == ()
    assert (world.own_state(A), world.own_state(B)) == (State.PAUSED, State.DRAINING)


def test_an_engine_that_was_paused_when_last_seen_leaves_all_the_same():
    world = World(A)
    world.synced(0, A)
    world.follow()
    world.run.pause(A)
    world.follow()
    world.run.resume(A)
    world.run.drain(A, "told to")
    assert world.follow() == () and world.own_state(A) is State.DRAINING


def test_engines_join_and_leave_and_one_that_had_to_leave_is_taken_back():
    world = World(A)
    world.synced(0, A)
    world.follow()
    world.added(B)
    assert world.follow() == (A,)
    world.synced(1, A, B)
    assert world.follow() == (A, B)
    world.run.drain(A, "told to")
    world.follow()
    world.run.remove(A, "gone")
    assert world.follow() == (B,) and [m.url for m in world.own.members()] == [B]
    world.added(A)
    world.synced(2, A, B)
    assert world.follow() == (B, A)
    world.run.drain(A, "told to")
    world.follow()
    world.run.remove(A, "added again")
    world.added(A)
    world.synced(3, A, B)
    assert world.follow() == (B, A), "though it was DRAINING when it was last looked at"


def test_engines_that_sleep_serve_after_the_sync_that_wakes_them():
    world = World(A)
    world.synced(0, A)
    world.follow()
    world.run.fall_asleep(A)
    assert world.follow() == () and world.own_state(A) is State.ASLEEP
    assert world.own.to_probe() == ()
    world.synced(1, A)
    assert world.follow() == (A,)


def test_one_that_the_run_has_given_up_serves_when_the_run_has_it_back():
    world = World(A)
    world.synced(0, A)
    world.follow()
    world.run.process_exited(A, "killed")
    assert world.follow() == () and world.own_state(A) is State.STALE
    world.restarts(A)
    world.answers(A)
    world.synced(0, A)
    assert world.follow() == (A,)


def test_a_new_process_is_noticed_before_the_run_notices_and_serves_after_its_sync():
    world = World(A)
    world.synced(0, A)
    world.follow()
    world.restarts(A)
    world.answers(A, world.own)
    assert world.own.serving() == ()
    assert world.follow() == (), "the run still takes it for the process that it has synced"
    world.answers(A)
    assert world.follow() == ()
    world.synced(1, A)
    assert world.follow() == (A,)


def test_a_new_process_that_the_run_has_synced_serves_though_it_was_paused_when_the_gateway_would_have_probed_it():
    world = World(A)
    world.synced(0, A)
    world.follow()
    world.restarts(A)
    world.answers(A)
    world.run.pause(A)
    world.follow()
    world.run.update_finished(A, version(1))
    world.run.advance(version(1))
    world.run.resume(A)
    assert world.follow() == (A,)


def test_one_that_sampled_with_other_weights_waits_for_a_sync_whatever_the_run_says_meanwhile():
    world = World(A)
    world.synced(0, A)
    world.follow()
    world.own.version_refused(A, "sampled with default", sent_at=world.later())
    assert world.follow() == () and world.run.serving() == (A,)
    world.synced(1, A)
    assert world.follow() == (A,)


def test_an_old_reply_says_nothing_of_an_engine_that_was_synced_since():
    world = World(A)
    world.synced(0, A)
    sent_at = world.later()
    world.follow()
    world.own.version_refused(A, "an old reply", sent_at=sent_at)
    assert world.follow() == (A,)


def test_its_own_failures_count_whatever_the_run_says_and_are_forgiven_by_a_canary_request():
    world = World(A, B)
    world.synced(0, A, B)
    world.follow()
    for _ in range(2):
        world.own.request_failed(A, "no answer", sent_at=world.later())
        world.later()
    assert world.follow() == (B,)
    world.synced(1, A, B)
    assert world.follow() == (B,)
    world.own.request_succeeded(A, sent_at=world.later())
    assert world.own_state(A) is State.STALE, "it has missed the view of the sync"
    assert world.follow() == (A, B)


def test_of_engines_with_fixed_weights_health_is_the_gateway_s_own_matter():
    world = World(A, takes_weights=False)
    assert world.follow() == (A,)
    world.run.process_exited(A, "killed")
    assert world.follow() == (A,)
    world.answers(A)
    world.run.fall_asleep(A)
    assert world.follow() == ()
    world.run.wake_up(A)
    assert world.follow() == (A,)


def test_an_engine_that_has_not_answered_the_run_does_not_serve():
    world = World()
    world.boots[A] = 0
    fleets.add(world.run, A, takes_weights=False)
    assert world.follow() == () and world.own_state(A) is State.STARTING
    world.answers(A)
    assert world.follow() == (A,)


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_it_serves_what_the_run_serves_and_nothing_else(seed):
    """The run's fleet is led through random commands and facts; views come now and then. As long as its own facts are
    good, the gateway serves the same engines, each at the same version."""
    rng = random.Random(seed)
    world = World(A, B, policy=HEALTHY)
    world.synced(0, A, B)
    number = 0

    def step() -> None:
        nonlocal number
        url = rng.choice([A, B, C])
        there = {member.url: member for member in world.run.members()}
        match rng.choice(STEPS):
            case "add" if url not in there:
                world.added(url)
            case "sync":
                number += 1
                if free := world.run.syncable():
                    world.synced(number, *free)
            case "finish":
                number += 1
                world.run.update_finished(url, version(number))
                world.run.advance(version(number))
            case "drain":
                world.run.drain(url, "told to")
            case "remove":
                world.run.remove(url, "gone")
            case "pause":
                world.run.pause(url)
            case "fail":
                world.run.update_failed(url, "lost")
            case "resume":
                world.run.resume(url)
            case "sleep":
                world.run.fall_asleep(url)
            case "exit" if url in there:
                world.run.process_exited(url, "killed")
            case "restart" if url in there:
                world.restarts(url)
                world.answers(url)
            case "probe" if url in there:
                world.answers(url)
            case "refuse" if url in there:
                world.run.version_refused(url, "foreign", sent_at=world.later())

    served = 0
    for _ in range(800):
        world.later()
        try:
            step()
        except IllegalTransition:
            continue
        if rng.random() < 0.4:
            assert set(world.follow()) == set(world.run.serving())
            assert {m.url for m in world.own.members()} == {m.url for m in world.run.members()}
            for url in world.run.serving():
                assert world.own.member(url).version == world.run.member(url).version
                served += 1
            for member in world.run.members():
                if member.state in (State.PAUSED, State.DRAINING, State.ASLEEP):
                    kept = world.own_state(member.url)
                    assert kept is member.state, f"{member.url} is {kept.value}, not {member.state.value}"
    assert served > 50
