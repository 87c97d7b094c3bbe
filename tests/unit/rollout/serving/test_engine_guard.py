"""How long a run waits for engines, and what it says when none comes."""

from __future__ import annotations

from typing import Any

import pytest

from rltool.engines.fleet.engine_set import EngineSet
from rltool.engines.fleet.fleet import Fleet
from rltool.rollout.serving.guard import EngineGuard, RouterLost, TooFewEngines
from tests import fleets
from tests.clock import Clock

A, B = "http://a:1", "http://b:1"


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def fleet(clock):
    fleet = Fleet(clock=clock)
    for url in (A, B):
        fleets.add_probed(fleet, url, takes_weights=False)
    return fleet


def guard(fleet, clock, *, min_serving=1, log=None):
    fleets.describe(fleet, A, endpoint={"log": log})
    return EngineGuard(engines(fleet), min_serving=min_serving, deadline=30.0)


def engines(fleet):
    client: Any = None  # no engine is asked
    return EngineSet(fleet, client)


def test_enough_engines_are_no_error_however_long_it_lasts(fleet, clock):
    watch = guard(fleet, clock, min_serving=2)
    for _ in range(3):
        watch.check()
        clock.now += 1000
    assert not watch.is_waiting


def test_the_wait_begins_when_an_engine_is_missing_and_ends_when_it_is_back(fleet, clock):
    watch = guard(fleet, clock, min_serving=2)
    fleet.process_exited(B, "killed")
    watch.check()
    clock.now += 29
    watch.check()
    assert watch.is_waiting
    fleet.request_succeeded(B, sent_at=clock())
    fleets.answers(fleet, B, sent_at=clock())
    watch.check()
    assert not watch.is_waiting
    fleet.process_exited(B, "killed again")
    watch.check()
    clock.now += 29
    watch.check()
    clock.now += 1
    with pytest.raises(TooFewEngines):
        watch.check()


def test_the_error_names_each_engine_its_reason_its_log_the_deadline_and_the_next_command(fleet, clock, tmp_path):
    log = tmp_path / "engine-0.log"
    log.write_text("started\nCUDA out of memory\n")
    watch = guard(fleet, clock, log=log)
    fleet.process_exited(A, "killed by the kernel")
    fleet.process_exited(B, "exit code 1")
    watch.check()
    clock.now += 31
    with pytest.raises(TooFewEngines) as error:
        watch.check()
    text = str(error.value)
    assert f"{A}: dead (killed by the kernel)" in text and f"{B}: dead (exit code 1)" in text
    assert "| CUDA out of memory" in text
    assert "min_serving = 1, waited 31 s (deadlines.engines = 30 s)" in text
    assert "rltool serve-engines" in text and "rltool train --resume" in text


# -- the router in front


class Router:
    url = "http://router:1"
    unreachable_since: float | None = None


@pytest.fixture
def routed(fleet, clock):
    """A router and what guards it, in front of engines that serve."""
    router = Router()
    return router, EngineGuard(engines(fleet), min_serving=1, deadline=30.0, router=router)


def test_a_router_that_comes_back_in_time_is_no_error(routed, clock):
    router, watch = routed
    router.unreachable_since = clock()
    clock.now += 29
    watch.check()
    router.unreachable_since = None
    clock.now += 1000
    watch.check()


def test_a_router_that_does_not_come_back_ends_the_run_although_engines_serve(routed, clock):
    router, watch = routed
    router.unreachable_since = clock()
    clock.now += 31
    with pytest.raises(RouterLost) as error:
        watch.check()
    text = str(error.value)
    assert "the router http://router:1, through which all generation goes, has not answered for 31 s" in text
    assert "deadlines.engines = 30 s" in text
    assert "rltool router --port" in text and "rltool train --resume" in text
