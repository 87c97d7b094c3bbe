"""Syncs over the delta transport: a real writer and a real store, fake engines with the plugin's real fetching, and the
real follower beside a fake SGLang."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rltool.config.rollout import WeightsConfig
from rltool.engines.delta import chain
from rltool.engines.delta.follow import Report, follow
from rltool.engines.delta.store import open_store
from rltool.engines.fleet.fleet import State
from rltool.engines.types import HttpRequest
from rltool.errors import EngineRejected
from rltool.weights.memory import Memory
from rltool.weights.sync_report import WeightSyncFailed
from rltool.weights.transports import delta
from tests.contract import sync_rig
from tests.contract.fakes.sglang import FakeSglang
from tests.contract.fakes.vllm import FakeVllm
from tests.contract.sync_rig import KEY, Rig, version
from tests.ranks import SenderRanks, slowly_changing

DEADLINE = 10.0


class Ranks(SenderRanks):
    def weights(self, step):
        return slowly_changing(step)

    async def logprobs(self, batch):
        return batch.rollout_logprobs.clone()


def rig(*engines: Any, directory: Path, **config: Any) -> AbstractAsyncContextManager[Rig[Ranks]]:
    """The store is directory / "store"."""
    weights = WeightsConfig(bucket_bytes=200, transport="delta", store=str(directory / "store"), **config)
    return sync_rig.rig(engines, partial(Ranks, deadline=DEADLINE), weights, directory, deadline=DEADLINE)


def files(directory: Path, step: int) -> set[str]:
    """Kinds of files that this version has in the store."""
    written = directory / "store" / chain.directory(str(version(step)))
    return {path.name.partition("-")[0] for path in written.iterdir() if path.suffix == ".safetensors"}


@contextmanager
def follower(store: Path, directory: Path, engine: str) -> Iterator[None]:
    """`rltool engines follow-weights`, in a thread."""
    stopped = threading.Event()
    thread = threading.Thread(
        target=follow,
        args=(open_store(str(store)), directory),
        kwargs={
            "engine": engine, "every": 0.01, "deadline": DEADLINE, "log": lambda _: None, "stopped": stopped.is_set,
        },
    )  # fmt: skip
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def assert_has(engine: Any, ranks: Ranks, step: int) -> None:
    wanted = ranks.weights(step)
    if isinstance(engine, FakeVllm):
        assert engine.tensors.keys() == wanted.keys()
        assert all(torch.equal(engine.tensors[name], wanted[name]) for name in wanted)
        assert engine.version == str(version(step))
    else:
        as_bytes = {name: tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in wanted.items()}
        assert engine.weights == as_bytes and engine.weight_version == str(version(step))


def paths(engine: FakeVllm) -> list[str]:
    wanted = ("/rltool/prefetch", "/pause", "/rltool/update_weights", "/rltool/finish_weight_update", "/resume")
    return [path for path in engine.paths() if path in wanted]


def test_engines_fetch_before_they_are_paused_and_then_take_patches(two, tmp_path):
    async def scenario():
        async with rig(*two, directory=tmp_path, anchor_every=3) as r:
            for step in range(5):
                report = await r.sync.sync(version(step))
                assert set(report.updated) == {engine.url for engine in two} and report.failed == {}
                assert 0 < report.paused < report.seconds
                written = tmp_path / "store" / chain.directory(str(version(step)))
                largest = max(path.stat().st_size for path in written.glob("*.safetensors"))
                # Two buckets, the copy of the weights, and a file that is written.
                assert report.memory == Memory(host=2400 + 100 + report.bytes + largest)
                for engine in two:
                    assert_has(engine, r.ranks, step)
            patch = {"patch"}
            assert [files(tmp_path, step) for step in range(5)] == [{"model"}, patch, patch, {"model", "patch"}, patch]
            asked = ["/rltool/prefetch", "/rltool/update_weights", "/rltool/finish_weight_update"]
            assert paths(two[0])[:6] == asked * 2 and not two[0].paused

    asyncio.run(scenario())


def test_a_late_engine_and_a_restarted_one_take_the_anchor_and_the_chain(two, stack, tmp_path):
    late = stack.enter_context(FakeVllm(key=KEY))

    async def scenario():
        async with rig(*two, directory=tmp_path) as r:
            for step in range(3):
                await r.sync.sync(version(step))
            await r.add(late)
            two[0].forget()
            await r.probe(two[0])
            await r.sync.sync(version(2))
            for engine in (*two, late):
                assert_has(engine, r.ranks, 2)
            assert files(tmp_path, 2) == {"patch"}, "nothing was written for them"
            await r.sync.sync(version(3))
            for engine in (*two, late):
                assert_has(engine, r.ranks, 3)

    asyncio.run(scenario())


def test_a_restarted_trainer_writes_an_anchor(two, tmp_path):
    async def scenario():
        async with rig(*two, directory=tmp_path) as r:
            await r.sync.sync(version(0))
            await r.sync.sync(version(1))
            r.ranks.sender.close()
            r.restart()
            await r.sync.sync(version(2))
            assert files(tmp_path, 2) == {"model"}
            for engine in two:
                assert_has(engine, r.ranks, 2)

    asyncio.run(scenario())


def test_an_engine_that_cannot_fetch_keeps_serving_what_it_has_and_the_others_go_on(two, tmp_path):
    async def scenario():
        async with rig(*two, directory=tmp_path) as r:
            await r.sync.sync(version(0))
            two[1].fail("/rltool/prefetch", status=409, body={"error": "no way to the store"})
            report = await r.sync.sync(version(1))
            assert report.updated == (two[0].url,) and "no way to the store" in report.failed[two[1].url]
            assert_has(two[1], r.ranks, 0)
            assert paths(two[1])[-2:] == ["/rltool/finish_weight_update", "/rltool/prefetch"], "it was not paused"
            assert r.fleet.member(two[1].url).state is State.STALE
            two[1].heal()
            await r.sync.sync(version(1), only={two[1].url})
            assert_has(two[1], r.ranks, 1)

    asyncio.run(scenario())


def test_patches_that_were_lost_are_healed_by_the_next_sync(two, tmp_path):
    async def scenario():
        async with rig(*two, directory=tmp_path) as r:
            await r.sync.sync(version(0))
            send = r.ranks.send

            async def losing(name, urls):
                report = await send(name, urls)
                for path in (tmp_path / "store" / chain.directory(name)).glob("patch-*"):
                    path.unlink()
                return report

            r.ranks.send = losing
            with pytest.raises(WeightSyncFailed, match="is not there"):
                await r.sync.sync(version(1))
            for engine in two:
                assert_has(engine, r.ranks, 0)
                assert not engine.paused
            r.ranks.send = send
            report = await r.sync.sync(version(1))
            assert report.failed == {}
            for engine in two:
                assert_has(engine, r.ranks, 1)

    asyncio.run(scenario())


def test_a_store_that_cannot_be_written_fails_the_sync_and_nobody_was_paused(two, tmp_path):
    async def scenario():
        async with rig(*two, directory=tmp_path) as r:
            (tmp_path / "store").write_text("a file")
            with pytest.raises(WeightSyncFailed, match="cannot write"):
                await r.sync.sync(version(0))
            assert all("/pause" not in engine.paths() for engine in two)

    asyncio.run(scenario())


def test_a_mixed_fleet_takes_one_version_from_one_store(two, stack, tmp_path):
    sglang = stack.enter_context(FakeSglang())

    async def scenario():
        async with rig(two[0], sglang, directory=tmp_path) as r:
            with follower(tmp_path / "store", tmp_path / "rebuilt", sglang.url):
                await until_reported(tmp_path / "store", sglang.url)
                for step in range(4):
                    report = await r.sync.sync(version(step))
                    assert report.failed == {}
                    for engine in (two[0], sglang):
                        assert_has(engine, r.ranks, step)
                loaded = Path(sglang.bodies["/update_weights_from_disk"]["model_path"])
                assert loaded == tmp_path / "rebuilt" / chain.directory(str(version(3)))
                assert (loaded / "config.json").read_text() == "{}"

    asyncio.run(scenario())


async def until_reported(store: Path, url: str) -> None:
    while Report.read(open_store(str(store)), url) is None:
        await asyncio.sleep(0.01)


def test_an_sglang_without_a_follower_is_named_with_the_command(stack, tmp_path):
    sglang = stack.enter_context(FakeSglang())

    async def scenario():
        async with rig(sglang, directory=tmp_path) as r:
            with pytest.raises(WeightSyncFailed, match=f"rltool engines follow-weights .* --engine {sglang.url}"):
                await r.sync.sync(version(0))
            assert "/pause_generation" not in sglang.seen

    asyncio.run(scenario())


def test_a_follower_that_stands_still_is_given_up(tmp_path, monkeypatch):
    store = open_store(str(tmp_path))
    Report("http://engine:1", "old", "/weights/old", "the disk is full").write(store)
    rendezvous = delta.Rendezvous("delta", 2, "group", directory=str(tmp_path))
    with pytest.raises(delta.TransportError, match=r"within 0 s \(it has old; its last error: the disk is full\)"):
        delta.wait_for_follower("http://engine:1", rendezvous, "new", 0.0)


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (None, 400, "must be an object"),
        ({"store": "/x", "version": "v", "seconds": 0}, 400, "'seconds'"),
        ({"store": "", "version": "v", "seconds": 1}, 400, "'store'"),
        ({"store": "/x", "announced": {}, "version": "v", "seconds": 1}, 400, "'announced'"),
        ({"store": "/x", "version": "", "seconds": 1}, 400, "'version'"),
        ({"store": "relative", "version": str(version(0)), "seconds": 1}, 409, "must be absolute"),
        ({"store": "/nowhere/at/all", "version": str(version(0)), "seconds": 1}, 409, "missing or damaged"),
        ({"store": "/nowhere/at/all", "version": "../x", "seconds": 1}, 409, "not a weight version"),
    ],
)
def test_what_cannot_be_fetched_is_said(two, tmp_path, body, status, text):
    async def scenario():
        async with rig(two[0], directory=tmp_path) as r:
            request = HttpRequest("POST", "/rltool/prefetch", body)
            with pytest.raises(EngineRejected, match=text) as caught:
                await r.client.run(r.endpoints[two[0].url], [request], timeout=DEADLINE)
            assert caught.value.status == status

    asyncio.run(scenario())


def test_the_command_follows_until_it_is_told_to_stop(two, tmp_path):
    store, url = tmp_path / "store", "http://127.0.0.1:8101"
    command = [sys.executable, "-m", "rltool", "engines", "follow-weights", str(store), "--to", str(tmp_path / "to")]
    process = subprocess.Popen(
        [*command, "--engine", "127.0.0.1:8101", "--every", "0.05"], stdout=subprocess.PIPE, text=True
    )

    async def scenario():
        async with rig(two[0], directory=tmp_path) as r:
            async with asyncio.timeout(60):
                await until_reported(store, url)
                await r.sync.sync(version(0))
                while (report := Report.read(open_store(str(store)), url)) is None or report.version is None:
                    assert process.poll() is None
                    await asyncio.sleep(0.05)
            assert report.version == str(version(0)) and report.directory is not None
            assert (Path(report.directory) / "model.safetensors.index.json").is_file()

    try:
        asyncio.run(scenario())
        process.terminate()
        printed, _ = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0 and f"weights {version(0)}: anchor" in printed
