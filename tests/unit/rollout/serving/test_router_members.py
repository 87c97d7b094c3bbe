"""The router's worker list against the fleet: the comparison, and a router in memory that does what sglang-router
does."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet.engine_set import EngineSet
from rltool.engines.fleet.fleet import Fleet, State, Transition
from rltool.engines.weight_version import WeightVersion
from rltool.errors import EngineUnreachable, TrainingStopped
from rltool.rollout.serving import router_members
from rltool.rollout.serving.router_members import RouterMembers, engine_of, foreign_workers
from rltool.router.workers import Worker
from tests import fleets

A, B, STRANGER = "http://10.0.0.1:8101", "http://10.0.0.2:8101", "http://10.9.9.9:8101"
V1 = WeightVersion("a" * 32, 0, 1)


class Router:
    """Does what it is asked at the next look. lazy: it takes nobody; stubborn: it lets nobody go."""

    url = "http://router:1"

    def __init__(self, *urls: str) -> None:
        self._ids = map(str, itertools.count())
        self.listed = [self._worker(url) for url in urls]
        self.calls: list[str] = []
        self.lazy = self.stubborn = self.down = False

    def _worker(self, url: str) -> Worker:
        return Worker(f"id-{next(self._ids)}", url, healthy=True, model_id="policy", load=0)

    def urls(self) -> list[str]:
        return [worker.url for worker in self.listed]

    async def workers(self) -> list[Worker]:
        self._check()
        return list(self.listed)

    async def add(self, engine: EngineEndpoint) -> str:
        self._check()
        self.calls.append(f"add {engine.url}")
        if not self.lazy:
            self.listed.append(self._worker(engine.url))
        return "job"

    async def remove(self, worker: Worker) -> None:
        self.calls.append(f"remove {worker.url}")
        if not self.stubborn:
            self.listed = [other for other in self.listed if other.id != worker.id]

    async def why_not_added(self, job: str) -> str:
        return "it cannot reach it"

    def _check(self) -> None:
        if self.down:
            raise EngineUnreachable("connection refused")


class Rig:
    """Two engines at version 1, and the router's members."""

    def __init__(self, router: Router, **options) -> None:
        self.now = 0.0
        self.router = router
        self.lines: list[str] = []
        self.fleet = Fleet(clock=lambda: self.now)
        for url in (A, B):
            fleets.add_probed(self.fleet, url, boot_id="boot")
        self.fleet.take_transitions()  # as at the start of a run: the engines of the beginning are no news
        client: Any = None  # the router is asked, no engine
        self.members = RouterMembers(router, EngineSet(self.fleet, client, self.lines.append), **options)

    def synced(self, *urls: str) -> Rig:
        for url in urls:
            self.fleet.pause(url)
            self.fleet.update_began(url)
            self.fleet.update_finished(url, V1)
        self.fleet.advance(V1)
        for url in urls:
            self.fleet.resume(url)
        return self

    def look(self) -> list[str]:
        """Tell what has happened, as the monitor does, and compare. The router's list after it."""
        for transition in self.fleet.take_transitions():
            self.members.note(transition)
        asyncio.run(self.members.reconcile())
        return self.router.urls()


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    """Each pause is a tick of the rig's clock."""
    monkeypatch.setattr(router_members, "POLL_SECONDS", 0.0)


def ticking(rig: Rig, monkeypatch) -> Rig:
    async def sleep(seconds: float) -> None:
        rig.now += 1.0

    monkeypatch.setattr(router_members.asyncio, "sleep", sleep)
    return rig


@pytest.mark.parametrize(
    ("worker", "engine"),
    [
        ("http://10.0.0.1:8101/", "http://10.0.0.1:8101"),
        ("http://10.0.0.1:8101@3", "http://10.0.0.1:8101"),
        ("http://localhost:8101", "http://127.0.0.1:8101"),
        ("http://localhost:8101@0", "http://127.0.0.1:8101"),
        ("http://[fd00::1]:8101", "http://[fd00::1]:8101"),
    ],
)
def test_a_worker_is_known_by_its_engine_whatever_form_its_url_has(worker, engine):
    assert engine_of(worker) == engine_of(engine)
    assert foreign_workers([Worker("id", worker, True, "policy", 0)], [engine]) == []


