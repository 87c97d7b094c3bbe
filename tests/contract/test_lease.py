"""Two trainers at one engine: leases over real sockets (the fake runs the plugin's own table), and the eye on the
weights of engines that know no leases."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rltool.engines.client import EngineClient, RetryPolicy
from rltool.engines.dialects.table import dialect
from rltool.engines.endpoints import EngineEndpoint, ModelEndpoints
from rltool.engines.fleet.engine_set import EngineSet
from rltool.engines.fleet.fleet import Fleet, State
from rltool.engines.fleet.lease import ask_lease, has_died, holder_of_this_process, leased_to_another
from rltool.engines.fleet.resume import resume_engines
from rltool.engines.types import EngineInfo, GenerateRequest, Holder, SamplingParams
from rltool.engines.weight_version import Lineage
from rltool.errors import EngineConflict, EngineError, EngineRejected, UsageError
from rltool.rollout.serving import lease as lease_module
from rltool.rollout.serving.lease import EngineLeases, EngineTaken, LeaseExpired, LeaseTerms
from rltool.training.checks.preflight import check_leases, foreign_weights, probe_fleet
from rltool.training.manager.rollout_engines import Engines, Syncing
from rltool.training.manager.service import RolloutService
from tests import fleets
from tests.contract.fakes.sglang import FakeSglang
from tests.contract.fakes.vllm import FakeVllm
from tests.contract.test_rollout_service import (  # noqa: F401  (fixtures)
    Ranks,
    Speller,
    data_file,
    endpoint_of,
    fakes,
    model_dir,
    settings,
    spellers,
    tokenizer,
    train,
    until,
)

HOST = "host-a"
A, B = (Holder(letter * 32, f"run-{letter}", HOST, number) for number, letter in enumerate("ab", 1))
SECONDS = 60.0


@pytest.fixture(autouse=True)
def renewed_often(monkeypatch):
    monkeypatch.setattr(lease_module, "LONGEST_INTERVAL", 0.05)


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


class GatedRanks(Ranks):
    """Whose weights come when the gate is opened."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.gate, self.writing = asyncio.Event(), asyncio.Event()
        self.gate.set()

    async def send(self, version, urls):
        self.writing.set()
        await self.gate.wait()
        return await super().send(version, urls)


@pytest.fixture
def run_as(settings, tmp_path):  # noqa: F811
    """(holder, engines) -> a started RolloutService of that run in an `async with`."""
    key = tmp_path / "engine-key"
    key.write_text("fake-key")
    config = settings()

    @asynccontextmanager
    async def open_(
        holder: Holder, engines: list[Any], *, steal: bool = False, seconds: float = 3600.0
    ) -> AsyncIterator[RolloutService]:
        endpoints = [endpoint_of(engine, key) for engine in engines]
        async with EngineClient() as client:
            infos = {e.url: await client.probe(e) for e in endpoints}
        syncing = Syncing(
            GatedRanks(config.weights, tmp_path / "nothing"), Lineage(holder.run, 0), "cpu",
            tmp_path / f"weights-{holder.name}", LeaseTerms(holder, seconds, steal), vocab_size=64,
        )  # fmt: skip
        service = RolloutService(config, Engines(tuple(endpoints), infos), syncing=syncing)
        service.ranks = syncing.ranks
        try:
            await service.start()
            yield service
        finally:
            await service.close()

    return open_


def control_calls(engine: FakeVllm, run: str) -> list[str]:
    control = ("/pause", "/resume", "/update_weights", "/shutdown_weight_transfer_engine")
    return [recorded.path for recorded in engine.requests if recorded.run == run and recorded.path in control]


async def asked(engine: FakeVllm, action: Any, holder: Holder, seconds: float = 60.0):
    async with EngineClient() as client:
        return await ask_lease(client, EngineEndpoint(url=engine.url, dialect="vllm"), action, holder, seconds)


def renewals(engine: FakeVllm) -> int:
    return sum(r.path == "/rltool/lease" and r.body["action"] == "renew" for r in list(engine.requests))


