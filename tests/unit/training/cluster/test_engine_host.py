"""What the rollout manager hears of hosts of engines, one of which vanishes: actors in memory."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, RaySystemError

from rltool.config.serve import EngineLaunch
from rltool.errors import HostLost, PartLost
from rltool.training.cluster import engine_host
from rltool.training.cluster.engine_host import HostHandles

ONE, OTHER, BOTH = "http://10.0.0.1:1", "http://10.0.0.2:2", "http://10.0.0.1:3"


@dataclass
class Reference:
    """May be awaited again and again."""

    future: asyncio.Future[object]

    def __await__(self):
        return asyncio.shield(self.future).__await__()


class Actor:
    """Of a host that answers, is silent, or is gone."""

    def __init__(self) -> None:
        self.ended: dict[int, str] = {}
        self.calls: list[tuple[object, ...]] = []
        self.silent = self.gone = self.fails = False
        for name in ("exits", "stop_engine", "start_engine"):
            setattr(self, name, SimpleNamespace(remote=lambda *given, name=name: self._begin(name, *given)))

    def _begin(self, name: str, *given: object) -> Reference:
        return Reference(asyncio.ensure_future(self._call(name, *given)))

    async def _call(self, name: str, *given: object) -> object:
        self.calls.append((name, *given))
        while self.silent:
            await asyncio.sleep(0.001)
        if self.fails:
            raise RaySystemError("no memory")
        if self.gone:
            error = ActorDiedError()
            why = "The actor died because its node has died. the actor's node was terminated: silent."
            error._error_msg = error.error_msg = why
            raise error
        ended, self.ended = self.ended, {}
        return ended


def launch(index: int, host: int, port: int, rank: int = 0) -> EngineLaunch:
    address = f"10.0.0.{host}"
    where = {"node": f"n{host}", "address": address, "host": address, "port": port}
    return EngineLaunch.model_construct(index=index, node_rank=rank, **where)


@pytest.fixture
def rig(monkeypatch):
    monkeypatch.setattr(engine_host, "ANSWER_SECONDS", 0.01)
    first, second = Actor(), Actor()
    launches = [launch(0, 1, 1), launch(1, 2, 2), launch(2, 1, 3), launch(2, 2, 3, rank=1)]
    handles = HostHandles([("n1", first), ("n2", second)], {"n1": "10.0.0.1", "n2": "10.0.0.2"}, launches)
    return SimpleNamespace(handles=handles, first=first, second=second)


def test_a_silent_host_keeps_nobody_from_hearing_of_the_others_and_is_asked_once(rig):
    async def body():
        rig.second.silent = True
        rig.first.ended = {0: "engine-0 was killed by signal 9"}
        assert await rig.handles.exits() == {ONE: "engine-0 was killed by signal 9"}
        assert await rig.handles.exits() == {}
        assert len(rig.second.calls) == 1 and not rig.handles.is_lost(OTHER)
        rig.second.ended, rig.second.silent = {1: "engine-1 ended"}, False
        assert await rig.handles.exits() == {OTHER: "engine-1 ended"}

    asyncio.run(body())


def test_a_host_that_cannot_be_asked_takes_nothing_from_what_the_others_say(rig):
    async def body():
        rig.second.fails = True
        rig.first.ended = {0: "engine-0 was killed by signal 9"}
        assert await rig.handles.exits() == {ONE: "engine-0 was killed by signal 9"}
        with pytest.raises(PartLost, match=r"asking host 10\.0\.0\.2 about its engines"):
            await rig.handles.exits()
        rig.second.ended, rig.second.fails = {1: "engine-1 ended"}, False
        assert await rig.handles.exits() == {OTHER: "engine-1 ended"}

    asyncio.run(body())


def test_engines_with_a_part_on_a_host_that_is_gone_are_named_with_it_and_end_elsewhere(rig):
    async def body():
        rig.second.gone = True
        said = await rig.handles.exits()
        assert said.keys() == {OTHER, BOTH} and "on host 10.0.0.2 was lost with its host" in said[OTHER]
        assert [rig.handles.is_lost(url) for url in (ONE, OTHER, BOTH)] == [False, True, True]
        assert await rig.handles.exits() == {}
        for call in (rig.handles.end, rig.handles.start_again):
            with pytest.raises(HostLost, match=r"10\.0\.0\.2 was lost"):
                await call(BOTH)
        asked = [call for call in rig.first.calls if call[0] != "exits"]
        assert asked == [("stop_engine", 2)] * 2, "and it is not started there alone"
        assert [call[0] for call in rig.second.calls] == ["exits"]

    asyncio.run(body())


def test_a_host_that_is_seen_to_be_gone_by_a_restart_is_lost_from_then_on(rig):
    async def body():
        rig.second.gone = True
        with pytest.raises(HostLost):
            await rig.handles.start_again(OTHER)
        assert rig.handles.is_lost(OTHER) and not rig.handles.is_lost(ONE)
        await rig.handles.start_again(ONE)
        assert [call[0] for call in rig.first.calls] == ["stop_engine", "start_engine"]
        assert (await rig.handles.exits()).keys() == {OTHER, BOTH}, "all that were there are named, once"
        assert await rig.handles.exits() == {}

    asyncio.run(body())
