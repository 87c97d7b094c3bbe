"""The whole sync, control side and trainer side, against fake engines that receive real bytes over real gloo groups."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rltool.config.rollout import WeightsConfig
from rltool.engines.fleet.fleet import State
from rltool.processes.ports import reserved_ports
from rltool.weights import engine_calls, engine_update, liveness
from rltool.weights.memory import Memory
from rltool.weights.send.sender import SendReport
from rltool.weights.sync_report import SyncReport, WeightSyncFailed
from rltool.weights.transport import transport
from tests import fleets
from tests.contract import sync_rig
from tests.contract.fakes.sglang import FakeSglang
from tests.contract.fakes.vllm import FakeVllm
from tests.contract.sync_rig import KEY, RUN, Rig, version
from tests.ranks import SenderRanks

TENSORS = {
    "a.weight": torch.arange(6.0).reshape(2, 3),
    "b.weight": torch.arange(5, dtype=torch.bfloat16),
    "c.bias": torch.full((7,), 0.5),
}
DEADLINE = 3.0


class Ranks(SenderRanks):
    """`wrong`: positions of compared engines whose log-probabilities it does not share; `log`: the calls, in order,
    each with its end."""

    def __init__(self, config: WeightsConfig, model_files: Path) -> None:
        super().__init__(config, model_files, deadline=DEADLINE)
        self.tensors = dict(TENSORS)
        self.wrong: set[int] = set()
        self.log: list[str] = []
        self.before_send: Callable[[], Any] = lambda: None
        self.on_send: Callable[[Sequence[str]], Any] = lambda urls: None
        self.on_logprobs: Callable[[], Any] = lambda: None

    def weights(self, step):
        return self.tensors

    async def host(self, receivers, group, directory):
        self.log.append(f"host {len(receivers)}")
        return await super().host(receivers, group, directory)

    async def send(self, version, urls):
        self.before_send()
        report = await super().send(version, urls)
        report = self.on_send(urls) or report
        self.log.append("sent")
        return report

    async def abort_transfer(self, urls, reason):
        self.log.append(f"abort {len(urls)}: {reason}")
        await super().abort_transfer(urls, reason)

    async def logprobs(self, batch):
        self.on_logprobs()
        self.log.append(f"compared {len(batch.lengths)}")
        found = batch.rollout_logprobs.clone()
        ends = batch.lengths.cumsum(0).tolist()
        for i in self.wrong:
            found[ends[i] - int(batch.lengths[i]) : ends[i]] -= 0.5
        return found


def rig(*engines: Any, directory: Path, transport: str = "gloo") -> AbstractAsyncContextManager[Rig[Ranks]]:
    config = WeightsConfig(bucket_bytes=20, transport=transport)
    return sync_rig.rig(engines, Ranks, config, directory, deadline=DEADLINE)


def connections(engine: FakeVllm) -> int:
    return engine.paths().count("/init_weight_transfer_engine")


def assert_received(engine: FakeVllm, tensors=TENSORS) -> None:
    assert engine.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(engine.tensors[name], tensor), name


def test_every_engine_gets_every_byte_and_the_version_and_serves(two, tmp_path):
    async def run() -> SyncReport:
        async with rig(*two, directory=tmp_path) as r:
            report = await r.sync.sync(version(0))
            assert r.states() == [State.READY] * 2 and r.fleet.version == version(0)
            return report

    report = asyncio.run(run())
    for engine in two:
        assert_received(engine)
        assert engine.version == str(version(0)) and not engine.paused
    assert (report.bytes, report.updated, report.failed) == (24 + 10 + 28, tuple(e.url for e in two), {})
    assert set(report.phases) == {"connect", "pause", "transfer", "finish", "resume", "verify"}
    assert report.difference == 0.0 and report.metrics()["weights/failed_engines"] == 0


def test_the_next_sync_uses_the_same_groups_and_brings_the_new_values(two, tmp_path):
    async def run() -> None:
        async with rig(*two, directory=tmp_path) as r:
            await r.sync.sync(version(0))
            r.ranks.tensors = {name: tensor + 1 for name, tensor in TENSORS.items()}
            report = await r.sync.sync(version(1))
            assert report.difference is None, "old connections are not compared again"
            for engine in two:
                assert_received(engine, r.ranks.tensors)
                assert connections(engine) == 1
            assert (await r.sync.sync(version(2), check_all=True)).difference == 0.0

    asyncio.run(run())


@pytest.mark.parametrize("transport", ["gloo", "disk"])
def test_a_fleet_of_both_dialects_is_synced_from_one_gather(stack, tmp_path, transport):
    engines = [stack.enter_context(FakeVllm(key=KEY)), stack.enter_context(FakeSglang())]

    async def run() -> None:
        async with rig(*engines, directory=tmp_path, transport=transport) as r:
            await r.sync.sync(version(0))
            await r.sync.sync(version(1))
            assert [engines[0].version, engines[1].weight_version] == [str(version(1))] * 2
            assert r.states() == [State.READY] * 2

    asyncio.run(run())
    assert_received(engines[0])
    assert engines[1].weights.keys() == TENSORS.keys()


@pytest.mark.parametrize("transport", ["gloo", "disk"])
@pytest.mark.parametrize("old", ["0.5.17", "0.5.20"])
def test_an_sglang_without_update_sessions_is_synced_and_known_again(stack, tmp_path, transport, old):
    # Not two of them: torch knows one group of a name in a process.
    engines = [stack.enter_context(FakeSglang(version=old)), stack.enter_context(FakeVllm(key=KEY))]

    async def run() -> None:
        async with rig(*engines, directory=tmp_path, transport=transport) as r:
            await r.sync.sync(version(0))
            for engine in engines:
                await r.probe(engine)
            assert r.states() == [State.READY] * 2
            report = await r.sync.sync(version(1))
            assert report.difference is None, "old connections are not compared again"

    asyncio.run(run())
    assert engines[0].weights.keys() == TENSORS.keys() and engines[0].weight_version == str(version(1))
    # 0.5.17 could not name the weights of a token whose request ran across the sync; beside it the vLLM keeps requests.
    assert engines[0].bodies["/pause_generation"]["mode"] == ("abort" if old == "0.5.17" else "retract")
    assert {request.query["mode"] for request in engines[1].requests if request.path == "/pause"} == {"keep"}


@pytest.mark.parametrize("route", ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update"])
@pytest.mark.parametrize("status", [404, 500])
def test_a_failed_step_is_that_engines_failure_and_the_next_sync_repairs(two, tmp_path, route, status):
    sick, healthy = two

    async def run() -> None:
        async with rig(*two, directory=tmp_path) as r:
            await r.sync.sync(version(0))
            sick.fail(route, status, times=1)
            report = await r.sync.sync(version(1))
            assert report.updated == (healthy.url,) and report.failed.keys() == {sick.url}
            assert str(status) in report.failed[sick.url] and route in report.failed[sick.url]
            assert sick.url in report.line() and report.metrics()["weights/failed_engines"] == 1
            assert not sick.paused and not healthy.paused
            assert sick.version != str(version(1)), "a version is given only to weights that arrived"
            assert healthy.version == str(version(1))
            assert r.states() == [State.STALE, State.READY]

            report = await r.sync.sync(version(2))
            assert report.failed == {} and r.states() == [State.READY] * 2
            assert_received(sick)
            assert (connections(sick), connections(healthy)) == (2, 1), "only the engine that failed is connected again"
            assert r.ranks.log[-3:] == ["host 1", "sent", "compared 1"]

    asyncio.run(run())


def test_an_engine_that_hangs_is_given_up_at_the_deadline_and_the_others_go_on(two, tmp_path, monkeypatch):
    monkeypatch.setattr(engine_update, "REASON_SECONDS", 60.0)  # the ranks give it up earlier, and it may still say why
    sick, healthy = two

    async def run() -> None:
        async with rig(*two, directory=tmp_path) as r:
            await r.sync.sync(version(0))
            sick.hang("/update_weights")
            report = await r.sync.sync(version(1))
            reason = report.failed[sick.url]
            assert "update_weights" in reason and "deadlines.sync has passed" in reason
            assert healthy.version == str(version(1)) and not healthy.paused
            assert r.fleet.serving() == (healthy.url,)
            sick.heal()
            # It held up the others, so for ten times as long it does not again.
            found = re.search(r"left out of syncs for (\d+) s, as this one waited (\d+) s for it", reason)
            assert found is not None and abs(int(found[1]) - 10 * int(found[2])) <= 5
            assert (await r.sync.sync(version(2))).updated == (healthy.url,)
            assert r.states() == [State.STALE, State.READY]
            r.fleet.put_off(sick.url, 0.0)
            await r.sync.sync(version(3))
            assert r.states() == [State.READY] * 2

    asyncio.run(run())


@pytest.mark.parametrize("failed", ["/update_weights", "/finish_weight_update"])
def test_an_engine_that_fails_at_once_is_not_put_off_for_what_another_took(two, tmp_path, failed):
    brisk, slow = two

    async def run() -> None:
        async with rig(*two, directory=tmp_path) as r:
            brisk.fail(failed, 500, times=1)
            for path in ("/init_weight_transfer_engine", "/pause", "/start_weight_update", "/update_weights"):
                slow.delay(path, DEADLINE / 2.5)
            began = time.monotonic()
            report = await r.sync.sync(version(0))
            assert time.monotonic() - began > DEADLINE, "longer than a bucket may take"
            assert report.updated == (slow.url,) and report.failed.keys() == {brisk.url}
            assert failed in report.failed[brisk.url] and "left out" not in report.failed[brisk.url]
            slow.heal()
            assert (await r.sync.sync(version(1))).failed == {} and r.states() == [State.READY] * 2

    asyncio.run(run())


def test_an_engine_that_falls_silent_is_suspect_and_the_next_sync_does_not_wait_for_it(two, tmp_path, monkeypatch):
    sick = two[0]

    async def run() -> None:
        async with rig(*two, directory=tmp_path) as r:
            await r.sync.sync(version(0))
            monkeypatch.setattr(liveness, "HEALTH_SECONDS", 0.5)  # a busy host answers within three of them
            r.sync.calls.deadline = 600.0  # only the health checks can end this in time
            monkeypatch.setattr(engine_calls, "LEAVE_SECONDS", 0.05)
            for path in ("/pause", "/resume", "/health"):
                sick.hang(path)
            report = await r.sync.sync(version(1))
            assert "missed 3 health checks" in report.failed[sick.url]
            assert r.states() == [State.SUSPECT, State.READY]
            assert r.fleet.member(sick.url).reason == report.failed[sick.url], "no probe has failed"
            assert (await r.sync.sync(version(2))).failed == {}
            sick.heal()
            await r.probe(sick)
            assert r.states() == [State.STALE, State.READY]
            await r.sync.sync(version(2))
            assert r.states() == [State.READY] * 2

    asyncio.run(run())


def test_an_engine_that_is_slow_and_healthy_is_waited_for(two, tmp_path, monkeypatch):
    monkeypatch.setattr(liveness, "HEALTH_SECONDS", 0.5)

    async def run() -> None:
        async with rig(*two, directory=tmp_path) as r:
            two[0].delay("/pause", 2.0)
            assert (await r.sync.sync(version(0))).failed == {}
            assert two[0].paths().count("/health") >= 2

    asyncio.run(run())


def test_an_engine_that_answers_that_it_is_not_ready_is_connected_all_the_same(two, tmp_path):
    async def run() -> None:
        async with rig(*two, directory=tmp_path) as r:
            two[0].fail("/health", 503)  # as SGLang says while it is paused, which a dead trainer may have left it
            assert (await r.sync.sync(version(0))).failed == {}
            assert r.states() == [State.READY] * 2

    asyncio.run(run())


def test_the_ranks_host_nothing_for_an_engine_that_is_away(two, tmp_path):
    sick, healthy = two

    async def run() -> None:
        async with rig(*two, directory=tmp_path) as r:
            sick.reset("/health")
            report = await r.sync.sync(version(0))
            assert "/health" in report.failed[sick.url] and report.updated == (healthy.url,)
            assert r.ranks.log[0] == "host 1" and "/pause" not in sick.paths()
            with pytest.raises(WeightSyncFailed, match="/health"):
                await r.sync.sync(version(0), only={sick.url})
            sick.heal()
            await r.sync.sync(version(0), only={sick.url})
            assert r.states() == [State.READY] * 2

    asyncio.run(run())


def test_an_engine_that_dies_in_the_transfer_fails_alone(two, tmp_path):
    sick, healthy = two

    async def run() -> None:
        async with rig(*two, directory=tmp_path) as r:
            await r.sync.sync(version(0))
            sick.reset("/update_weights")
            report = await r.sync.sync(version(1))
            assert report.failed.keys() == {sick.url} and r.fleet.serving() == (healthy.url,)

    asyncio.run(run())


def test_an_engine_that_only_the_trainer_saw_failing_is_not_given_the_version(two, tmp_path):
    sick, healthy = two

    async def run() -> None:
        async with rig(*two, directory=tmp_path) as r:
            await r.sync.sync(version(0))
            plain = await r.sync.sync(version(1))
            lost = {sick.url: "sending weights: connection lost at the last byte"}
            r.ranks.on_send = lambda urls: replace(_report(plain), failures=lost)
            report = await r.sync.sync(version(2))
            assert report.failed == lost and r.states() == [State.STALE, State.READY]
            assert sick.version != str(version(2)) and healthy.version == str(version(2))

    asyncio.run(run())


def _report(sync: SyncReport) -> SendReport:
    return SendReport(sync.bytes, sync.seconds)


def test_an_engine_that_the_ranks_have_lost_is_told_to_leave_when_its_request_has_ended(two, tmp_path, monkeypatch):
    monkeypatch.setattr(engine_update, "REASON_SECONDS", 0.05)
    sick, events = two[0], []

    async def run() -> None:
        async with rig(*two, directory=tmp_path) as r:
            await r.sync.sync(version(0))
            send = r.client.run

            async def recorded(endpoint, requests, *, timeout):
                paths = [request.path for request in requests] if endpoint.url == sick.url else []
                events.extend(f"begins {path}" for path in paths)
                try:
                    await send(endpoint, requests, timeout=timeout)
                finally:
                    events.extend(f"ends {path}" for path in paths)

            monkeypatch.setattr(r.client, "run", recorded)
            sick.hang("/update_weights")
            report = await r.sync.sync(version(1))
            assert report.failed.keys() == {sick.url}

    asyncio.run(run())
    assert events.index("ends /update_weights") < events.index("begins /shutdown_weight_transfer_engine")
    assert events.index("ends /shutdown_weight_transfer_engine") < events.index("begins /resume")


def test_an_engine_that_refuses_the_connection_is_not_paused_and_the_others_are_synced(two, tmp_path):
    sick, healthy = two

    async def run() -> None:
        async with rig(*two, directory=tmp_path) as r:
            sick.fail("/init_weight_transfer_engine", 500, times=1)
            report = await r.sync.sync(version(0))
            assert "init_weight_transfer_engine" in report.failed[sick.url]
            assert report.updated == (healthy.url,) and r.states() == [State.STALE, State.READY]
            assert "/pause" not in sick.paths()

    asyncio.run(run())


def test_an_engine_that_turns_suspect_while_others_are_connected_is_left_out_and_named(two, tmp_path):
    sick, healthy = two

    async def run() -> None:
        async with rig(*two, directory=tmp_path, transport="disk") as r:
            host = r.ranks.host

            async def while_it_fails_requests(*asked):
                for _ in range(2):
                    r.fleet.probe_failed(sick.url, "refused", sent_at=time.monotonic())
                return await host(*asked)

            r.ranks.host = while_it_fails_requests
            report = await r.sync.sync(version(0))
            assert "2 probes in a row failed" in report.failed[sick.url]
            assert report.updated == (healthy.url,) and r.states() == [State.SUSPECT, State.READY]

    asyncio.run(run())


def test_a_sync_that_reaches_nobody_raises_names_each_engine_and_resumes_all(two, tmp_path):
    async def run() -> None:
        async with rig(*two, directory=tmp_path) as r:
            await r.sync.sync(version(0))
            for engine in two:
                engine.fail("/update_weights", 500, times=1)
            with pytest.raises(WeightSyncFailed, match="reached none of 2 engines") as error:
                await r.sync.sync(version(1))
            assert all(engine.url in str(error.value) and not engine.paused for engine in two)
            assert r.states() == [State.STALE] * 2 and r.fleet.version == version(0)
            await r.sync.sync(version(1))
            assert r.states() == [State.READY] * 2

    asyncio.run(run())


def test_without_an_engine_to_sync_it_says_how_each_is(two, tmp_path):
    async def run() -> None:
        async with rig(*two, directory=tmp_path) as r:
            for engine in two:
                r.fleet.process_exited(engine.url, "killed")
            with pytest.raises(WeightSyncFailed, match="no engine is there to receive them(.|\n)*dead.*killed"):
                await r.sync.sync(version(0))

    asyncio.run(run())


@pytest.mark.parametrize("boot_id", ["another", "the same"])
def test_an_engine_restarted_under_its_old_url_is_connected_anew(two, tmp_path, boot_id):
    """The same: a service manager starts the process again with the environment that it had."""
    restarted, other = two

    async def run() -> None:
        async with rig(*two, directory=tmp_path) as r:
            await r.sync.sync(version(0))
            restarted.die()
            before = restarted.boot_id
            restarted.forget()
            restarted.boot_id = before if boot_id == "the same" else restarted.boot_id
            restarted.start()
            await r.probe(restarted)
            assert r.states() == [State.STALE, State.READY]
            report = await r.sync.sync(version(1))
            assert report.failed == {} and (connections(restarted), connections(other)) == (2, 1)
            assert report.difference == 0.0
            assert_received(restarted)

    asyncio.run(run())


def test_an_engine_restarted_unseen_fails_in_one_sync_and_is_connected_in_the_next(two, tmp_path):
    restarted, other = two

    async def run() -> None:
        async with rig(*two, directory=tmp_path) as r:
            await r.sync.sync(version(0))
            restarted.die()
            restarted.forget()
            restarted.start()
            report = await r.sync.sync(version(1))
            assert report.failed.keys() == {restarted.url} and report.updated == (other.url,)
            assert (await r.sync.sync(version(2))).failed == {}
            assert r.states() == [State.READY] * 2

    asyncio.run(run())


def test_an_engine_that_joins_later_is_connected_alone(stack, two, tmp_path):
    late = stack.enter_context(FakeVllm(key=KEY))

    async def run() -> None:
        async with rig(*two, directory=tmp_path) as r:
            await r.sync.sync(version(0))
            await r.add(late)
            report = await r.sync.sync(version(1))
            assert set(report.updated) == {e.url for e in (*two, late)}
            assert [connections(e) for e in (*two, late)] == [1, 1, 1]
            assert r.ranks.log == ["host 2", "sent", "compared 2", "host 1", "sent", "compared 1"]

    asyncio.run(run())


# -- the value check


def test_a_new_connection_does_not_serve_before_its_values_were_compared(two, tmp_path):
    async def run() -> None:
        async with rig(*two, directory=tmp_path) as r:
            seen = []
            r.ranks.on_logprobs = lambda: seen.append((r.states(), [e.paused for e in two]))
            await r.sync.sync(version(0))
            assert seen == [([State.PAUSED] * 2, [False, False])], "resumed at the engine, not in the fleet"
            assert r.states() == [State.READY] * 2

    asyncio.run(run())


def test_an_engine_whose_values_differ_is_a_failure_and_stale_and_compared_again(two, tmp_path):
    async def run() -> None:
        async with rig(*two, directory=tmp_path) as r:
            r.ranks.wrong = {1}
            report = await r.sync.sync(version(0))
            assert report.updated == (two[0].url,) and "weights.verify_tolerance" in report.failed[two[1].url]
            assert r.states() == [State.READY, State.STALE]
            r.ranks.wrong = set()
            assert (await r.sync.sync(version(1))).failed == {}
            assert r.ranks.log[-1] == "compared 1" and r.states() == [State.READY] * 2

    asyncio.run(run())


def test_a_sync_whose_engines_all_differ_raises(two, tmp_path):
    async def run() -> None:
        async with rig(*two, directory=tmp_path) as r:
            r.ranks.wrong = {0, 1}
            with pytest.raises(WeightSyncFailed, match="acknowledged the weights"):
                await r.sync.sync(version(0))
            assert r.states() == [State.STALE] * 2

    asyncio.run(run())


def test_an_engine_that_cannot_sample_for_the_check_does_not_serve(two, tmp_path):
    async def run() -> None:
        async with rig(*two, directory=tmp_path) as r:
            two[0].fail("/rltool/generate", 400)
            report = await r.sync.sync(version(0))
            assert "answered 400" in report.failed[two[0].url] and r.states() == [State.STALE, State.READY]

    asyncio.run(run())


@pytest.mark.parametrize("where", ["before_send", "on_send", "on_logprobs"])
def test_a_rank_that_fails_leaves_no_engine_paused(two, tmp_path, where):
    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    async def run() -> None:
        async with rig(*two, directory=tmp_path) as r:
            setattr(r.ranks, where, fail)
            with pytest.raises(OSError, match="no space left"):
                await r.sync.sync(version(0))
            assert not any(engine.paused for engine in two)
            assert r.states() == [State.STALE] * 2 and "no space left" in r.fleet.member(two[0].url).reason
            setattr(r.ranks, where, lambda *_: None)
            assert (await r.sync.sync(version(0))).failed == {}

    asyncio.run(run())


# -- a part of the fleet


def test_stale_engines_take_the_present_version_while_the_others_serve(two, tmp_path):
    missed, serving = two

    async def run() -> None:
        async with rig(*two, directory=tmp_path) as r:
            await r.sync.sync(version(0))
            missed.fail("/start_weight_update", 500, times=1)
            await r.sync.sync(version(1))
            pauses = serving.paths().count("/pause")
            seen = []
            r.ranks.on_send = lambda urls: seen.append((list(urls), r.fleet.serving()))
            report = await r.sync.sync(version(1), only={missed.url})
            assert seen == [([missed.url], (serving.url,))]
            assert report.updated == (missed.url,) and missed.version == str(version(1))
            assert serving.paths().count("/pause") == pauses and r.states() == [State.READY] * 2

            r.ranks.tensors = {name: tensor + 1 for name, tensor in TENSORS.items()}
            report = await r.sync.sync(version(2))
            assert report.failed == {} and connections(serving) == 1, "its group was left as it was"
            for engine in two:
                assert_received(engine, r.ranks.tensors)

    asyncio.run(run())


def test_a_failing_part_leaves_those_that_serve_alone(two, tmp_path):
    missed = two[0]

    async def run() -> None:
        async with rig(*two, directory=tmp_path) as r:
            await r.sync.sync(version(0))
            missed.fail("/start_weight_update", 500)
            await r.sync.sync(version(1))
            with pytest.raises(WeightSyncFailed):
                await r.sync.sync(version(1), only={missed.url})
            assert r.states() == [State.STALE, State.READY] and not missed.paused

    asyncio.run(run())


def test_engines_that_take_no_weights_are_left_alone(stack, two, tmp_path):
    judge = stack.enter_context(FakeVllm(key=KEY))

    async def run() -> None:
        async with rig(*two, directory=tmp_path) as r:
            await r.add(judge, takes_weights=False)
            before = len(judge.requests)
            for step in range(2):
                assert set((await r.sync.sync(version(step))).updated) == {e.url for e in two}
            await r.sync.leave()
            assert len(judge.requests) == before and r.fleet.member(judge.url).state is State.READY

    asyncio.run(run())


# -- the end


def test_a_sync_ends_only_after_send_has_ended(two, tmp_path):
    async def run() -> None:
        async with rig(*two, directory=tmp_path) as r:
            await r.sync.sync(version(0))
            for engine in two:
                engine.fail("/update_weights", 500, times=1)
            r.ranks.log.clear()
            with pytest.raises(WeightSyncFailed):
                await r.sync.sync(version(1))
            assert r.ranks.log[-1] == "sent"

    asyncio.run(run())


def test_leaving_resumes_engines_and_takes_them_out_of_their_groups(two, tmp_path):
    async def run() -> None:
        async with rig(*two, directory=tmp_path) as r:
            fleets.add(r.fleet, "http://127.0.0.1:9")  # it has never answered
            await r.sync.sync(version(0))
            two[0].batch.freeze()
            assert await r.sync.leave() == {}
            assert not two[0].paused
            assert all(engine.paths()[-2:] == ["/shutdown_weight_transfer_engine", "/resume"] for engine in two)
            two[1].fail("/shutdown_weight_transfer_engine", 500, times=None)
            await r.sync.sync(version(1))
            two[1].fail("/shutdown_weight_transfer_engine", 500, times=None)
            failures = await r.sync.leave()
            assert failures.keys() == {two[1].url} and "shutdown_weight_transfer_engine" in failures[two[1].url]

    asyncio.run(run())


# -- memory


@pytest.mark.parametrize("count", [2, 3, 20])
def test_two_buckets_are_held_however_many_are_sent(two, tmp_path, count):
    async def run() -> SyncReport:
        async with rig(*two, directory=tmp_path) as r:
            r.ranks.tensors = {f"{i}.weight": torch.full((7,), float(i)) for i in range(count)}
            report = await r.sync.sync(version(0))
            for engine in two:
                assert_received(engine, r.ranks.tensors)
            return report

    report = asyncio.run(run())
    assert report.bytes == count * 28 and report.memory == Memory(host=2 * 28)
    metrics = report.metrics()
    assert (metrics["weights/host_bytes"], metrics["weights/device_bytes"]) == (56.0, 0.0)
    assert "; holding 0.0 MB on the host and 0.0 MB on the GPU)" in report.line()


def test_a_rank_that_gathers_reports_that_too_and_a_failed_sync_leaves_nothing_of_it(two, tmp_path):
    async def run() -> None:
        async with rig(*two, directory=tmp_path) as r:
            r.ranks.stream_bytes = 1000
            assert (await r.sync.sync(version(0))).memory == Memory(host=28 + 10 + 1000)
            r.ranks.stream_bytes = 0
            assert (await r.sync.sync(version(1))).memory == Memory(host=28 + 10)

    asyncio.run(run())


# -- several transports


REPLICAS = 2
"""SGLang with data parallelism joins no update group: its weights lie on disk."""


def test_one_sync_feeds_gloo_and_disk_engines_from_one_gather(stack, two, tmp_path):
    sglang = stack.enter_context(FakeSglang(dp=REPLICAS))

    async def run() -> None:
        async with rig(*two, sglang, directory=tmp_path, transport="auto") as r:
            gathers, stream = [], r.ranks.stream
            r.ranks.stream = lambda step: gathers.append(step) or stream(step)
            for step in (1, 2):
                gathers.clear()
                r.ranks.tensors = {name: tensor + step for name, tensor in TENSORS.items()}
                report = await r.sync.sync(version(step))
                assert (set(report.updated), report.failed) == ({e.url for e in (*two, sglang)}, {})
                assert report.memory == Memory(host=28 + 10 + 28), "a bucket is copied to be written"
                assert gathers.count(step) == 1
                for engine in two:
                    assert_received(engine, r.ranks.tensors)
                sent = {n: t.flatten().view(torch.uint8).numpy().tobytes() for n, t in r.ranks.tensors.items()}
                assert sglang.weights == sent
                assert sglang.weight_version == str(version(step))

    asyncio.run(run())
    assert "/init_weights_update_group" not in sglang.seen and sglang.seen["/update_weights_from_disk"] == 2
    assert [connections(engine) for engine in two] == [1, 1]
    assert {path.name for path in (tmp_path / "weights").iterdir()} == {f"{RUN}-1-1", f"{RUN}-1-2"}


def test_an_sglang_that_was_started_without_weights_takes_them_from_a_directory(stack, two, tmp_path):
    sglang = stack.enter_context(FakeSglang(dp=REPLICAS))
    sglang.load_format = "dummy"

    async def run() -> None:
        async with rig(two[0], sglang, directory=tmp_path, transport="auto") as r:
            assert (await r.sync.sync(version(1))).failed == {}

    asyncio.run(run())


def test_an_update_that_was_left_open_in_an_sglang_with_replicas_is_closed_before_the_next(stack, tmp_path):
    sglang = stack.enter_context(FakeSglang(dp=REPLICAS))

    async def run() -> None:
        async with rig(sglang, directory=tmp_path, transport="auto") as r:
            left = transport("sglang", "disk").control.begin()  # by a trainer that died
            await r.client.run(r.endpoints[sglang.url], left, timeout=LONG)
            report = await r.sync.sync(version(1))
            assert (report.updated, report.failed) == ((sglang.url,), {})
            assert await r.sync.leave() == {}

    asyncio.run(run())


def test_a_directory_that_cannot_be_written_fails_the_engines_that_read_it_alone(stack, two, tmp_path):
    sglang = stack.enter_context(FakeSglang(dp=REPLICAS))
    (tmp_path / "weights").write_text("a file where the directory should be")

    async def run() -> None:
        async with rig(two[0], sglang, directory=tmp_path, transport="auto") as r:
            report = await r.sync.sync(version(1))
            assert report.updated == (two[0].url,) and report.failed.keys() == {sglang.url}
            assert "sending weights" in report.failed[sglang.url] and "weights" in report.failed[sglang.url]
            (tmp_path / "weights").unlink()
            assert (await r.sync.sync(version(2))).failed == {}
            assert r.states() == [State.READY] * 2

    asyncio.run(run())
    assert "/update_weights_from_disk" in sglang.seen


def test_an_engine_that_no_transport_reaches_any_more_is_named_and_the_others_are_synced(two, tmp_path):
    async def run() -> None:
        async with rig(*two, directory=tmp_path, transport="auto") as r:
            fleets.describe(r.fleet, two[0].url, info={"weight_backend": "nccl"})  # started anew, otherwise
            report = await r.sync.sync(version(0))
            assert report.updated == (two[1].url,) and "--weight-backend rltool" in report.failed[two[0].url]
            assert r.states() == [State.STALE, State.READY]

    asyncio.run(run())


def test_one_port_serves_one_engine_and_again_after_it_has_left_and_the_next_one_is_told(two, tmp_path):
    first, second = two

    async def run() -> None:
        async with rig(first, directory=tmp_path) as r:
            with reserved_ports(1) as held:
                [port] = held.ports
            r.ranks.sender.config = r.ranks.config.model_copy(update={"port_range": (port, port)})
            for step in range(2):
                assert (await r.sync.sync(version(step))).failed == {}
                r.sync.connections.lost(first.url)  # as an engine that was started anew is
            assert connections(first) == 2
            await r.add(second)
            report = await r.sync.sync(version(2))
            assert report.updated == (first.url,)
            assert f"weights.port_range: no free port on 127.0.0.1 from {port} to {port}" in report.failed[second.url]
            assert "/init_weight_transfer_engine" not in second.paths()

    asyncio.run(run())


# -- ranks and engines do not wait for each other in vain


LARGE = {"large": torch.zeros(8 << 20)}
"""More than the sockets of a connection hold: its broadcast waits for the engine."""
LONG = 60.0
"""Deadline of a test in which nothing may wait for it."""


def patient(r: Rig) -> None:
    r.sync.calls.deadline = r.ranks.sender.deadline = LONG


async def within(work: Any) -> Any:
    async with asyncio.timeout(LONG / 2):
        return await work


def test_the_ranks_do_not_wait_in_join_for_an_engine_that_refused(two, tmp_path):
    sick, healthy = two

    async def run() -> None:
        async with rig(*two, directory=tmp_path) as r:
            patient(r)
            sick.fail("/init_weight_transfer_engine", 500, times=1)
            report = await within(r.sync.sync(version(0)))
            assert "init_weight_transfer_engine" in report.failed[sick.url] and report.updated == (healthy.url,)
            assert r.ranks.log[1].startswith("abort 1: the engine did not join")
            assert (await within(r.sync.sync(version(1)))).failed == {}
            assert_received(sick)

    asyncio.run(run())


def test_the_ranks_do_not_wait_in_send_for_an_engine_that_failed(two, tmp_path, monkeypatch):
    monkeypatch.setattr(engine_calls, "LEAVE_SECONDS", 0.05)
    sick, healthy = two

    async def run() -> None:
        async with rig(*two, directory=tmp_path) as r:
            r.ranks.tensors = LARGE
            patient(r)
            await within(r.sync.sync(version(0)))
            sick.fail("/update_weights", 500, times=1)
            sick.hang("/shutdown_weight_transfer_engine")  # or its leaving would end the broadcast
            report = await within(r.sync.sync(version(1)))
            assert "answered 500" in report.failed[sick.url] and report.updated == (healthy.url,)
            assert any(line.startswith("abort 1: the engine failed") for line in r.ranks.log)
            assert_received(healthy, LARGE)

    asyncio.run(run())


def test_an_engine_that_falls_silent_in_the_transfer_is_aborted_at_the_ranks(two, tmp_path, monkeypatch):
    sick, healthy = two

    async def run() -> None:
        async with rig(*two, directory=tmp_path) as r:
            r.ranks.tensors = LARGE
            patient(r)
            await within(r.sync.sync(version(0)))
            monkeypatch.setattr(liveness, "HEALTH_SECONDS", 0.5)
            monkeypatch.setattr(engine_calls, "LEAVE_SECONDS", 0.05)
            for path in ("/update_weights", "/resume", "/health"):
                sick.hang(path)
            report = await within(r.sync.sync(version(1)))
            assert "missed 3 health checks" in report.failed[sick.url] and report.updated == (healthy.url,)
            assert r.states() == [State.SUSPECT, State.READY]

    asyncio.run(run())


def test_an_engine_that_holds_a_bucket_too_long_is_stale_and_not_waited_for(two, tmp_path, monkeypatch):
    """Its request stays open: nothing but the ranks shows that it takes nothing."""
    monkeypatch.setattr(engine_update, "REASON_SECONDS", 0.05)
    sick, healthy = two

    async def run() -> None:
        async with rig(*two, directory=tmp_path) as r:
            r.sync.calls.deadline = LONG
            r.ranks.tensors = LARGE
            r.ranks.sender.deadline = 1.0
            await within(r.sync.sync(version(0)))
            sick.hang("/update_weights")
            report = await within(r.sync.sync(version(1)))
            assert "sending weights" in report.failed[sick.url] and report.updated == (healthy.url,)
            assert r.states() == [State.STALE, State.READY] and sick.version != str(version(1))
            assert sick.paths()[-2] == "/shutdown_weight_transfer_engine", "it is told to leave, then to resume"
            sick.heal()
            assert (await within(r.sync.sync(version(2)))).failed == {}

    asyncio.run(run())


# -- the disk transport


def test_disk_keeps_two_versions_of_this_run_and_touches_nothing_else(two, tmp_path):
    root = tmp_path / "weights"
    foreign = [root / name for name in ("1" * 32 + "-0-0", "notes", f"{RUN}-backup", f"{RUN}-1-x", f"{RUN}0-1-0")]
    for directory in foreign:
        directory.mkdir(parents=True)
        (directory / "kept").write_text("mine")
    (root / f"{RUN}-1-7").write_text("a file of that name")

    async def run() -> None:
        async with rig(*two, directory=tmp_path, transport="disk") as r:
            for step in range(4):
                await r.sync.sync(version(step))
            assert r.states() == [State.READY] * 2

    asyncio.run(run())
    assert_received(two[0])
    kept = {f"{RUN}-1-2", f"{RUN}-1-3", f"{RUN}-1-7", *(directory.name for directory in foreign)}
    assert {path.name for path in root.iterdir()} == kept
    assert all((directory / "kept").read_text() == "mine" for directory in foreign)
    assert (root / f"{RUN}-1-3" / "model.safetensors.index.json").exists()