class Owner:
    """Ownership of these engines by run A, with leases of 60 s and a clock that can be set ahead; `lines`: what it
    wrote."""

    def __init__(
        self, client: EngineClient, endpoints: dict[str, EngineEndpoint], infos: dict[str, EngineInfo]
    ) -> None:
        self.ahead, self.lines = 0.0, []
        self.fleet = Fleet(clock=lambda: time.monotonic() + self.ahead)
        for url, endpoint in endpoints.items():
            self.fleet.add(endpoint, infos[url])
        engines = EngineSet(self.fleet, client, self.lines.append)
        self.leases = EngineLeases(engines, LeaseTerms(A, 60.0), run=A.run)


@asynccontextmanager
async def owner(engines: list[FakeVllm], key_file: Path) -> AsyncIterator[Owner]:
    async with EngineClient(run=A.run) as client:
        endpoints = {e.url: EngineEndpoint(url=e.url, dialect="vllm", key_file=key_file) for e in engines}
        made = Owner(client, endpoints, {url: await client.probe(endpoint) for url, endpoint in endpoints.items()})
        await made.leases.start()
        try:
            yield made
        finally:
            await made.leases.close()


async def until_renewed(engine: FakeVllm) -> None:
    before = renewals(engine)
    await until(lambda: renewals(engine) > before + 2, "its lease is renewed again and again")


# -- runs


def test_a_second_run_is_refused_and_changes_nothing_and_the_first_trains_on(run_as, spellers):  # noqa: F811
    async def run():
        async with run_as(A, spellers) as first:
            await train(first, 1)
            with pytest.raises(EngineTaken, match=r"leased by run run-a \(pid 1 on host-a\).*\n.*--steal"):
                async with run_as(B, spellers):
                    pass
            assert not any(control_calls(engine, B.run) for engine in spellers)
            await train(first, 2, first=1)
        assert all(engine.leases.lease() is None for engine in spellers), "it gives them back"
        async with run_as(B, spellers) as second:
            await train(second, 1)

    asyncio.run(run())


def test_of_two_engines_with_one_leased_the_other_is_given_back_at_once(spellers):  # noqa: F811
    """The manager that is refused is ended by Ray and closes nothing."""
    urls = [engine.url for engine in spellers]

    async def run():
        await asked(spellers[0], "acquire", A)
        async with EngineClient(run=B.run) as client:
            endpoints = {url: EngineEndpoint(url=url, dialect="vllm") for url in urls}
            infos = {url: await client.probe(endpoint) for url, endpoint in endpoints.items()}
            fleet = Fleet()
            for url, endpoint in endpoints.items():
                fleet.add(endpoint, infos[url])
            leases = EngineLeases(EngineSet(fleet, client), LeaseTerms(B, 3600), run=B.run)
            with pytest.raises(EngineTaken, match=urls[0]):
                await leases.start()
            assert spellers[0].leases.lease().holder == A and spellers[1].leases.lease() is None
            assert leases.lost == {urls[0]}, "which gets no request"

    asyncio.run(run())


def test_a_sync_that_fails_in_a_run_that_leases_nothing_raises_its_own_error():
    async def fails() -> None:
        raise EngineError("it reached none")

    async def run():
        async with EngineClient(run=A.run) as client:
            leases = EngineLeases(EngineSet(Fleet(), client), None, run=A.run)
            await leases.start()
            with pytest.raises(EngineError, match="it reached none"):
                await leases.synced(fails)  # type: ignore[arg-type]

    asyncio.run(run())


