"""Engines that join and leave the rollout manager of a living run: fake engines on real sockets."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import ExitStack

import pytest

from rltool.config.router import RouterConfig
from rltool.engines.client import EngineClient
from rltool.engines.endpoints import EngineEndpoint, ModelEndpoints
from rltool.engines.fleet.fleet import FleetPolicy, State
from rltool.engines.weight_version import Lineage
from rltool.errors import EngineConflict, TrainingStopped, UnknownEngine, UsageError
from rltool.processes.run_directory import RunDirectory, open_run
from rltool.processes.state import read_state
from rltool.processes.supervise import ProcessGroup
from rltool.quickstart.tiny_model import make_tiny_model
from rltool.rollout.serving.guard import RouterLost
from rltool.rollout.tokenizer import load_tokenizer
from rltool.router.launch import running_router, start_router
from rltool.router.workers import add_worker, list_workers
from rltool.training.manager import membership as fleet_membership
from rltool.training.manager import service as rollout_service
from rltool.training.manager import weight_updates
from rltool.training.manager.rollout_engines import Engines, Syncing
from rltool.training.manager.service import RolloutService
from tests.contract.fakes.vllm import FakeVllm
from tests.contract.test_rollout_service import GENERATE, RUN, Ranks, Speller, generated, there, until

FINISH = "/finish_weight_update"
SHUTDOWN = "/shutdown_weight_transfer_engine"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(weight_updates, "RESYNC_SECONDS", 0.01)
    monkeypatch.setattr(fleet_membership, "DRAIN_POLL_SECONDS", 0.01)
    monkeypatch.setattr(fleet_membership, "REPLY_SECONDS", 0.2)


@pytest.fixture
def engines(model_dir):
    tokenizer = load_tokenizer(model_dir)
    with Speller(tokenizer) as first, Speller(tokenizer) as second:
        yield first, second


class LeavingRanks(Ranks):
    """Ranks that remember whose groups they left."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.left: list[str] = []

    async def leave_transfer(self, urls=None):
        self.left += urls or ()
        await super().leave_transfer(urls)


class Run:
    """A started service; `lines` is what the user is told."""

    def __init__(self, service: RolloutService, ranks: LeavingRanks) -> None:
        self.service, self.ranks = service, ranks
        self.add, self.remove = service.add_engine, service.remove_engine

    def state(self, engine: FakeVllm) -> State | None:
        return next((m.state for m in self.service.fleet.members() if m.url == engine.url), None)

    async def row(self, engine: FakeVllm) -> dict:
        [row] = [row for row in (await self.service.status())["engines"] if row["url"] == engine.url]
        json.dumps(row)
        return row

    def present(self) -> list[str]:
        return [endpoint.url for endpoint in self.service.present_engines()]


@pytest.fixture
def serve(model_dir, tmp_path):
    """serve(work, *engines, sections...) -> what `work(run)` returns, for a run of these engines."""
    data = tmp_path / "words.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{w}=", "label": w[::-1]}) + "\n" for w in ("sun", "cat", "owl")))

    def run(work, *engines, policy=None, router=None, key_file=None, absent=(), **sections):
        from rltool.config.train import TrainConfig

        values = {
            "model": {"path": model_dir},
            "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4},
            "sampling": {"max_prompt_tokens": 8, "max_response_tokens": 8},
            "data": {"train": [data]},
            "reward": {"function": "tests.contract.rollout_functions:long_is_good"},
            "weights": {"transport": "disk"},
        } | sections
        config = TrainConfig.model_validate(values)

        async def main():
            endpoints = [EngineEndpoint(url=engine.url, dialect="vllm", key_file=key_file) for engine in engines]
            async with EngineClient() as client:
                infos = {e.url: await client.probe(e) for e in endpoints}
            ranks = LeavingRanks(config.weights, tmp_path / "nothing")
            syncing = Syncing(ranks, Lineage(RUN, 0), "cpu", tmp_path / "weights", vocab_size=64)
            away = {bare(engine): "connection refused" for engine in absent}
            given = Engines(tuple(endpoints), infos, router, absent=away)
            service = RolloutService(config, given, syncing=syncing, log=lambda line: None)
            if policy is not None:
                service.fleet.policy = policy
            try:
                await service.start()
                return await work(Run(service, ranks))
            finally:
                await service.close()

        return asyncio.run(main())

    return run


def bare(engine: FakeVllm) -> EngineEndpoint:
    """As a person types it."""
    return EngineEndpoint(url=engine.url)


