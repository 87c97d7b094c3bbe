"""Checkpoints and weights for sampling: listed, loaded, deleted, over their time, on a full disk."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp.test_utils import TestClient, TestServer

import rltool.tinker.service as service_module
from rltool.errors import UsageError
from rltool.tinker.journal import Call, Journal
from rltool.tinker.limits import Limits, Refused
from rltool.tinker.paths import SAMPLERS, STATES, CheckpointPath
from rltool.tinker.server import PREFIX, TinkerServer
from rltool.tinker.service import Service
from tests.contract.tinker.plain_trainer import PlainTrainer
from tests.contract.tinker.services import (
    forward,
    made,
    make,
    model_of,
    names,
    running_on,
    save,
)


@pytest.mark.parametrize("kind", ["save_weights", "save_weights_for_sampler"])
def test_a_save_that_the_disk_does_not_take_is_its_calls_error_and_its_name_can_be_given_again(
    tmp_path, monkeypatch, kind
):
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    async def call(service: Service, seq: int, **more: Any) -> tuple[str, dict[str, Any]]:
        model = service.models_of("a")[0]
        made = await getattr(service, kind)("a", {"model_id": model, "seq_id": seq, **more})
        return model, await service.result("a", made.number, 5) or {}

    async def first(service: Service) -> None:
        await made(service, "a")
        with monkeypatch.context() as patch:
            patch.setattr(PlainTrainer, "save", full)
            model, said = await call(service, 1, path="s")
            text = f"SaveFailed: .* was not written to {tmp_path}/.*/{model}/s: No space left on device; make room"
            assert re.match(text, said["error"]) and said["category"] == "server"
            if kind == "save_weights_for_sampler":
                await call(service, 2, sampling_session_seq_id=0, kind="inflight")
                session = model.partition(":")[0]
                with pytest.raises(Refused, match="no sampling session"):
                    service.demand_sampler("a", f"{session}:sample:0")
                assert service._models[model].inflight == []

    async def then(service: Service, trainer: PlainTrainer) -> None:
        [model] = service.models_of("a")
        assert names(service, model) == [], "not by carrying it out again either"
        await forward(service, "a", model, 3)
        await service.optim_step("a", {"model_id": model, "seq_id": 4, "adam_params": {"learning_rate": 0.1}})
        assert "path" in (await call(service, 5, path="s"))[1]
        assert names(service, model) == ["s"]
        kept = "checkpoints" if kind == "save_weights" else "samplers"
        saved = torch.load(tmp_path / kept / model / "s" / "state.pt", weights_only=True)["weights"]
        assert torch.equal(saved, trainer.models[model]["weights"])

    service, _ = make(tmp_path, snapshot_every=100, checkpoints=1)
    asyncio.run(running_on(service, first(service)))
    service, trainer = make(tmp_path, snapshot_every=100, checkpoints=1)
    asyncio.run(running_on(service, then(service, trainer)))


def test_other_requests_are_answered_while_weights_are_removed_and_what_a_kill_left_of_them_goes(tmp_path, monkeypatch):
    begun, ends, rmtree = threading.Event(), threading.Event(), shutil.rmtree

    def slow(directory: Path, **named: Any) -> None:
        begun.set()
        ends.wait(10)
        rmtree(directory, **named)

    async def case(service: Service) -> Path:
        model = await made(service, "a")
        call = await service.save_weights_for_sampler("a", {"model_id": model, "seq_id": 1, "path": "x"})
        await service.result("a", call.number, 5)
        there = tmp_path / "samplers" / model
        assert [each.name for each in there.iterdir()] == ["x"]
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "rmtree", slow)
            deleting = asyncio.create_task(service.delete_checkpoint("a", CheckpointPath(model, SAMPLERS, "x")))
            await asyncio.to_thread(begun.wait, 10)
            service.heartbeat("a", model.partition(":")[0])
            assert not deleting.done() and not (there / "x").exists() and service.checkpoints.newest_weights() is None
            ends.set()
            await deleting
        assert list(there.iterdir()) == []
        return there

    service, _ = make(tmp_path, snapshot_every=1)
    there = asyncio.run(running_on(service, case(service)))
    (there / ".removed-0123").mkdir()
    service, _ = make(tmp_path)
    assert list(there.iterdir()) == []
    service.close()


def test_a_checkpoint_goes_when_its_time_is_over_and_one_whose_time_was_taken_away_stays(tmp_path, monkeypatch):
    async def case() -> None:
        service, _ = make(tmp_path, checkpoints=3)
        running = asyncio.create_task(service.run())
        model = await model_of(service, "a")
        await save(service, model, 1, "brief", ttl_seconds=3600)
        await save(service, model, 2, "kept", ttl_seconds=3600)
        await save(service, model, 3, "later")
        await service.set_ttl("a", CheckpointPath(model, STATES, "kept"), None)
        await service.set_ttl("a", CheckpointPath(model, STATES, "later"), 7200)
        now = service_module.time.time()
        monkeypatch.setattr(service_module.time, "time", lambda: now + 3700)
        await service.expire()
        assert set(names(service, model)) == {"kept", "later"}
        body = {"model_id": model, "seq_id": 4, "path": f"tinker://{model}/weights/brief"}
        with pytest.raises(Refused, match="there is no checkpoint"):
            await service.load_weights("a", body)
        await save(service, model, 4, "after")  # the deleted one does not count
        running.cancel()
        service.close()
        service, _ = make(tmp_path)
        assert set(names(service, model)) == {"kept", "later", "after"}
        monkeypatch.setattr(service_module.time, "time", lambda: now + 7300)
        await service.expire()
        assert set(names(service, model)) == {"kept", "after"}
        service.close()

    asyncio.run(case())
    kinds = {(call.kind, call.body.get("kind")) for call in Journal(tmp_path).calls.values()}
    assert {("delete_checkpoint", STATES), ("checkpoint_ttl", STATES)} <= kinds, "in every line"
    assert kinds.isdisjoint({("delete_checkpoint", None), ("checkpoint_ttl", None)})


def test_files_of_a_model_that_cannot_be_read_hold_up_no_other_s(tmp_path, monkeypatch, caplog):
    async def case(service: Service) -> None:
        first, second = [await model_of(service, "a") for _ in range(2)]
        for model in (first, second):
            await save(service, model, 1, "brief", ttl_seconds=3600)
        now, of = service_module.time.time(), service.checkpoints.of

        def read(model: str, kinds: Any) -> Any:
            if model == first:
                raise OSError(5, "Input/output error", "there")
            return of(model, kinds)

        with monkeypatch.context() as patched:
            patched.setattr(service_module.time, "time", lambda: now + 3700)
            patched.setattr(service.checkpoints, "of", read)
            await service.expire()
        assert [set(names(service, model)) for model in (first, second)] == [{"brief"}, set()]
        assert f"checkpoints of {first}, to see whether" in caplog.text and "Input/output error: 'there'" in caplog.text

    service, _ = make(tmp_path)
    asyncio.run(running_on(service, case(service)))


@pytest.mark.parametrize("ahead", [-7200, 7200])
def test_a_checkpoint_lives_as_long_as_it_says_on_a_disk_whose_clock_differs_by_hours(tmp_path, monkeypatch, ahead):
    save_here = PlainTrainer.save

    def save_there(self: PlainTrainer, model: str, directory: Path, **options: Any) -> None:
        save_here(self, model, directory, **options)
        os.utime(directory, (time.time() + ahead, time.time() + ahead))

    monkeypatch.setattr(PlainTrainer, "save", save_there)
    now = [time.time()]
    monkeypatch.setattr(service_module.time, "time", lambda: now[0])

    async def saves(service: Service) -> str:
        model = await model_of(service, "a")
        await save(service, model, 1, "state", ttl_seconds=3600)
        for seq, more in ((2, {"path": "sampler"}), (3, {"sampling_session_seq_id": 0})):
            body = {"model_id": model, "seq_id": seq, "ttl_seconds": 3600, **more}
            await service.result("a", (await service.save_weights_for_sampler("a", body)).number, 5)
        return model

    async def after(seconds: float, service: Service, model: str) -> tuple[set[str], int]:
        now[0] = began + seconds
        await service.expire()
        return set(names(service, model)), len(list((tmp_path / "samplers" / model).iterdir()))

    service, _ = make(tmp_path, snapshot_every=100)
    began = now[0]
    model = asyncio.run(running_on(service, saves(service)))
    for seconds, left in ((3500, ({"state", "sampler"}, 2)), (3700, (set(), 0))):  # what was done is done again
        service, _ = make(tmp_path, snapshot_every=100)
        assert asyncio.run(running_on(service, after(seconds, service, model))) == left


def test_weights_for_sampling_go_when_their_time_is_over_and_do_not_come_back(tmp_path, monkeypatch):
    async def case() -> None:
        service, _ = make(tmp_path, checkpoints=2)
        running = asyncio.create_task(service.run())
        model = await model_of(service, "a")

        async def publish(seq: int, name: str, **more: Any) -> None:
            body = {"model_id": model, "seq_id": seq, "path": name, **more}
            call = await service.save_weights_for_sampler("a", body)
            assert (await service.result("a", call.number, 5) or {})["path"] == f"tinker://{model}/sampler_weights/{name}"

        def there() -> set[str]:
            return {each.name for each in (tmp_path / "samplers" / model).iterdir()}

        await publish(1, "brief", ttl_seconds=3600)
        await publish(2, "kept")
        with pytest.raises(UsageError, match="the most that a client may have"):
            await publish(3, "more")
        with pytest.raises(UsageError, match="ttl_seconds is 5"):
            await publish(3, "more", ttl_seconds=5)
        now = service_module.time.time()
        monkeypatch.setattr(service_module.time, "time", lambda: now + 3700)
        session = model.partition(":")[0]
        opened = {"session_id": session, "sampling_session_seq_id": 0, "model_path": f"tinker://{model}/sampler_weights/"}
        with pytest.raises(Refused, match="there are no weights"):
            await service.open_sampler("a", opened | {"model_path": opened["model_path"] + "brief"})
        assert await service.open_sampler("a", opened | {"model_path": opened["model_path"] + "kept"})
        await publish(3, "more")  # what is gone does not count
        assert there() == {"kept", "more"}
        with pytest.raises(UsageError, match="a name is given once"):
            await publish(4, "brief")
        running.cancel()
        service.close()
        service, _ = make(tmp_path, checkpoints=2)
        with pytest.raises(UsageError, match="the most that a client may have"):
            await publish(4, "again")
        await service.expire()
        assert there() == {"kept", "more"}
        service.close()

    asyncio.run(case())


def test_weights_for_sampling_are_listed_deleted_and_given_a_time_as_checkpoints_are(tmp_path, monkeypatch):
    async def case(service: Service, trainer: PlainTrainer) -> str:
        server = TinkerServer(service, {"a": "tml-a", "b": "tml-b"}, poll_seconds=5)
        model = await made(service, "a")
        await save(service, model, 1, "same")
        for seq, name in enumerate(("same", "brief", "gone", ""), 2):
            body = {"model_id": model, "seq_id": seq, "path": name or None, "sampling_session_seq_id": seq}
            call = await service.save_weights_for_sampler("a", body)
            await service.result("a", call.number, 5)
        session = model.partition(":")[0]
        opened = {"session_id": session, "sampling_session_seq_id": 9, "model_path": f"tinker://{model}/sampler_weights/gone"}
        sampler = service.demand_sampler("a", await service.open_sampler("a", opened))
        assert service.weights_of(sampler)
        async with TestClient(TestServer(server.app())) as http:

            async def ask(method: str, path: str, body: Any = None, key: str = "tml-a") -> tuple[int, Any]:
                async with http.request(method, PREFIX + path, json=body, headers={"X-API-Key": key}) as reply:
                    return reply.status, await reply.json()

            run = f"training_runs/{model}"

            async def listed() -> list[str]:
                found = (await ask("GET", f"{run}/checkpoints"))[1]["checkpoints"]
                assert all(each["tinker_path"] == f"tinker://{model}/{each['checkpoint_id']}" for each in found)
                return sorted(f"{each['checkpoint_type']} {each['checkpoint_id']}" for each in found)

            kept, rest = ["sampler sampler_weights/same", "training weights/same"], "sampler sampler_weights/"
            assert await listed() == sorted([*kept, f"{rest}brief", f"{rest}gone"])
            one = f"{run}/checkpoints/sampler_weights"
            assert (await ask("DELETE", f"{one}/gone", key="tml-b"))[0] == 404
            for _ in range(2):
                assert (await ask("DELETE", f"{one}/gone"))[0] == 200
            assert (await ask("DELETE", f"{one}/none"))[0] == 404
            for untyped in ("other/same", "same", "gone"):  # which kind is meant, is not guessed
                assert (await ask("DELETE", f"{run}/checkpoints/{untyped}"))[0] == 404
            assert await listed() == sorted([*kept, f"{rest}brief"])
            assert (await ask("PUT", f"{one}/brief/ttl", {"ttl_seconds": 3600}))[0] == 200
            assert not (tmp_path / "samplers" / model / "gone").exists()
            with pytest.raises(Refused, match="weights are gone"):
                service.weights_of(sampler)
            info = await ask("POST", "weights_info", {"tinker_path": f"tinker://{model}/sampler_weights/same"})
            assert info == (200, {"base_model": "base", "is_lora": False})
            assert (await ask("GET", run))[1]["last_sampler_checkpoint"]["checkpoint_id"] == "sampler_weights/brief"
            now = service_module.time.time()
            monkeypatch.setattr(service_module.time, "time", lambda: now + 3700)
            assert await listed() == kept
        return model

    async def later(service: Service, model: str) -> None:
        body = {"session_id": model.partition(":")[0], "sampling_session_seq_id": 10}
        for name in ("gone", "brief"):  # their saves were done again, and they are there until a snapshot
            with pytest.raises(Refused, match="there are no weights"):
                await service.open_sampler("a", body | {"model_path": f"tinker://{model}/sampler_weights/{name}"})
        with pytest.raises(UsageError, match="a name is given once"):
            await service.save_weights_for_sampler("a", {"model_id": model, "seq_id": 9, "path": "gone"})
        await service.result("a", (await forward(service, "a", model, 10)).number, 5)
        same = {CheckpointPath(model, kind, "same") for kind in (STATES, SAMPLERS)}
        assert {each.path for each in service.saved(model)} == same

    async def last(service: Service, model: str) -> None:
        await service.result("a", (await forward(service, "a", model, 11)).number, 5)

    service, trainer = make(tmp_path, snapshot_every=100)
    model = asyncio.run(running_on(service, case(service, trainer)))
    for snapshot_every in (100, 1):
        service, _ = make(tmp_path, snapshot_every=snapshot_every)
        if snapshot_every == 100:
            asyncio.run(running_on(service, later(service, model)))
        else:
            asyncio.run(running_on(service, last(service, model)))
    left = {each.name for each in (tmp_path / "samplers" / model).iterdir()}
    assert "same" in left and left.isdisjoint({"gone", "brief"})


def test_a_load_that_was_accepted_before_its_checkpoint_was_deleted_has_it_and_one_after_is_refused(tmp_path):
    async def case() -> None:
        service, trainer = make(tmp_path, snapshot_every=1)
        running = asyncio.create_task(service.run())
        model = await model_of(service, "a")
        await save(service, model, 1, "one")
        running.cancel()
        await asyncio.wait({running})
        body = {"model_id": model, "seq_id": 2, "path": f"tinker://{model}/weights/one"}
        call = await service.load_weights("a", body)
        await service.delete_checkpoint("a", CheckpointPath(model, STATES, "one"))
        await service.delete_checkpoint("a", CheckpointPath(model, STATES, "one"))
        assert await service.load_weights("a", body) == call  # a repetition
        assert names(service, model) == []
        with pytest.raises(Refused, match="there is no checkpoint"):
            await service.load_weights("a", body | {"seq_id": 3})
        with pytest.raises(Refused, match="there is no model"):
            await service.delete_checkpoint("b", CheckpointPath(model, STATES, "one"))
        with pytest.raises(UsageError, match="a name is given once"):
            await service.save_weights("a", {"model_id": model, "seq_id": 3, "path": "one"})
        before = await forward(service, "a", model, 3)
        running = asyncio.create_task(service.run())
        assert (await service.result("a", call.number, 5) or {})["type"] == "load_weights"
        assert await service.result("a", before.number, 5)
        running.cancel()
        await asyncio.wait({running})
        assert not (tmp_path / "checkpoints" / model / "one").exists()
        assert trainer.models
        service.close()

    asyncio.run(case())


def test_a_model_whose_deleted_checkpoint_is_yet_to_be_loaded_stays_until_then(tmp_path):
    async def begun(service: Service) -> list[str]:
        models = [await made(service, "a"), await made(service, "a")]
        await save(service, models[0], 1, "s")
        return models

    async def then(service: Service, number: int) -> dict[str, Any]:
        found = await service.result("a", number, 5) or {}
        while len(service.models_of("a")) > 1:
            await asyncio.sleep(0.001)
        return found

    service, _ = make(tmp_path, snapshot_every=1)
    models = asyncio.run(running_on(service, begun(service)))

    async def accepted() -> Call:
        await service.unload_model("a", {"model_id": models[0]})
        for seq in (1, 2):
            await forward(service, "a", models[1], seq)
        body = {"model_id": models[1], "seq_id": 3, "path": f"tinker://{models[0]}/weights/s"}
        call = await service.load_weights("a", body)
        await service.delete_checkpoint("a", CheckpointPath(models[0], STATES, "s"))
        return call

    service, _ = make(tmp_path, snapshot_every=1)
    call = asyncio.run(accepted())
    assert "error" not in asyncio.run(running_on(service, then(service, call.number)))
    assert service.models_of("a") == models[1:]


def test_a_deletion_that_is_repeated_after_its_model_or_session_left_is_as_the_first(tmp_path):
    async def case(service: Service) -> CheckpointPath:
        model = await made(service, "a")
        await save(service, model, 1, "s")
        path = CheckpointPath(model, STATES, "s")
        await service.result("a", (await service.unload_model("a", {"model_id": model})).number, 5)
        await service.delete_checkpoint("a", path)
        await save(service, await made(service, "a"), 1, "other")  # a call or two, so that it leaves
        await again(service, path)
        await service.finish_session("a", model.partition(":")[0], None)
        await again(service, path)
        return path

    async def again(service: Service, path: CheckpointPath) -> None:
        with pytest.raises(Refused, match="is unloaded") as error:
            service.demand_model("a", path.model)
        assert error.value.status == 410
        before = service._journal.next
        await service.delete_checkpoint("a", path)
        assert service._journal.next == before, "nothing is to be done"
        with pytest.raises(Refused, match="there is no model"):
            await service.delete_checkpoint("b", path)
        with pytest.raises(Refused, match="is unloaded"):
            await service.set_ttl("a", path, 3600)

    service, _ = make(tmp_path, snapshot_every=1)
    path = asyncio.run(running_on(service, case(service)))
    service, _ = make(tmp_path, snapshot_every=1)
    asyncio.run(running_on(service, again(service, path)))


def test_a_shared_checkpoint_is_loaded_from_a_copy_that_a_restart_finds_when_its_run_has_deleted_it(tmp_path):
    async def case() -> None:
        def begun() -> tuple[Service, PlainTrainer]:
            trainer = PlainTrainer()
            return Service(
                tmp_path / "served", trainer, "base", limits=Limits(), snapshot_every=3, shared=tmp_path / "shared"
            ), trainer  # fmt: skip

        service, trainer = begun()
        running = asyncio.create_task(service.run())
        model = await model_of(service, "a")
        with pytest.raises(Refused, match=r"no checkpoint 'tinker://shared/weights/step_1': .*shared has none"):
            await service.load_weights("a", {"model_id": model, "seq_id": 1, "path": "tinker://shared/weights/step_1"})
        given = PlainTrainer()
        given.create("other", None, 7)
        (tmp_path / "shared").mkdir()
        given.save("other", tmp_path / "shared" / "step_1", optimizer=True)
        body = {"model_id": model, "seq_id": 1, "path": "tinker://shared/weights/step_1", "optimizer": True}
        call = await service.load_weights("a", body)
        assert (await service.result("a", call.number, 5) or {})["type"] == "load_weights"
        assert torch.equal(trainer.models[model]["weights"], given.models["other"]["weights"])
        running.cancel()
        await asyncio.wait({running})
        service.close()
        shutil.rmtree(tmp_path / "shared")
        copies = tmp_path / "served" / "checkpoints" / "shared"
        (copies / ".half-copied").mkdir()  # by a server that was killed
        service, trainer = begun()
        running = asyncio.create_task(service.run())
        assert await service.load_weights("a", body) == call  # a repetition
        assert len(list(copies.iterdir())) == 1
        [await service.result("a", (await forward(service, "a", model, seq)).number, 5) for seq in (2, 3, 4)]
        assert torch.equal(trainer.models[model]["weights"], given.models["other"]["weights"])
        running.cancel()
        await asyncio.wait({running})
        assert list(copies.iterdir()) == []  # a snapshot has what was loaded
        assert await service.load_weights("a", body) == call  # a repetition yet
        service.close()

    asyncio.run(case())