def test_a_run_whose_engines_are_stolen_ends_with_the_thiefs_name_and_touches_nothing_more(run_as, spellers):  # noqa: F811
    async def run():
        async with run_as(A, spellers) as victim:
            await train(victim, 1)
            for engine in spellers:
                engine.seconds = 60.0
            spellers[1].delay("/rltool/lease", 0.1)  # one of them is known to be lost before the other
            waiting = asyncio.create_task(train(victim, 2, first=1))
            await until(lambda: all(engine.batch.running for engine in spellers), "the victim samples")
            async with run_as(B, spellers, steal=True) as thief:
                with pytest.raises(EngineTaken, match=r"run run-b \(pid 2 on host-a\) has taken over.*--resume --run"):
                    await waiting
                said = [len(control_calls(engine, A.run)) for engine in spellers]
                with pytest.raises(EngineTaken):
                    await victim.sync_weights(2)
                await victim.close()
                assert [len(control_calls(engine, A.run)) for engine in spellers] == said
                for engine in spellers:
                    engine.seconds = 0.0
                await train(thief, 2)
                assert all(engine.version == f"{B.run}:0:1" for engine in spellers)
                assert all(engine.leases.lease().holder == B for engine in spellers)

    asyncio.run(run())


def test_a_theft_in_the_middle_of_a_sync_ends_it_with_the_thiefs_name(run_as, spellers):  # noqa: F811
    async def run():
        async with run_as(A, spellers) as victim:
            victim.ranks.gate.clear()
            syncing = asyncio.create_task(victim.sync_weights(0))
            await victim.ranks.writing.wait()
            for engine in spellers:
                await asked(engine, "steal", B)
            victim.ranks.gate.set()
            with pytest.raises(EngineTaken, match="run run-b"):
                await syncing

    asyncio.run(run())


def test_a_lease_is_renewed_while_a_sync_takes_its_time(run_as, spellers):  # noqa: F811
    engine = spellers[0]

    async def run():
        async with run_as(A, [engine]) as service:
            service.ranks.gate.clear()
            syncing = asyncio.create_task(service.sync_weights(0))
            await service.ranks.writing.wait()
            before = renewals(engine)
            await until(lambda: renewals(engine) > before + 3, "the lease is renewed")
            service.ranks.gate.set()
            await syncing

    asyncio.run(run())


def test_leases_are_renewed_after_a_moment_without_a_readable_key(spellers, key_file):  # noqa: F811
    async def run():
        async with owner(spellers, key_file) as r:
            key = key_file.read_text()
            key_file.write_text("")
            await asyncio.sleep(0.2)  # four renewals
            key_file.write_text(key)
            for engine in spellers:
                await until_renewed(engine)
            r.leases.check()

    asyncio.run(run())


def test_an_engine_that_leaves_while_leases_are_renewed_ends_no_other_lease(spellers, key_file):  # noqa: F811
    leaving, staying = spellers

    async def run():
        async with owner(spellers, key_file) as r:
            leaving.delay("/rltool/lease", 0.5)
            before = leaving.paths().count("/rltool/lease")
            await until(lambda: leaving.paths().count("/rltool/lease") > before, "its lease is being renewed")
            fleets.answers(r.fleet, leaving.url, sent_at=r.fleet.clock())
            r.fleet.drain(leaving.url, "leaves")
            r.fleet.remove(leaving.url, "left")
            await until_renewed(staying)
            assert not r.lines
            r.leases.check()

    asyncio.run(run())


def test_what_a_renewal_raises_is_written_and_ends_the_run_only_when_the_lease_has_expired(
    spellers, key_file, monkeypatch  # noqa: F811
):  # fmt: skip
    broken, sound = spellers
    error = ValueError("nobody expected this")

    async def ask(client, endpoint, action, *arguments, **options):
        if endpoint.url == broken.url and action == "renew":
            raise error
        return await ask_lease(client, endpoint, action, *arguments, **options)

    async def run():
        async with owner(spellers, key_file) as r:
            monkeypatch.setattr(lease_module, "ask_lease", ask)
            await until(lambda: len(r.lines) > 2, "it is tried again")
            assert set(r.lines) == {f"the lease of the engine {broken.url}: ValueError: nobody expected this"}
            await until_renewed(sound)
            r.leases.check()
            waiting = asyncio.create_task(r.leases.unless_taken(asyncio.Event().wait()))
            r.ahead += 61.0
            with pytest.raises(LeaseExpired, match=rf"{broken.url}: ValueError: .* has expired\. Go on with .*--res"):
                await waiting
            with pytest.raises(LeaseExpired) as raised:
                r.leases.check()
            assert raised.value.__cause__ is error

    asyncio.run(run())