def test_another_port_or_host_is_another_engine():
    assert len({engine_of(url) for url in (A, B, A.replace("8101", "8102"), A.replace("http", "https"))}) == 4


def test_ready_engines_are_put_in_and_the_others_taken_out():
    rig = Rig(Router(A)).synced(B)
    assert rig.fleet.member(A).state is State.STALE
    assert rig.look() == [B]
    assert sorted(rig.router.calls) == [f"add {B}", f"remove {A}"]
    assert rig.look() == [B] and len(rig.router.calls) == 2, "who is where he belongs is left alone"


def test_before_the_first_sync_nobody_is_moved():
    rig = Rig(Router(A, B))
    assert rig.fleet.member(A).state is State.STALE
    assert rig.look() == [A, B] and rig.router.calls == []


def test_an_engine_that_is_given_up_before_the_first_sync_is_taken_out_all_the_same():
    rig = Rig(Router(A, B))
    rig.fleet.process_exited(A, "killed")
    assert rig.look() == [B]


def test_an_engine_that_is_paused_for_a_sync_stays_and_one_that_was_stale_is_not_put_in():
    rig = Rig(Router(A)).synced(A)
    rig.fleet.pause(A)
    rig.fleet.pause(B)
    assert rig.look() == [A] and rig.router.calls == []


def test_a_router_that_was_restarted_and_has_forgotten_everybody_gets_them_back():
    rig = Rig(Router(A, B)).synced(A, B)
    assert rig.look() == [A, B]
    rig.router.listed = []
    assert rig.look() == [A, B]


def test_an_engine_that_recovers_between_two_looks_is_registered_anew():
    """A fresh worker has a closed circuit breaker; the old one keeps its own, of which nobody is told."""
    rig = Rig(Router(A, B)).synced(A, B)
    rig.look()
    before = [worker.id for worker in rig.router.listed]
    for moment in (1.0, 2.0):
        rig.now = moment
        rig.fleet.request_failed(A, "500", sent_at=rig.now)
    assert rig.fleet.member(A).state is State.SUSPECT
    rig.fleet.request_succeeded(A, sent_at=rig.now + 1)
    assert rig.fleet.member(A).state is State.READY
    assert sorted(rig.look()) == [A, B]
    after = {worker.url: worker.id for worker in rig.router.listed}
    assert after[A] not in before and after[B] in before
    assert rig.router.calls == [f"remove {A}", f"add {A}"]


def test_an_engine_that_left_the_fleet_while_the_router_was_down_is_no_stranger():
    rig = Rig(Router(A, B), foreign="refuse").synced(A, B)
    rig.look()
    rig.router.down = True
    rig.fleet.drain(A, "leaves")
    rig.look()
    rig.fleet.remove(A, "left")
    rig.router.down = False
    assert rig.look() == [B] and rig.members.counts["foreign"] == 0


def test_an_engine_of_the_run_that_is_away_when_it_resumes_is_taken_out_and_no_stranger():
    away = "http://10.0.0.3:8101"
    rig = Rig(Router(away, A, B), foreign="refuse", away=[away]).synced(A, B)
    assert rig.look() == [A, B] and rig.members.counts["foreign"] == 0


def test_a_foreign_worker_is_removed_said_and_counted():
    rig = Rig(Router(A, STRANGER)).synced(A, B)
    assert rig.look() == [A, B]
    assert rig.members.counts["foreign"] == 1
    assert [line for line in rig.lines if STRANGER in line] == [
        f"router {Router.url}: removing {STRANGER}, which is no engine of this run"
    ]


def test_a_foreign_worker_ends_the_run_where_it_is_refused():
    errors: list[TrainingStopped] = []
    rig = Rig(Router(A, B, STRANGER), foreign="refuse", on_refused=errors.append).synced(A, B)
    rig.look()
    assert STRANGER in rig.look(), "it is not ours to remove"
    [error] = errors
    assert STRANGER in str(error) and A not in str(error) and "engines.foreign_workers" in str(error)