# -- leaving


def test_an_engine_that_leaves_finishes_what_it_has_and_is_forgotten(serve, engines, monkeypatch):
    leaving, other = engines

    async def work(run: Run):
        await run.service.sync_weights(0)
        there(leaving, leaving.batch.freeze)
        waiting = asyncio.create_task(run.service.next_batch(0))
        await until(lambda: len(generated(leaving)) > 2, "it has its half of the batch, after the value check")
        row = await run.remove(leaving.url)
        assert row["state"] == "draining" and "requests in flight, at most" in row["reason"]
        assert 0 < row["leaves_within_seconds"] <= 130
        assert run.present() == [other.url], "a run that resumes does not begin with it"
        asked = len(generated(leaving))
        assert (await run.row(leaving))["state"] == "draining"
        looks, plane = [], run.service._plane
        count = plane.in_flight_at
        monkeypatch.setattr(plane, "in_flight_at", lambda url: looks.append(url) or count(url))
        await until(lambda: len(looks) > 10, "it is looked at again and again")
        assert run.state(leaving) is State.DRAINING and not waiting.done()
        there(leaving, leaving.batch.resume)
        assert (await waiting).batch.num_samples == 16
        await until(lambda: run.state(leaving) is None, "it is out of the fleet")
        assert len(generated(leaving)) == asked, "it got nothing new"
        assert "aborted" not in str(run.service.take_events()), "it finished by itself"
        assert leaving.transport is None, "it is out of its transfer group"
        await run.service.sync_weights(1)
        assert run.ranks.left == [leaving.url], "and so are the ranks, at the next sync"
        assert leaving.version == f"{RUN}:0:0" and other.version == f"{RUN}:0:1"
        with pytest.raises(UnknownEngine):
            await run.remove(leaving.url)

    serve(work, *engines)


def test_what_an_engine_does_not_finish_in_time_goes_on_elsewhere(serve, engines):
    leaving, other = engines

    async def work(run: Run):
        await run.service.sync_weights(0)
        leaving.seconds = 600.0  # for a response of full length
        waiting = asyncio.create_task(run.service.next_batch(0))
        await until(lambda: leaving.batch.running, "it generates")
        await run.remove(leaving.url)
        assert (await asyncio.wait_for(waiting, 60.0)).batch.num_samples == 16
        await until(lambda: run.state(leaving) is None, "it is out of the fleet")
        assert any("deadlines.close = 0.3 s" in line for line in run.service.take_events())
        assert "/inference/v1/abort_requests" in leaving.paths()
        assert "/inference/v1/abort_requests" not in other.paths(), "the other one's requests are left alone"

    serve(work, *engines, deadlines={"close": 0.3})


def test_an_engine_that_hangs_has_left_in_bounded_time_and_says_what_failed(serve, engines, monkeypatch):
    from rltool.rollout.serving import data_plane
    from rltool.weights import engine_calls

    monkeypatch.setattr(data_plane, "ABORT_SECONDS", 0.2)
    monkeypatch.setattr(fleet_membership, "ABORTED_SECONDS", 0.2)
    monkeypatch.setattr(engine_calls, "LEAVE_SECONDS", 0.2)
    leaving, _ = engines

    async def work(run: Run):
        await run.service.sync_weights(0)
        for path in (GENERATE, "/inference/v1/generate", "/inference/v1/abort_requests", SHUTDOWN):
            leaving.hang(path)
        waiting = asyncio.create_task(run.service.next_batch(0))
        await until(lambda: len(generated(leaving)) > 1, "it has a request")
        await run.remove(leaving.url)
        await until(lambda: run.state(leaving) is None, "it is out of the fleet")
        said = run.service.take_events()
        assert any("deadlines.close" in line for line in said)
        assert any(f"leaving {leaving.url}" in line for line in said)
        leaving.die()  # its request breaks, and goes on at the other engine
        assert (await asyncio.wait_for(waiting, 60.0)).batch.num_samples == 16

    serve(work, *engines, deadlines={"close": 0.2})