def test_the_engines_of_a_driver_that_says_nothing_any_more_are_given_back_until_it_is_heard_of(spellers, key_file):  # noqa: F811
    async def run():
        async with owner(spellers, key_file) as r:
            r.ahead += 3600.0  # a driver that is this process, as one that serves a trainer, says nothing
            await until_renewed(spellers[0])
            r.leases.heard_of_driver()
            r.ahead += 59.0
            await until_renewed(spellers[0])
            assert not r.lines
            r.ahead += 2.0
            await until(lambda: not any(engine.leases.lease() for engine in spellers), "they are given back")
            await asyncio.sleep(0.2)  # four renewals
            assert r.lines == [f"{A} has said nothing for 61 s: its engines are given back"]
            r.leases.heard_of_driver()
            await until(lambda: all(engine.leases.lease() for engine in spellers), "nobody took them")
            r.leases.check()
            r.ahead += 61.0
            await until(lambda: not any(engine.leases.lease() for engine in spellers), "they are given back again")
            await asked(spellers[1], "acquire", B)
            r.leases.heard_of_driver()
            with pytest.raises(EngineTaken, match="run run-b .* has taken over"):
                await r.leases.unless_taken(asyncio.Event().wait())

    asyncio.run(run())


def test_the_engines_of_a_driver_that_was_killed_are_given_back_at_once(spellers, key_file, monkeypatch):  # noqa: F811
    """Its rollout manager lives on: what was its raylet is a zombie, as in a container without an init."""

    async def run():
        async with owner(spellers, key_file) as r:
            monkeypatch.setattr(lease_module, "has_died", lambda holder: holder == A)
            await until(lambda: not any(engine.leases.lease() for engine in spellers), "they are given back")
            await asyncio.sleep(0.2)  # four renewals
            assert not any(engine.leases.lease() for engine in spellers)
            assert r.lines == [f"{A} has died: its engines are given back"]

    asyncio.run(run())


def test_what_a_killed_run_left_is_free_when_it_has_expired_and_its_own_at_once(run_as, spellers):  # noqa: F811
    async def run():
        engine = spellers[0]
        killed = Holder(A.run, A.name, HOST, 999)
        await asked(engine, "acquire", killed, 60)
        async with run_as(A, [engine]) as resumed:
            await train(resumed, 1)
            assert engine.leases.lease().holder == A
        await asked(engine, "acquire", killed, 60)
        with pytest.raises(EngineTaken):
            async with run_as(B, [engine]):
                pass
        engine.hours_later = 1
        async with run_as(B, [engine]) as other:
            await train(other, 1)

    asyncio.run(run())


def test_an_engine_that_was_started_again_is_leased_again(run_as, spellers):  # noqa: F811
    engine = spellers[0]

    async def run():
        async with run_as(A, spellers) as service:
            await train(service, 1)
            engine.die()
            engine.forget()
            engine.start()
            assert engine.leases.lease() is None
            await until(lambda: engine.leases.lease() is not None, "the lease is taken anew")
            service._leases.check()

    asyncio.run(run())


def test_an_engine_that_joins_must_not_be_another_runs(run_as, spellers):  # noqa: F811
    ours, theirs = spellers

    async def run():
        async with run_as(A, [ours]) as service:
            await asked(theirs, "acquire", B)
            theirs.delay("/rltool/lease", 0.3)
            joining = asyncio.create_task(service.add_engine(endpoint_of(theirs, None)))
            while not joining.done():  # a sync would take a member along
                assert [member.url for member in service.fleet.members()] == [ours.url]
                await asyncio.sleep(0.01)
            with pytest.raises(EngineConflict, match="leased by run run-b"):
                await joining
            theirs.heal()
            assert [member.url for member in service.fleet.members()] == [ours.url]
            theirs.delay("/rltool/lease", 5.0)
            before = theirs.paths().count("/rltool/lease")
            joining = asyncio.create_task(service.add_engine(endpoint_of(theirs, None)))
            await until(lambda: theirs.paths().count("/rltool/lease") > before, "it is asked for its lease")
            joining.cancel()
            await asyncio.wait([joining])
            assert [member.url for member in service.fleet.members()] == [ours.url], "nothing of it is kept"
            theirs.heal()
            await asked(theirs, "release", B)
            await service.add_engine(endpoint_of(theirs, None))
            assert theirs.leases.lease().holder == A
            await train(service, 1)
            await service.remove_engine(theirs.url)
            await until(lambda: theirs.leases.lease() is None, "what left the run is given back")

    asyncio.run(run())