def test_every_replica_of_a_data_parallel_engine_is_taken_out():
    rig = Rig(Router(f"{A}@0", f"{A}@1", B)).synced(A, B)
    rig.fleet.process_exited(A, "killed")
    assert rig.look() == [B]


def test_a_router_that_is_down_is_said_once_and_followed_again():
    rig = Rig(Router(B)).synced(A, B)
    rig.router.down = True
    assert [rig.look() for _ in range(3)] == [[B]] * 3
    assert rig.lines == [f"router {Router.url}: connection refused"] and rig.members.counts["failures"] == 3
    rig.router.down = False
    assert rig.look() == [B, A]
    assert rig.lines[1:] == [f"router {Router.url}: its workers are those of the fleet again"]


def test_since_when_a_router_gives_no_answer_is_known_until_it_gives_one():
    rig = Rig(Router(A, B)).synced(A, B)
    rig.router.down, rig.now = True, 10.0
    rig.look()
    rig.now = 20.0
    rig.look()
    assert rig.members.unreachable_since == 10.0
    rig.router.down = False
    rig.look()
    assert rig.members.unreachable_since is None


def test_a_router_that_answers_and_does_not_do_as_it_is_told_is_there(monkeypatch):
    rig = ticking(Rig(Router(A, B)).synced(B), monkeypatch)
    rig.router.down = True
    rig.look()
    rig.router.down, rig.router.stubborn = False, True
    rig.look()
    assert rig.members.counts["failures"] == 2 and rig.members.unreachable_since is None


def test_a_worker_that_does_not_leave_is_named_and_waited_for_in_bounded_time(monkeypatch):
    rig = ticking(Rig(Router(A, B)).synced(B), monkeypatch)
    rig.router.stubborn = True
    rig.look()
    assert rig.now == router_members.REMOVE_SECONDS
    assert rig.router.calls == [f"remove {A}"], "asked once a look"
    assert rig.lines == [f"router {Router.url}: it did not remove {A} within 10 s"]


def test_a_registration_that_does_not_come_about_holds_up_one_look_and_is_asked_for_again(monkeypatch):
    rig = ticking(Rig(Router(B)).synced(A, B), monkeypatch)
    rig.router.lazy = True
    rig.look()
    assert rig.now == router_members.ADD_SECONDS
    rig.look()
    assert rig.now == router_members.ADD_SECONDS and rig.router.calls == [f"add {A}"], "it is pending, and in no way"
    rig.now = router_members.REGISTRATION_SECONDS
    rig.look()
    assert rig.router.calls == [f"add {A}"] * 2
    assert "it cannot reach it" in rig.lines[0] and A in rig.lines[0]


def test_a_pending_registration_of_an_engine_that_fell_out_is_forgotten(monkeypatch):
    rig = ticking(Rig(Router(B)).synced(A, B), monkeypatch)
    rig.router.lazy = True
    rig.look()
    rig.fleet.process_exited(A, "killed")
    rig.look()
    rig.router.listed.append(Worker("late", A, True, "policy", 0))
    assert rig.look() == [B], "it came late, and is not wanted any more"


def test_an_engine_that_fell_out_while_it_was_registered_is_asked_for_again_as_soon_as_it_is_ready(monkeypatch):
    rig = ticking(Rig(Router(B)).synced(A, B), monkeypatch)
    rig.router.lazy = True
    rig.look()
    for _ in range(2):
        rig.now += 1.0
        rig.fleet.request_failed(A, "500", sent_at=rig.now)
    rig.look()
    rig.fleet.request_succeeded(A, sent_at=rig.now + 1)
    rig.router.lazy = False
    assert rig.look() == [B, A]


def test_a_transition_to_a_serving_state_renews_nobody():
    rig = Rig(Router(A, B)).synced(A, B)
    rig.look()
    for after in (State.READY, State.PAUSED, State.STARTING):
        rig.members.note(Transition(0.0, A, State.READY, after, ""))
    assert rig.look() == [A, B] and rig.router.calls == []