def test_an_engine_that_leaves_in_the_middle_of_a_sync_leaves_after_it(serve, engines):
    leaving, other = engines

    async def work(run: Run):
        await run.service.sync_weights(0)
        for engine in engines:
            engine.delay(FINISH, 1.0)
        syncing = asyncio.create_task(run.service.sync_weights(1))
        await until(lambda: run.state(leaving) is State.PAUSED, "the sync has it")
        row = await run.remove(leaving.url)
        assert (row["state"], row["reason"]) == ("paused", "leaves when the weight sync in progress has ended")
        assert row["leaves_within_seconds"] > 0 and run.present() == [other.url]
        assert (await run.remove(leaving.url))["state"] == "paused", "asking again is no second removal"
        report = await syncing
        assert set(report.updated) == {leaving.url, other.url}
        await until(lambda: run.state(leaving) is None, "it is out of the fleet")
        assert not leaving.paused and leaving.transport is None
        assert run.service.fleet.serving() == (other.url,)

    serve(work, *engines)


def test_an_engine_that_is_added_again_before_it_has_begun_to_leave_stays(serve, engines):
    leaving, _ = engines

    async def work(run: Run):
        await run.service.sync_weights(0)
        for engine in engines:
            engine.delay(FINISH, 1.0)
        syncing = asyncio.create_task(run.service.sync_weights(1))
        await until(lambda: run.state(leaving) is State.PAUSED, "the sync has it")
        await run.remove(leaving.url)
        assert (await run.add(bare(leaving)))["state"] == "paused"
        await syncing
        assert leaving.url in run.service.fleet.serving() and leaving.url in run.present()

    serve(work, *engines)


def test_an_engine_that_is_added_again_while_it_leaves_is_a_new_one(serve, engines):
    leaving, _ = engines

    async def work(run: Run):
        await run.service.sync_weights(0)
        there(leaving, leaving.batch.freeze)
        waiting = asyncio.create_task(run.service.next_batch(0))
        await until(lambda: len(generated(leaving)) > 1, "it has a request")
        await run.remove(leaving.url)
        assert (await run.add(bare(leaving)))["state"] == "stale"
        there(leaving, leaving.batch.resume)
        await waiting
        await run.service.sync_weights(1)
        assert leaving.url in run.service.fleet.serving() and leaving.version == f"{RUN}:0:1"

    serve(work, *engines)


def test_a_dead_engine_leaves_at_once(serve, engines):
    dead, _ = engines

    async def work(run: Run):
        await run.service.sync_weights(0)
        dead.die()
        run.service.fleet.process_exited(dead.url, "killed")
        assert (await run.remove(dead.url))["state"] == "removed"
        assert run.state(dead) is None

    serve(work, *engines)


def test_a_departure_that_a_bug_of_ours_ends_is_said_and_can_be_asked_for_again(serve, engines, monkeypatch):
    leaving, _ = engines

    async def work(run: Run):
        await run.service.sync_weights(0)
        membership = run.service._membership
        monkeypatch.setattr(membership, "_requests_at", None)
        await run.remove(leaving.url)
        found: list[str] = []
        await until(lambda: any("TypeError" in line for line in (found.extend(run.service.take_events()) or found)), "")
        assert run.state(leaving) is State.DRAINING
        assert (await run.remove(leaving.url))["state"] == "removed" and run.state(leaving) is None

    serve(work, *engines)


# -- joining


def test_an_engine_joins_once_and_serves_after_its_sync(serve, engines):
    first, late = engines

    async def work(run: Run):
        await run.service.sync_weights(0)
        assert (await run.add(bare(late)))["state"] == "stale"
        with pytest.raises(EngineConflict, match="already"):
            await run.add(bare(late))
        assert run.present() == [first.url, late.url] and late.url not in run.service.fleet.serving()
        assert run.service.present_engines()[1].dialect == "vllm", "as it is to stand in endpoints.json"
        await run.service.sync_weights(1)
        assert late.url in run.service.fleet.serving()

    serve(work, first)


def test_two_that_add_the_same_engine_at_once_add_it_once(serve, engines):
    first, late = engines

    async def work(run: Run):
        results = await asyncio.gather(*(run.add(bare(late)) for _ in range(2)), return_exceptions=True)
        assert sorted(type(result).__name__ for result in results) == ["EngineConflict", "dict"]
        assert run.present() == [first.url, late.url]

    serve(work, first)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda engine: setattr(engine, "vocab_size", 65), "vocabulary of 65"),
        (lambda engine: setattr(engine, "weight_backend", "nccl"), "serve-engines --weight-backend rltool"),
    ],
    ids=["another vocabulary", "no way for weights"],
)
def test_an_engine_that_cannot_serve_this_run_is_refused_as_at_the_start(serve, engines, spoil, said):
    first, late = engines
    spoil(late)

    async def work(run: Run):
        with pytest.raises(UsageError, match=said):
            await run.add(bare(late))
        assert run.present() == [first.url] and run.state(late) is None

    serve(work, first)


