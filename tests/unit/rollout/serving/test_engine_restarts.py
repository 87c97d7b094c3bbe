"""Engines that the run has started: how often, and after which pause, they are started again; what the fleet hears."""

from __future__ import annotations

import asyncio

import pytest

from rltool.engines.fleet.fleet import Fleet, State
from rltool.errors import RltoolError
from rltool.processes.restarts import RestartBudget, RestartPolicy
from rltool.rollout.serving import restarts as engine_restarts
from rltool.rollout.serving.restarts import EngineRestarts
from tests import fleets

URL = "http://127.0.0.1:7001"


def budget(clock=lambda: 0.0, *, most=3, backoff=1.0, forget=600.0) -> RestartBudget:
    return RestartBudget(RestartPolicy(most, backoff, forget), clock=clock)


def test_each_restart_waits_twice_as_long_as_the_one_before_and_then_there_is_none():
    it = budget()
    assert [it.died(URL) for _ in range(4)] == [1.0, 2.0, 4.0, None]
    assert it.died("http://127.0.0.1:7002") == 1.0, "engines have budgets of their own"


def test_the_pause_has_an_upper_limit():
    it = budget(most=20, backoff=10.0)
    assert [it.died(URL) for _ in range(5)] == [10.0, 20.0, 40.0, 60.0, 60.0]


def test_an_engine_that_has_lived_long_enough_has_its_whole_budget_again():
    now = [0.0]
    it = budget(lambda: now[0], most=1)
    assert it.died(URL) == 1.0
    it.started(URL)
    now[0] = 599.0
    assert it.died(URL) is None
    now[0] = 600.0
    assert it.died(URL) == 1.0


class Processes:
    """Hosts, in memory."""

    def __init__(self, *urls: str) -> None:
        self._urls, self.ended, self.started, self.stopped = urls, {}, [], []
        self.failures = self.short_lived = 0
        self.lost = self.vanishes = False

    def urls(self):
        return self._urls

    def is_lost(self, url: str) -> bool:
        return self.lost

    async def exits(self):
        ended, self.ended = self.ended, {}
        return ended

    async def end(self, url: str) -> None:
        self.stopped.append(url)
        if self.lost:
            raise RltoolError("its host is gone")

    async def start_again(self, url: str) -> None:
        self.lost |= self.vanishes
        if self.lost:
            raise RltoolError("its host is gone")
        if self.failures:
            self.failures -= 1
            raise RltoolError("no such host")
        self.started.append(url)
        if self.short_lived:
            self.short_lived -= 1
            self.ended = {url: "ended with exit code 1"}
            while self.ended:  # until that was noticed: before this call has returned
                await asyncio.sleep(0)


