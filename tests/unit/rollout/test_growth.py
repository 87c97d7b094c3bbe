"""What grows with engines and groups grows no faster than they do: counted, at a size and at four times it."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace

import pytest

from rltool.engines.fleet.engine_set import EngineSet
from rltool.engines.fleet.fleet import Fleet
from rltool.engines.fleet.state import FleetPolicy
from rltool.engines.types import Completion, GenerateRequest, SamplingParams
from rltool.engines.weight_version import WeightVersion
from rltool.rollout.admission import AdmissionPolicy
from rltool.rollout.groups import GroupLedger
from rltool.rollout.serving.data_plane import DataPlane
from rltool.rollout.serving.monitor import FleetMonitor
from tests.fleets import add_probed
from tests.unit.rollout.test_collector import Versions, Work, make, publish

SIZE, TIMES = 8, 4
RUN = "c" * 32


class Client:
    """Of engines whose requests end when they are aborted. sent: ids to each engine, and calls."""

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        self.ends: dict[str, asyncio.Future[list[Completion]]] = {}

    def request_ids(self, endpoint, request):
        return [request.request_id]

    async def generate(self, endpoint, request, **_):
        end = self.ends[request.request_id] = asyncio.get_running_loop().create_future()
        self.sent["requests"] += 1
        return await end

    async def abort(self, endpoint, ids, *, timeout):
        self.sent["abort calls"] += 1
        self.sent["aborted ids"] += len(ids)
        for name in ids:
            self.ends[name].set_result([Completion((), (), "abort", ())])


def fleet_of(count: int, **policy: float) -> Fleet:
    fleet = Fleet(FleetPolicy(**policy))
    for number in range(count):
        add_probed(fleet, f"http://e{number}:1", takes_weights=False)
    fleet.take_transitions()
    return fleet


def aborted(count: int) -> Counter[str]:
    """All requests of so many engines, four at each, aborted at once."""

    async def run():
        client = Client()
        plane = DataPlane(EngineSet(fleet_of(count), client, print), router=None, requests_per_engine=4, deadline=60.0)
        sampling = SamplingParams(max_tokens=1, temperature=1.0)
        requests = [GenerateRequest((1,), sampling, f"r{i}", n=1, seed=1) for i in range(4 * count)]
        tasks = [asyncio.create_task(plane.generate(request, group=i)) for i, request in enumerate(requests)]
        while client.sent["requests"] < len(requests):
            await asyncio.sleep(0)
        assert await plane.abort() == {}
        await asyncio.gather(*tasks)
        return client.sent

    return asyncio.run(run())


def canaries(count: int) -> Counter[str]:
    """Engines that have been idle: each gets a canary request and answers."""

    async def run():
        seen: Counter[str] = Counter()
        fleet = fleet_of(count, idle_canary_seconds=1e-9)

        async def healthy(*_, **__):
            seen["requests"] += 1
            return SimpleNamespace(weight_version=None, boot_id=None)

        def changed() -> None:
            seen["members looked at"] += len(fleet.members())

        client = SimpleNamespace(generate=healthy)
        monitor = FleetMonitor(EngineSet(fleet, client, print), on_change=changed)
        await asyncio.gather(*(monitor._canary(url) for url in fleet.canaries_due()))
        return seen

    return asyncio.run(run())


def surplus(count: int) -> Counter[str]:
    """A batch of so many groups, and half as many that were begun and lost the race: one abort for all of them, which
    looks at every request."""

    async def run():
        work = Work(Versions(), delay=lambda group: 60.0 if group.id % 3 == 0 else 0.0)
        calls: Counter[str] = Counter()
        abort = work.abort

        async def counted(groups):
            calls["aborts"] += 1
            calls["groups"] += len(groups)
            await abort(groups)

        work.abort = counted
        collector = make(work, AdmissionPolicy(batch=count, oversampling=1.5, max_staleness=0))
        publish(collector, 0)
        await collector.next(0)
        await asyncio.sleep(0.01)
        await collector.interrupt()
        assert calls == {"aborts": 1, "groups": count // 2}
        return calls

    return asyncio.run(run())


def waiting(count: int) -> Counter[str]:
    """Groups that end while as many others wait, put aside, for the next weights."""

    async def run():
        looked: Counter[str] = Counter()
        work = Work(Versions())
        policy = AdmissionPolicy(batch=4 * count, oversampling=1.5, max_staleness=1, partial_rollout=True)
        collector = make(work, policy)
        publish(collector, 0)
        groups = collector.ledger.groups()[:count]
        for group in groups:
            group.put_aside_at = 0

        class Ledger(GroupLedger):
            def groups(self, *states):
                found = super().groups(*states)
                looked["groups"] += len(found)
                return found

        collector.ledger.__class__ = Ledger
        collector._put_aside(groups)
        while collector.ledger.counts()["running"]:
            await asyncio.sleep(0.001)
        await collector.interrupt()
        assert looked["groups"] <= 2 * count, looked
        return looked

    return asyncio.run(run())


@pytest.mark.parametrize("counted", [aborted, canaries, surplus, waiting], ids=lambda f: f.__name__)
def test_four_times_the_size_is_four_times_the_work(counted):
    small, large = counted(SIZE), counted(TIMES * SIZE)
    assert small and all(large[what] <= TIMES * small[what] for what in small.keys() | large.keys()), (small, large)


def test_a_sync_changes_who_may_serve_once_for_each_engine_that_stops_and_goes_on():
    fleet, version = Fleet(), WeightVersion(RUN, 0, 1)
    urls = [f"http://e{number}:1" for number in range(SIZE)]
    for url in urls:
        add_probed(fleet, url)
        fleet.pause(url)
    before = fleet.revision
    for url in urls:  # one after the other, while others are asked for requests
        fleet.update_began(url)
        fleet.update_finished(url, version)
    assert fleet.revision == before
    fleet.advance(version)
    for url in urls:
        fleet.resume(url)
    assert fleet.revision == before + SIZE
    for url in urls:
        fleet.request_succeeded(url, sent_at=fleet.clock())
    assert fleet.revision == before + SIZE
