"""What an update that fails, or whose engine is lost meanwhile, leaves behind: nothing that passes for whole weights,
and no other engine's failure."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext

import pytest
from safetensors import SafetensorError

from rltool.engines.client import EngineClient
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet.engine_set import EngineSet
from rltool.engines.fleet.fleet import Fleet, State
from rltool.engines.types import INCOMPLETE_VERSION, GenerateRequest, SamplingParams
from rltool.engines.weight_version import Lineage
from rltool.errors import EngineError
from rltool.rollout.serving.data_plane import DataPlane
from rltool.rollout.serving.versions import VersionBook
from rltool.weights import connections
from rltool.weights.engine_calls import EngineCalls
from rltool.weights.sync_report import WeightSyncFailed
from rltool.weights.transports import disk
from rltool.weights.transports.nccl_vllm import STOCK
from tests.contract.fakes.sglang import FakeSglang, Fault
from tests.contract.fakes.vllm import FakeVllm
from tests.contract.sync_rig import KEY, RUN, version
from tests.contract.test_weight_sync import rig


def test_tokens_of_an_engine_whose_update_failed_are_neither_the_old_versions_nor_anybodys(tmp_path):
    """It goes on with what it has kept: the requests at it are withdrawn before, and who asks it meanwhile, through a
    router say, is told that its weights are nobody's."""

    async def run() -> None:
        with FakeSglang() as broken, FakeVllm(key=KEY) as whole:
            async with rig(broken, whole, directory=tmp_path) as r:
                book = VersionBook(Lineage(RUN, 1))
                book.begin(0)
                assert (await r.sync.sync(version(0))).failed == {}
                book.publish(0)
                broken.seconds = 1.0
                plane = DataPlane(r.set, router=None, requests_per_engine=4, deadline=20, judge=book)
                asked = GenerateRequest((1, 2, 3), SamplingParams(max_tokens=20, ignore_eos=True), "a" * 32, seed=7)
                # The fleet has them in this order, and the first free one takes the request.
                answer = asyncio.ensure_future(plane.generate(asked, group=0))
                while not plane.in_flight_at(broken.url):
                    await asyncio.sleep(0.01)
                resumed: list[int] = []

                def withdraw() -> None:
                    resumed.append(broken.seen["/continue_generation"])
                    plane.changed()

                r.withdraw = withdraw
                before = broken.seen["/continue_generation"]
                broken.faults["/flush_cache"] = Fault(times=1, status=400)
                book.begin(1)
                report = await r.sync.sync(version(1))
                book.publish(1)
                assert set(report.failed) == {broken.url} and r.states() == [State.STALE, State.READY]
                assert resumed == [before] and broken.seen["/continue_generation"] == before + 1
                assert broken.weight_version == INCOMPLETE_VERSION
                assert plane.counts["withdrawn_requests"] == 1
                plane.changed()
                [completion] = await answer
                assert {span.version for span in completion.versions} == {str(version(1))}, "sampled anew, elsewhere"
                assert (await r.sync.sync(version(1), only={broken.url})).failed == {}
                assert broken.weight_version == str(version(1))

    asyncio.run(run())


def test_engines_that_die_while_they_are_compared_do_not_differ(two, tmp_path):
    """Values that differ twice end a run; processes that end are started again."""

    async def run() -> None:
        async with rig(*two, directory=tmp_path) as r:

            def die() -> None:
                for engine in two:
                    r.fleet.process_exited(engine.url, "killed")

            r.ranks.on_logprobs = die
            with pytest.raises(WeightSyncFailed) as raised:
                await r.sync.sync(version(0))
            assert not raised.value.values_differ and "dead (killed)" in str(raised.value)

    asyncio.run(run())