def test_a_plugin_without_leases_is_trained_with_all_the_same(run_as, spellers):  # noqa: F811
    engine = spellers[0]
    engine.fail("/rltool/lease", 404)

    async def run():
        async with run_as(A, [engine]) as service:
            await train(service, 1)

    asyncio.run(run())


# -- everybody else


def test_others_may_generate_and_end_their_requests_but_not_control(fake_vllm, key_file):
    engine = EngineEndpoint(url=fake_vllm.url, dialect="vllm", plugin=True, key_file=key_file)
    request = GenerateRequest((5, 6), SamplingParams(max_tokens=3), "d" * 32, seed=1)

    async def run():
        async with EngineClient() as client:
            assert (await ask_lease(client, engine, "acquire", A, 60)).granted
            assert len((await client.generate(engine, request, timeout=SECONDS))[0].token_ids) == 3
            await client.abort(engine, ["e" * 32], timeout=SECONDS)
            for calls in (dialect("vllm").pause("keep"), dialect("vllm").leave_transfer("g")):
                with pytest.raises(EngineRejected, match=r"leased by run run-a \(pid 1 on host-a\)") as refused:
                    await client.run(engine, calls, timeout=SECONDS)
                assert refused.value.status == 409
            assert (await client.probe(engine)).lease.holder == A

    asyncio.run(run())
    assert not fake_vllm.paused


def test_preflight_names_the_run_that_has_the_engine(fake_vllm, key_file):
    endpoints = ModelEndpoints(engines=(EngineEndpoint(url=fake_vllm.url, key_file=key_file),))
    fake_vllm.leases.acquire(A, 60)
    fleet = probe_fleet(endpoints, timeout=SECONDS)
    for run in (B.run, None):
        with pytest.raises(
            UsageError, match=r"run run-a \(pid 1 on host-a\).*expires in (60|5\d) s.*--steal"
        ) as refused:
            check_leases(fleet, run)
        assert fake_vllm.url in str(refused.value)
    check_leases(fleet, A.run)
    fake_vllm.leases.release(A)
    check_leases(probe_fleet(endpoints, timeout=SECONDS), B.run)


def test_weights_of_another_run_are_named_where_no_lease_tells_whose_the_engine_is(
    stack, fake_vllm, key_file, tmp_path
):
    sglang = stack.enter_context(FakeSglang())
    (tmp_path / "sglang-key").write_text("fake-key")
    sglang.weight_version = fake_vllm.version = f"{A.run}:0:7"
    engines = (
        EngineEndpoint(url=sglang.url, key_file=tmp_path / "sglang-key"),
        EngineEndpoint(url=fake_vllm.url, key_file=key_file),
    )
    fleet = probe_fleet(ModelEndpoints(engines=engines), timeout=SECONDS)
    [line] = foreign_weights(fleet, B.run)
    assert sglang.url in line and A.run in line
    assert foreign_weights(fleet, A.run) == []


def resume(engine: FakeVllm, key_file, *, steal: bool = False):
    async def work():
        async with EngineClient(retry=RetryPolicy(attempts=1), run=B.run) as client:
            where = EngineEndpoint(url=engine.url, key_file=key_file)
            [result] = await resume_engines(client, [where], timeout=SECONDS, holder=B, steal=steal)
            return result

    return asyncio.run(work())