def test_an_engine_with_another_key_is_refused(serve, engines, tmp_path):
    (tmp_path / "key").write_text("ours")

    async def work(run: Run):
        with FakeVllm(key="another") as stranger:
            for key_file in (None, tmp_path / "key"):
                with pytest.raises(UsageError, match=r"401.*--key-file"):
                    await run.add(bare(stranger).model_copy(update={"key_file": key_file}))
            assert run.state(stranger) is None and len((await run.service.status())["engines"]) == 1

    serve(work, engines[0])


def test_behind_a_router_an_engine_must_have_the_routers_key(serve, engines, tmp_path):
    """It is the router that asks it, with the key of its own clients."""
    first, late = engines
    keys = {name: tmp_path / name for name in ("router", "other")}
    for name, file in keys.items():
        file.write_text(name)

    async def work(run: Run):
        for key_file in (None, keys["other"]):
            with pytest.raises(UsageError, match="another key than the router"):
                await run.add(bare(late).model_copy(update={"key_file": key_file}))
        assert late.paths() == [], "it is not even asked"

    serve(work, first, router=EngineEndpoint(url="http://127.0.0.1:9", dialect="sglang", key_file=keys["router"]))


def test_an_engine_that_answers_late_joins_then_and_is_checked_then(serve, engines):
    first, late = engines
    late.die()
    policy = FleetPolicy(probe_seconds=0.05)

    async def work(run: Run):
        row = await run.add(bare(late))
        assert row["state"] == "starting" and "has not answered yet" in row["reason"]
        assert (await run.row(late))["state"] == "starting"
        assert run.state(late) is None and run.present() == [first.url]
        with pytest.raises(EngineConflict):
            await run.add(bare(late))
        late.start()
        await until(lambda: run.state(late) is State.STALE, "it has joined")
        assert run.present() == [first.url, late.url] and len((await run.service.status())["engines"]) == 2

    serve(work, first, policy=policy, deadlines={"preflight": 1.0})


def test_an_engine_that_was_away_when_the_run_resumed_joins_when_it_answers_and_serves_after_a_sync(serve, engines):
    first, away = engines
    away.die()

    async def work(run: Run):
        row = await run.row(away)
        assert row["state"] == "starting" and row["reason"].endswith("connection refused")
        await run.service.sync_weights(0)
        assert run.present() == [first.url] and run.service.fleet.serving() == (first.url,)
        away.start()
        await until(lambda: run.state(away) is State.STALE, "it has joined")
        await run.service.sync_weights(0)
        assert set(run.service.fleet.serving()) == {first.url, away.url}

    serve(work, first, absent=[away], policy=FleetPolicy(probe_seconds=0.05), deadlines={"preflight": 1.0})


def test_an_engine_that_answers_late_and_is_of_another_model_does_not_join(serve, engines):
    first, late = engines
    late.die()
    late.vocab_size = 65

    async def work(run: Run):
        await run.add(bare(late))
        late.start()
        found: list[str] = []
        await until(lambda: bool(found.extend(run.service.take_events()) or found), "it is said")
        assert any("does not join" in line and "vocabulary" in line for line in found)
        assert len((await run.service.status())["engines"]) == 1 and run.present() == [first.url]

    serve(work, first, policy=FleetPolicy(probe_seconds=0.05), deadlines={"preflight": 1.0})


def test_an_engine_that_never_answers_is_given_up_and_one_that_is_waited_for_can_be_removed(serve, engines):
    first, late = engines
    late.die()

    async def work(run: Run):
        await run.add(bare(late))
        assert (await run.remove(late.url))["state"] == "removed"
        assert len((await run.service.status())["engines"]) == 1
        run.service.fleet.policy = FleetPolicy(probe_seconds=0.05, start_seconds=0.01)
        await run.add(bare(late))
        found: list[str] = []
        await until(lambda: bool(found.extend(run.service.take_events()) or found), "it is said")
        assert any("no answer in 0.01 s" in line for line in found)
        assert len((await run.service.status())["engines"]) == 1

    serve(work, first, deadlines={"preflight": 1.0})


# -- behind the real sglang-router