class Monitor:
    """What EngineRestarts asks of FleetMonitor: it carries transitions out, and calls `restart` for those to DEAD."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet, self.restart = fleet, None

    async def carry_out(self) -> None:
        for transition in self.fleet.take_transitions():
            if transition.after is State.DEAD and self.restart is not None:
                await self.restart(transition.url)


class Rig:
    def __init__(self, monkeypatch, *, most=3, clock=lambda: 0.0) -> None:
        monkeypatch.setattr(engine_restarts, "LOOK_SECONDS", 0.001)
        self.fleet = Fleet()
        fleets.add_probed(self.fleet, URL, takes_weights=False, boot_id="one")
        self.processes, self.lines = Processes(URL), []
        self.monitor = Monitor(self.fleet)
        self.restarts = EngineRestarts(
            self.processes, budget(clock, most=most, backoff=0.001), log=self.lines.append
        )
        self.monitor.restart = self.restarts.restart
        self.restarts.watch(self.fleet, self.monitor)  # pyright: ignore[reportArgumentType]

    def run(self, body) -> None:
        async def wrapped():
            self.restarts.start()
            try:
                async with asyncio.timeout(20):
                    await body()
            finally:
                await self.restarts.close()

        asyncio.run(wrapped())

    @property
    def state(self) -> State:
        return self.fleet.member(URL).state


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.001)


@pytest.fixture
def rig(monkeypatch):
    return Rig(monkeypatch)


def test_a_process_that_ended_is_started_again_and_the_fleet_waits_for_it(rig):
    async def body():
        rig.processes.ended = {URL: "engine-0 was killed by signal 9"}
        await until(lambda: rig.restarts.counts["restarts"] == 1)
        assert rig.processes.started == [URL]
        assert rig.state is State.STARTING and rig.fleet.member(URL).boot_id is None
        assert "engine http://127.0.0.1:7001: started again in 0.001 s (restart 1)" in rig.lines

    rig.run(body)


def test_an_engine_that_hangs_is_ended_and_started_again(rig):
    async def body():
        for _ in range(rig.fleet.policy.probes_to_dead):
            rig.fleet.probe_failed(URL, "no answer", sent_at=float("inf"))
        await rig.monitor.carry_out()
        await until(lambda: rig.restarts.counts["restarts"] == 1)
        assert rig.processes.started == [URL] and rig.state is State.STARTING

    rig.run(body)


def test_one_that_dies_again_and_again_is_given_up(rig):
    async def body():
        for count in (1, 2, 3):
            rig.processes.ended = {URL: "ended with exit code 1"}
            await until(lambda count=count: rig.restarts.counts["restarts"] == count)
        rig.processes.ended = {URL: "ended with exit code 1"}
        await until(lambda: rig.restarts.counts["given_up"] == 1)
        assert rig.state is State.DEAD and len(rig.processes.started) == 3
        assert "started again 3 times (engines.max_restarts)" in rig.lines[-1]

    rig.run(body)


@pytest.mark.parametrize(("answers", "given_up"), [(False, True), (True, False)])
def test_only_the_time_in_which_an_engine_has_served_gives_it_its_restarts_back(monkeypatch, answers, given_up):
    now = [0.0]
    rig = Rig(monkeypatch, most=2, clock=lambda: now[0])

    async def body():
        for count in (1, 2):
            rig.processes.ended = {URL: "ended with exit code 1"}
            await until(lambda count=count: rig.restarts.counts["restarts"] == count)
            if answers:
                fleets.answers(rig.fleet, URL, sent_at=float("inf"), boot_id=str(count))
                await until(lambda: URL not in rig.restarts._unanswered)
            now[0] += 900.0  # longer than `forget`: it loads, and never serves
        rig.processes.ended = {URL: "ended with exit code 1"}
        await until(lambda: rig.restarts.counts["restarts"] == 3 or rig.restarts.counts["given_up"])
        assert bool(rig.restarts.counts["given_up"]) is given_up

    rig.run(body)


def test_one_that_dies_while_it_is_being_started_is_started_once_more(rig):
    async def body():
        rig.processes.short_lived = 1
        rig.processes.ended = {URL: "was killed"}
        await until(lambda: rig.restarts.counts["restarts"] == 2)
        assert rig.state is State.STARTING

    rig.run(body)


def test_a_restart_that_fails_is_tried_again_and_counts(rig):
    async def body():
        rig.processes.failures = 2
        rig.processes.ended = {URL: "ended"}
        await until(lambda: rig.restarts.counts["restarts"] == 1)
        assert sum("could not be started again: no such host" in line for line in rig.lines) == 2
        assert "(restart 3)" in rig.lines[-1]

    rig.run(body)


def test_an_engine_that_was_told_to_leave_is_not_started_again(rig):
    async def body():
        rig.fleet.drain(URL, "removed")
        rig.fleet.remove(URL, "removed")
        rig.processes.ended = {URL: "was stopped"}
        await until(lambda: not rig.processes.ended)
        await rig.restarts.restart(URL)  # whatever the monitor may have seen
        await until(lambda: not rig.restarts._tasks)
        assert rig.processes.started == []

    rig.run(body)


def test_engines_of_others_are_left_to_them(rig):
    async def body():
        await rig.restarts.restart("http://127.0.0.1:7009")
        assert rig.lines == [] and not rig.restarts._tasks

    rig.run(body)


def test_on_hold_nothing_is_started_until_it_goes_on(rig):
    async def body():
        rig.restarts.hold()
        rig.processes.ended = {URL: "was killed"}
        await until(lambda: rig.restarts._tasks)
        await until(lambda: rig.restarts._may_start._waiters)
        assert rig.processes.started == [] and not rig.restarts.is_starting
        rig.restarts.go_on()
        await until(lambda: rig.restarts.counts["restarts"] == 1)
        assert rig.processes.started == [URL]

    rig.run(body)


def test_an_engine_that_is_ended_counts_as_one_that_died_and_is_ended_twice_without_counting_twice(rig):
    async def body():
        rig.restarts.hold()
        await rig.restarts.end(URL, "it kept its GPU")
        await rig.restarts.end(URL, "it kept its GPU")
        assert rig.processes.stopped == [URL] * 2 and rig.state is State.DEAD
        assert rig.fleet.member(URL).reason == "it kept its GPU"
        rig.restarts.go_on()
        await until(lambda: rig.restarts.counts["restarts"] == 1)
        assert rig.restarts.owns(URL) and not rig.restarts.owns("http://127.0.0.1:7009")

    rig.run(body)


def test_one_that_was_started_and_never_lived_gets_nothing_back():
    now = [0.0]
    it = budget(lambda: now[0], most=2)
    assert it.died(URL) == 1.0
    it.started(URL)
    now[0] = 700.0
    assert it.died(URL) == 1.0, "it has lived for long enough"
    now[0] = 1400.0
    assert it.died(URL) == 2.0
    now[0] = 2100.0
    assert it.died(URL) is None


@pytest.mark.parametrize("known", [True, False])
def test_an_engine_whose_host_is_gone_is_not_tried_again_and_said_to_stay_dead_once(rig, known):
    """known: before it is to be started again, or seen by then."""

    async def body():
        rig.processes.lost, rig.processes.vanishes = known, not known
        rig.processes.ended = {URL: "its host is gone"}
        await until(lambda: rig.restarts.counts["given_up"])
        assert rig.processes.stopped == [URL], "what other hosts have of it"
        rig.processes.ended = {URL: "its host is gone"}
        await until(lambda: not rig.processes.ended)
        await asyncio.sleep(0.02)
        assert rig.state is State.DEAD and rig.processes.started == [] and rig.restarts.counts["given_up"] == 1
        stays = f"engine {URL}: started again in 0.001 s (restart 1)"
        assert rig.lines == [stays] * (not known) + [f"engine {URL} stays dead: its host is gone"]

    rig.run(body)