def test_resume_leaves_the_transfer_group_of_a_living_run_alone(fake_vllm, key_file):
    fake_vllm.leases.acquire(A, 60)
    fake_vllm.batch.freeze()
    refused = resume(fake_vllm, key_file)
    assert "leased by run run-a" in refused.error and "--steal" in refused.error
    assert fake_vllm.paused and "/shutdown_weight_transfer_engine" not in fake_vllm.paths()


def test_resume_that_steals_frees_the_engine_and_the_run_that_had_it_hears_of_it(fake_vllm, key_file):
    fake_vllm.leases.acquire(A, 60)
    fake_vllm.batch.freeze()
    assert resume(fake_vllm, key_file, steal=True).error is None
    assert not fake_vllm.paused and fake_vllm.leases.lease() is None
    assert fake_vllm.leases.renew(A, 60).taken_by == B


def killed(name: str = "killed") -> Holder:
    """A run whose driver was a process of this machine."""
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    return replace(holder_of_this_process("c" * 32, name), pid=child.pid)


def test_resume_frees_what_a_run_left_whose_driver_has_died_on_this_host(fake_vllm, key_file):
    fake_vllm.leases.acquire(killed(), 60)
    fake_vllm.batch.freeze()
    assert resume(fake_vllm, key_file).error is None
    assert not fake_vllm.paused and fake_vllm.leases.lease() is None


def test_a_run_need_not_wait_for_the_lease_of_one_that_has_died_on_this_host(run_as, spellers):  # noqa: F811
    engine = spellers[0]

    async def run():
        dead = killed()
        await asked(engine, "acquire", dead)
        async with EngineClient() as client:
            info = await client.probe(endpoint_of(engine, None))
        assert leased_to_another(info.lease, B.run) is None
        async with run_as(B, [engine]) as service:
            await train(service, 1)
            assert engine.leases.lease().holder == B

    asyncio.run(run())


def test_only_a_process_of_this_machine_is_known_to_have_died():
    dead, alive = killed(), holder_of_this_process("c" * 32, "alive")
    assert has_died(dead) and not has_died(alive)
    assert not has_died(replace(dead, machine="")) and not has_died(replace(dead, machine="elsewhere"))


# -- engines without leases


def overwrite(engine: FakeSglang, number: int) -> None:
    """As another trainer's sync does."""
    engine.weight_version = f"{B.run}:0:{number}"
    engine._changed()


def test_a_stock_engine_that_is_overwritten_is_synced_again_once_and_then_left_to_the_other(run_as, stack):
    first, second = (stack.enter_context(FakeSglang()) for _ in range(2))

    async def run():
        async with run_as(A, [first, second]) as service:
            await train(service, 1)
            overwrite(first, 1)
            await service._monitor.probe(first.url)
            member = service.fleet.member(first.url)
            assert member.state is State.STALE and "another trainer" in member.reason and B.run in member.reason
            await train(service, 3, first=1)
            assert first.weight_version == f"{A.run}:0:2"
            overwrite(first, 2)
            await service._monitor.probe(first.url)
            assert service.fleet.member(first.url).state is State.DRAINING
            assert B.run in service.fleet.member(first.url).reason
            await train(service, 4, first=3)
            assert first.weight_version == f"{B.run}:0:2" and second.weight_version == f"{A.run}:0:3"
            left = first.seen["/destroy_weights_update_group"], first.seen["/continue_generation"]
            await service.close()
            assert (first.seen["/destroy_weights_update_group"], first.seen["/continue_generation"]) == left

    asyncio.run(run())


def test_a_run_ends_when_its_last_stock_engine_is_left_to_another(run_as, stack):
    engine = stack.enter_context(FakeSglang())

    async def run():
        async with run_as(A, [engine]) as service:
            await train(service, 1)
            overwrite(engine, 1)
            await service._monitor.probe(engine.url)
            await service.sync_weights(1)
            overwrite(engine, 2)  # which the completions of the next batch show
            with pytest.raises(EngineTaken, match=f"another trainer uses.*{B.run}.*second time.*the last one"):
                await service.next_batch(1)
            assert engine.weight_version == f"{B.run}:0:2"

    asyncio.run(run())