@pytest.fixture
def behind_router(tmp_path):
    """Three fake engines that share a key, the first two behind a router: (engines, router)."""
    own = open_run("router", create=True, root=tmp_path / "runs")
    key = own.ensure_key().read_text().strip()
    with ExitStack() as stack:
        engines = [stack.enter_context(FakeVllm(key=key)) for _ in range(3)]
        for engine in engines:
            engine.vocab_size = 64
        given = [keyed(engine, own.key_file) for engine in engines[:2]]
        group = stack.enter_context(ProcessGroup(own))
        start_router(RouterConfig(health_check_interval=1.0), ModelEndpoints(engines=tuple(given)), group)
        yield engines, running_router(own)


def keyed(engine: FakeVllm, key_file) -> EngineEndpoint:
    return EngineEndpoint(url=engine.url, dialect="vllm", plugin=True, key_file=key_file)


async def workers_of(router: EngineEndpoint) -> set[str]:
    return {worker.url for worker in await asyncio.to_thread(list_workers, router)}


async def a_step(run: Run, step: int) -> None:
    await run.service.sync_weights(step)
    assert (await run.service.next_batch(step)).batch.num_samples == 16


def served(engine: FakeVllm) -> int:
    return engine.paths().count("/generate")


def test_the_router_has_exactly_the_engines_that_serve_whoever_comes_and_goes(serve, behind_router):
    (leaving, staying, late), router = behind_router

    async def work(run: Run):
        await asyncio.to_thread(add_worker, router, keyed(late, router.key_file), timeout=30.0)
        await a_step(run, 0)
        assert await workers_of(router) == {leaving.url, staying.url}, "the foreign one is out before the next request"
        await run.add(keyed(late, router.key_file).model_copy(update={"dialect": None}))
        assert await workers_of(router) == {leaving.url, staying.url}, "it has none of our weights yet"
        await run.service.sync_weights(1)
        assert await workers_of(router) == {leaving.url, staying.url, late.url}
        there(leaving, leaving.batch.freeze)
        before, waiting = served(leaving), asyncio.create_task(run.service.next_batch(1))
        await until(lambda: served(leaving) > before, "it has a request")
        await run.remove(leaving.url)
        while leaving.url in await workers_of(router):  # the reply waits for that, up to REPLY_SECONDS
            pass
        assert await workers_of(router) == {staying.url, late.url} and not waiting.done()
        assert run.state(leaving) is State.DRAINING, "the engine itself says that it has something to do"
        there(leaving, leaving.batch.resume)
        assert (await waiting).batch.num_samples == 16
        await until(lambda: run.state(leaving) is None, "it is out of the fleet")
        before = served(leaving)
        await a_step(run, 2)
        assert served(leaving) == before and served(late) > 0

    engines = (leaving, staying)
    serve(work, *engines, router=router, key_file=router.key_file)


def test_a_router_that_is_gone_for_good_ends_the_run_and_no_group_is_lost(serve, behind_router, monkeypatch):
    """Its requests would be tried again for ever: the engines serve."""
    (first, second, _), router = behind_router
    monkeypatch.setattr(rollout_service, "GUARD_SECONDS", 0.01)

    async def work(run: Run):
        await a_step(run, 0)
        await run.service.sync_weights(1)
        kill_router(router)
        with pytest.raises(RouterLost, match=rf"{router.url}, through which .*deadlines.engines = 0.5 s"):
            await run.service.next_batch(1)
        assert {run.state(engine) for engine in (first, second)} == {State.READY}
        run.service.collector.ledger.check()
        assert run.service.collector.ledger.counts()["partial"] == 4

    policy = FleetPolicy(probe_seconds=0.05)
    serve(work, first, second, policy=policy, router=router, key_file=router.key_file, deadlines={"engines": 0.5})


def kill_router(router: EngineEndpoint) -> None:
    assert router.key_file is not None
    state = read_state(RunDirectory(router.key_file.parent.parent), "router")
    assert state is not None and state.url == router.url
    os.kill(state.pid, signal.SIGKILL)


def test_a_foreign_worker_ends_the_run_where_it_is_refused(serve, behind_router):
    (first, second, stranger), router = behind_router

    async def work(run: Run):
        await a_step(run, 0)
        await asyncio.to_thread(add_worker, router, keyed(stranger, router.key_file), timeout=30.0)
        await run.service.sync_weights(1)
        with pytest.raises(TrainingStopped, match=stranger.url):
            await run.service.next_batch(1)

    serve(work, first, second, router=router, key_file=router.key_file, engines={"foreign_workers": "refuse"})