@pytest.mark.parametrize("path", ["/pause", "/finish_weight_update"])
@pytest.mark.parametrize("why", ["its process ended", "another run has it"])
def test_an_engine_that_is_lost_to_something_else_in_the_middle_is_its_own_failure_alone(two, tmp_path, path, why):
    kept, lost = two

    async def run() -> None:
        async with rig(*two, directory=tmp_path) as r:
            assert (await r.sync.sync(version(0))).failed == {}
            asked = lost.paths().count(path)
            lost.delay(path, 0.3)

            async def lose() -> None:
                while lost.paths().count(path) == asked:
                    await asyncio.sleep(0.01)
                r.fleet.process_exited(lost.url, why)
                if why == "another run has it":
                    r.fleet.remove(lost.url, why)

            losing = asyncio.create_task(lose())
            report = await r.sync.sync(version(1))
            await losing
            assert report.updated == (kept.url,) and set(report.failed) == {lost.url}
            reason = "it has left the run" if why == "another run has it" else why
            assert report.failed[lost.url] == f"it cannot be updated now: {reason}"
            assert r.fleet.member(kept.url).state is State.READY and kept.version == str(version(1))
            assert not kept.paused and not lost.paused

    asyncio.run(run())


def test_an_engine_is_not_told_to_join_a_trainer_that_has_stopped_waiting(tmp_path):
    """SGLang would wait for it for half an hour."""

    async def run() -> None:
        with FakeSglang() as engine:
            async with rig(engine, directory=tmp_path) as r:
                leave, asked = engine._answer, []

                async def slowly(request, handler):
                    if request.path == "/destroy_weights_update_group":
                        asked.append(request.path)
                        while not joined.done():
                            await asyncio.sleep(0.01)
                    return await leave(request, handler)

                engine._answer = slowly
                joined: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                join = r.ranks.join
                r.sync.calls.deadline = 30.0  # longer than the ranks wait, as deadlines.sync is

                async def failing():
                    failures = await join()
                    joined.set_result(None)
                    return failures

                r.ranks.join = failing
                with pytest.raises(WeightSyncFailed, match="join"):
                    await r.sync.sync(version(0))
                assert asked and not engine.seen["/init_weights_update_group"]

    asyncio.run(run())


def test_a_full_disk_is_a_failed_sync_and_what_it_left_goes_with_the_next(two, tmp_path, monkeypatch):
    def full(*_, **__) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    async def run() -> None:
        async with rig(two[0], directory=tmp_path, transport="disk") as r:
            assert (await r.sync.sync(version(0))).failed == {}
            with monkeypatch.context() as patched:
                patched.setattr(disk, "save_file", full)
                with pytest.raises(WeightSyncFailed, match="No space left on device"):
                    await r.sync.sync(version(1))
            left = [path.name for path in (tmp_path / "weights").iterdir() if path.name.startswith(".")]
            assert len(left) == 1
            strangers = tmp_path / "weights" / f".{'f' * 32}-1-1.partial"
            strangers.mkdir()
            assert (await r.sync.sync(version(2))).failed == {}
            left = [path for path in (tmp_path / "weights").iterdir() if path.name.startswith(".")]
            assert left == [strangers]

    asyncio.run(run())


@pytest.mark.parametrize("status", [200, 503])
def test_a_stock_vllm_stands_still_while_it_forgets_a_failed_update_and_goes_on_whatever_became_of_it(
    fake_stock_vllm, tmp_path, status
):
    """Between start and finish its layers have no weights."""
    asked = ["/sleep", "/start_weight_update", "/finish_weight_update", "/shutdown_weight_transfer_engine", "/wake_up"]
    if status != 200:
        fake_stock_vllm.fail("/finish_weight_update", status)
        del asked[3]

    async def run() -> None:
        async with EngineClient() as client:
            endpoint = EngineEndpoint(url=fake_stock_vllm.url, dialect="vllm")
            calls = EngineCalls(EngineSet(Fleet(), client), deadline=5.0)
            with nullcontext() if status == 200 else pytest.raises(EngineError, match="503"):
                await connections._leave(calls.run, endpoint, STOCK.control)
        assert fake_stock_vllm.paths() == asked and not fake_stock_vllm.paused

    asyncio.run(run())
