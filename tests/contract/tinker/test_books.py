"""Sessions and models: idle, finished, unloaded, and what is left of them in tables and journal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from aiohttp.test_utils import TestClient, TestServer

import rltool.tinker.books as books_module
import rltool.tinker.service as service_module
from rltool.errors import UsageError
from rltool.tinker.journal import Call, Journal
from rltool.tinker.limits import Refused
from rltool.tinker.paths import STATES, CheckpointPath
from rltool.tinker.server import PREFIX, TinkerServer
from rltool.tinker.service import Service
from tests.contract.tinker.plain_trainer import PlainTrainer
from tests.contract.tinker.services import (
    clock,
    forward,
    made,
    make,
    names,
    only_one,
    running_on,
    save,
)


def test_an_idle_model_is_evicted_for_another_and_one_of_an_active_session_is_not(tmp_path, monkeypatch):
    async def first(service: Service, ahead: list[float]) -> str:
        one = await made(service, "a")
        await save(service, one, 1, "kept")
        ahead[0] += 61
        service.heartbeat("a", one.partition(":")[0])
        ahead[0] += 59
        with pytest.raises(AssertionError):
            await made(service, "b")  # a's session is active
        ahead[0] += 2
        session = await service.open_session("b")
        body = {"session_id": session, "model_seq_id": 0, "base_model": "base"}
        two = await service.create_model("b", body)
        assert await service.create_model("b", body) == two
        assert "error" not in (await service.result("b", two.number, 5) or {"error": "none"})
        assert service.models() == {"b": 1} and names(service, one) == ["kept"]
        with pytest.raises(Refused, match="is unloaded \\(evicted: its session was idle for 60 s\\)"):
            await forward(service, "a", one, 2)
        return one

    async def again(service: Service, ahead: list[float], one: str) -> None:
        ahead[0] += 59
        with pytest.raises(AssertionError):
            await made(service, "a")  # this process has not run long enough to know b's session as idle
        ahead[0] += 2
        body = {"session_id": await service.open_session("a"), "model_seq_id": 0, "optimizer": True}
        call = await service.load_weights("a", body | {"path": f"tinker://{one}/weights/kept"})
        assert "error" not in (await service.result("a", call.number, 5) or {"error": "none"})
        assert service.models() == {"a": 1}

    with clock(monkeypatch) as ahead:
        service, _ = only_one(tmp_path, session_timeout=60.0)
        one = asyncio.run(running_on(service, first(service, ahead)))
        ahead[0] += 1000  # without a server
        service, trainer = only_one(tmp_path, session_timeout=60.0)
        asyncio.run(running_on(service, again(service, ahead, one)))
        assert len(trainer.models) == 1
        service, restored = only_one(tmp_path, session_timeout=60.0)
        asyncio.run(running_on(service, asyncio.sleep(0.2)))
        [held], [found] = trainer.models.items(), restored.models.items()
        assert held[0] == found[0] and torch.equal(held[1]["weights"], found[1]["weights"])


def test_a_server_that_stalled_itself_takes_no_session_for_idle(tmp_path, monkeypatch):
    async def case(service: Service, ahead: list[float]) -> None:
        await made(service, "a")
        ahead[0] += 61
        await asyncio.sleep(0.05)
        with pytest.raises(AssertionError):
            await made(service, "b")
        for _ in range(4):
            ahead[0] += 20
            await asyncio.sleep(0.05)
        await made(service, "b")

    with clock(monkeypatch) as ahead:
        monkeypatch.setattr(service_module, "STALL_SECONDS", 30.0)
        monkeypatch.setattr(service_module, "STALL_CHECK_SECONDS", 0.001)
        service, _ = only_one(tmp_path, session_timeout=60.0)
        asyncio.run(running_on(service, case(service, ahead)))


def test_of_adapters_idle_ones_of_the_same_client_are_evicted_the_longest_idle_first_and_none_with_calls_to_do(
    tmp_path, monkeypatch
):
    async def case(service: Service, ahead: list[float]) -> None:
        others = await made(service, "b")
        sessions = [await service.open_session("a") for _ in range(2)]
        first, second = [await made(service, "a", session) for session in sessions]
        ahead[0] += 30
        service.heartbeat("a", sessions[0])
        ahead[0] += 31
        third = await made(service, "a")
        assert service.models_of("a") == [first, third]
        with pytest.raises(Refused, match="its session was idle for 60 s"):
            await forward(service, "a", second, 1)
        await service.result("b", (await forward(service, "b", others, 1)).number, 5)
        ahead[0] += 31
        body = {"session_id": await service.open_session("a"), "model_seq_id": 0, "base_model": "base"}
        call = await forward(service, "a", first, 1)
        ahead[0] += 61
        service.heartbeat("a", third.partition(":")[0])
        with pytest.raises(UsageError, match="2 models, the most"):
            await service.create_model("a", body)  # its call is not done
        await service.result("a", call.number, 5)
        ahead[0] += 61
        service.heartbeat("a", third.partition(":")[0])
        await service.create_model("a", body)

    with clock(monkeypatch) as ahead:
        service, _ = make(tmp_path, models=2, session_timeout=60.0)
        asyncio.run(running_on(service, case(service, ahead)))


def test_models_that_are_made_at_once_evict_one_each_and_one_that_is_refused_evicts_none(tmp_path, monkeypatch):
    async def begun(service: Service, ahead: list[float]) -> list[dict[str, Any]]:
        for _ in range(2):
            await made(service, "a")
        ahead[0] += 61
        session = await service.open_session("a")
        return [{"session_id": session, "model_seq_id": number, "base_model": "base"} for number in range(2)]

    async def both(service: Service, ahead: list[float]) -> None:
        bodies = await begun(service, ahead)
        calls = await asyncio.gather(*(service.create_model("a", body) for body in bodies))
        for call in calls:
            assert "error" not in (await service.result("a", call.number, 5) or {"error": "none"})
        assert service.models() == {"a": 2} and service.models_of("a") == [call.model for call in calls]

    async def refused(service: Service, ahead: list[float]) -> None:
        running = asyncio.create_task(service.run())
        [body, _] = await begun(service, ahead)
        one, two = service.models_of("a")
        running.cancel()
        await asyncio.wait({running})
        await forward(service, "a", two, 1)
        with pytest.raises(Refused, match="1 calls wait already"):
            await service.create_model("a", body)
        await service.unload_model("a", {"model_id": two})
        assert service.models() == {"a": 1} and not service._models[one].unloaded
        service.close()

    with clock(monkeypatch) as ahead:
        service, _ = make(tmp_path / "both", models=2, session_timeout=60.0)
        asyncio.run(running_on(service, both(service, ahead)))
        service, _ = make(tmp_path / "refused", models=2, session_timeout=60.0, in_flight=1)
        asyncio.run(refused(service, ahead))


def test_nothing_is_made_in_a_session_that_is_finished_at_the_same_time(tmp_path):
    async def case() -> None:
        service, _ = make(tmp_path)
        session = await service.open_session("a")
        made = {"session_id": session, "model_seq_id": 0, "base_model": "base"}
        opened = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "base"}
        finishing = service.finish_session("a", session, None)
        works = finishing, service.create_model("a", made), service.open_sampler("a", opened)
        found = await asyncio.gather(*works, return_exceptions=True)
        assert [str(each) for each in found[1:]] == [f"session {session} is finished; open another"] * 2
        assert service.sessions_of("a") == [] and not service._models and not service._samplers

    asyncio.run(case())


def test_a_model_that_the_trainer_refuses_is_neither_listed_nor_counted(tmp_path, monkeypatch):
    def refuse(*_: Any) -> None:
        raise UsageError("no room")

    async def case() -> None:
        service, trainer = make(tmp_path, models=1)
        running = asyncio.create_task(service.run())
        session = await service.open_session("a")
        body = {"session_id": session, "base_model": "base"}
        with monkeypatch.context() as patched:
            patched.setattr(trainer, "create", refuse)
            refused = await service.create_model("a", body | {"model_seq_id": 0})
            assert "no room" in (await service.result("a", refused.number, 5) or {})["error"]
        assert service.models() == {} and service.models_of("a") == []
        made = await service.create_model("a", body | {"model_seq_id": 1})
        assert "error" not in (await service.result("a", made.number, 5) or {"error": ""})
        assert await service.create_model("a", body | {"model_seq_id": 0}) == refused, "a repetition is answered"
        with pytest.raises(UsageError, match="1 models, the most"):
            await service.create_model("a", body | {"model_seq_id": 2})
        running.cancel()
        await asyncio.wait({running})
        service.close()
        again, _ = make(tmp_path, models=1)
        assert again.models_of("a") == [made.model] and again.models() == {"a": 1}

    asyncio.run(case())


def test_a_finished_session_unloads_its_models_and_makes_nothing_more(tmp_path):
    service, trainer = make(tmp_path, models=1)
    server = TinkerServer(service, {"a": "tml-a", "b": "tml-b"}, poll_seconds=5)

    async def scenario() -> None:
        running = asyncio.create_task(service.run())
        session = await service.open_session("a")
        body = {"session_id": session, "model_seq_id": 0, "base_model": "base"}
        model = (await service.create_model("a", body)).model
        await forward(service, "a", model, 1)
        await save(service, model, 2, "kept")
        async with TestClient(TestServer(server.app())) as http:

            async def ask(method: str, path: str, body: Any = None, key: str = "tml-a") -> tuple[int, Any]:
                async with http.request(method, PREFIX + path, json=body, headers={"X-API-Key": key}) as reply:
                    return reply.status, await reply.json()

            assert (await ask("GET", "sessions")) == (200, {"sessions": [session]})
            assert (await ask("GET", f"sessions/{session}"))[1] == {"training_run_ids": [model], "sampler_ids": []}
            assert (await ask("POST", f"sessions/{session}/finish", {}, "tml-b"))[0] == 404
            for reason in ("success", "interrupted"):  # again, as where an answer was lost
                finish = {"reason": {"type": reason}, "detail": None}
                assert (await ask("POST", f"sessions/{session}/finish", finish))[0] == 200
            assert (await ask("POST", "session_heartbeat", {"session_id": session}))[0] == 410
            promised = (await ask("POST", "unload_model", {"model_id": model}))[1]  # a repetition too
            assert (await ask("POST", "retrieve_future", promised))[1] == {"type": "unload_model", "model_id": model}
        assert not trainer.models and service.models() == {}
        for refused in (service.create_model("a", body | {"model_seq_id": 1}), service.open_sampler("a", body)):
            with pytest.raises((Refused, UsageError), match="is finished|not supported"):
                await refused
        with pytest.raises(Refused, match="is unloaded; make another") as error:
            await forward(service, "a", model, 3)
        assert error.value.status == 410
        running.cancel()
        await asyncio.wait({running})
        service.close()
        again, trainer_again = make(tmp_path, models=1)
        running = asyncio.create_task(again.run())
        body = {"session_id": await again.open_session("a"), "model_seq_id": 0, "optimizer": True}
        made = await again.load_weights("a", body | {"path": f"tinker://{model}/weights/kept"})
        assert (await again.result("a", made.number, 5) or {})["type"] == "load_weights"
        assert list(trainer_again.models) == [made.model]
        running.cancel()
        await asyncio.wait({running})

    asyncio.run(scenario())


def test_unloaded_models_and_ended_sessions_leave_all_tables_and_their_names_stay_refused(tmp_path, monkeypatch):
    def refused(status: int, text: str, call: Callable[..., Any], *arguments: Any) -> None:
        async def ask() -> None:
            if asyncio.iscoroutine(found := call(*arguments)):
                await found

        with pytest.raises(Refused, match=text) as error:
            asyncio.run(ask())
        assert error.value.status == status

    async def snapshots(service: Service) -> None:
        """Two: what leaves with the first leaves the journal with the second."""
        other = f"{service.sessions_of('b')[0]}:train:0"
        for _ in range(4):
            call = await forward(service, "b", other, service._journal.next)
            assert "proto" in (await service.result("b", call.number, 5) or {})

    async def unloaded(service: Service, model: str) -> Call:
        call = await service.unload_model("a", {"model_id": model})
        while not service._is_done(call):
            await asyncio.sleep(0.001)
        return call

    async def first(service: Service) -> tuple[list[str], Call]:
        await made(service, "b")
        session = await service.open_session("a")
        models = [await made(service, "a", session, number) for number in range(3)]
        await save(service, models[0], 1, "kept")
        body = {"model_id": models[1], "seq_id": 1, "sampling_session_seq_id": 0, "kind": "inflight"}
        call = await service.save_weights_for_sampler("a", body)
        assert "sampling_session_id" in (await service.result("a", call.number, 5) or {})
        for model in models[:2]:
            await service.result("a", (await unloaded(service, model)).number, 5)
        unfetched = await unloaded(service, models[2])
        await asyncio.sleep(0.01)
        assert service.models_of("a") == models[:2], "what is left of them is wanted"
        assert await service.unload_model("a", {"model_id": models[2]}) == unfetched, "a repetition"
        await snapshots(service)
        return models, unfetched

    async def ended(service: Service, models: list[str], unfetched: Call) -> None:
        await snapshots(service)
        session = models[0].partition(":")[0]
        result = {"type": "unload_model", "model_id": models[2]}
        assert await service.result("a", unfetched.number, 0) == result, "it was acknowledged"
        for number in [each for each, call in service._journal.calls.items() if call.client == "a"]:
            with suppress(Refused):  # what was fetched before the restart is kept as if it was not
                await service.result("a", number, 0)
        await snapshots(service)
        for _ in range(2):
            await service.finish_session("a", session, None)
            assert service.sessions_of("a") == [] and service.models_of("a") == models[:1]
        await snapshots(service)
        assert (tmp_path / "checkpoints" / models[0] / "kept").exists()
        assert not (tmp_path / "samplers" / models[1]).exists()
        await service.delete_checkpoint("a", CheckpointPath(models[0], STATES, "kept"))
        await snapshots(service)
        await snapshots(service)

    def are_gone(service: Service, *models: str) -> None:
        for model in models:
            refused(410, f"model '{model}' is unloaded", service.demand_model, "a", model)
            refused(410, "is unloaded", forward, service, "a", model, 99)
            refused(404, "there is no model", service.demand_model, "b", model)
            number = int(model.rpartition(":")[2])
            body = {"session_id": model.partition(":")[0], "model_seq_id": number, "base_model": "base"}
            refused(410, "make another|open another", service.create_model, "a", body)

    monkeypatch.setattr(service_module, "FETCHED_SECONDS", 0.0)
    service, _ = make(tmp_path, snapshot_every=2)
    models, unfetched = asyncio.run(running_on(service, first(service)))
    session = models[0].partition(":")[0]
    service, _ = make(tmp_path, snapshot_every=2)
    refused(410, "is unloaded; make another", service.demand_model, "a", models[2])
    asyncio.run(running_on(service, ended(service, models, unfetched)))
    for _ in range(2):
        are_gone(service, *models)
        refused(410, f"session {session} is finished", service.heartbeat, "a", session)
        refused(410, f"session {session} is finished", service.demand_sampler, "a", f"{session}:sample:0")
        refused(404, "there is no session", service.heartbeat, "b", session)
        refused(404, "fetched long ago", service.result, "a", unfetched.number, 0)
        tables = (
            service._models, service._sessions, service._finished, service._samplers, service._by_key, service._gone,
            service._left, service._done, service._last_calls, service._last_seen, service._fetched,
            service.checkpoints.sizes, service.checkpoints.deletions, service._journal.floors, service._journal.calls,
            service._journal.results,
        )  # fmt: skip
        assert [each for each in tables if session in str(each)] == []
        for name in ("calls.jsonl", "results.jsonl", "snapshot.json", "checkpoints", "samplers"):
            file = tmp_path / name
            assert session not in (file.read_text() if file.is_file() else str([*file.iterdir()])), name
        service, trainer = make(tmp_path, snapshot_every=2)
        assert len(trainer.models) == 1
    service.close()


def test_a_session_that_is_left_without_a_model_ends_by_itself_and_others_do_not(tmp_path, monkeypatch):
    monkeypatch.setattr(service_module, "STALL_CHECK_SECONDS", 0.001)
    monkeypatch.setattr(service_module, "IDLE_CHECK_SECONDS", 0.0)

    async def first(service: Service, ahead: list[float]) -> list[str]:
        empty, active, used, model = [await service.open_session("a") for _ in range(3)] + [await made(service, "a")]
        kept = await made(service, "a", used)
        await save(service, kept, 1, "s")
        await service.result("a", (await service.unload_model("a", {"model_id": kept})).number, 5)
        body = {"session_id": empty, "sampling_session_seq_id": 0, "base_model": "base"}
        sampler = await service.open_sampler("a", body)
        assert service.demand_sampler("a", sampler).client == "a"
        ahead[0] += books_module.IDLE_SESSION_SECONDS - 1
        await asyncio.sleep(0.05)
        sessions = [empty, active, used, model.partition(":")[0]]
        assert sorted(service.sessions_of("a")) == sorted(sessions), "not before"
        service.heartbeat("a", active)
        ahead[0] += 2
        while len(service.sessions_of("a")) > 2:
            await asyncio.sleep(0.001)
        await left(service, sessions)
        with pytest.raises(Refused, match="in use") as error:  # it was looked at before its last heartbeat
            await service._accept("a", "finish_session", active, f"finish:{active}", {service_module._IDLE: True})
        assert error.value.status == 409
        await service.finish_session("a", empty, "as where it finishes itself")
        return sessions

    async def left(service: Service, sessions: list[str]) -> None:
        assert service.sessions_of("a") == [sessions[1], sessions[3]]
        for session in (sessions[0], sessions[2]):
            with pytest.raises(Refused, match=f"session {session} is finished; open another") as error:
                service.heartbeat("a", session)
            assert error.value.status == 410
        with pytest.raises(Refused, match="is finished"):
            service.demand_sampler("a", f"{sessions[0]}:sample:0")
        assert names(service, f"{sessions[2]}:train:0") == ["s"], "checkpoints stay"
        body = {"model_id": f"{sessions[3]}:train:0", "seq_id": service._journal.next, "optimizer": False}
        call = await service.load_weights("a", body | {"path": f"tinker://{sessions[2]}:train:0/weights/s"})
        assert "error" not in (await service.result("a", call.number, 5) or {"error": "none"})

    with clock(monkeypatch) as ahead:
        service, _ = make(tmp_path, snapshot_every=1)
        sessions = asyncio.run(running_on(service, first(service, ahead)))
        for _ in range(2):
            service, _ = make(tmp_path, snapshot_every=1)
            asyncio.run(running_on(service, left(service, sessions)))
        assert sessions[0] not in str(service._journal.calls) and sessions[0] not in str(service._sessions)


def test_data_of_calls_that_are_done_are_in_no_memory_and_a_finished_session_unloads_its_models_after_a_kill(tmp_path):
    async def first(service: Service) -> str:
        model = await made(service, "a")
        calls = [await forward(service, "a", model, seq) for seq in (1, 2)]
        for call in calls:
            assert "proto" in (await service.result("a", call.number, 5) or {})
        while any("proto" in call.body for call in service._journal.calls.values()):
            await asyncio.sleep(0.001)
        assert await forward(service, "a", model, 2) == replace(calls[1], body={})
        await service._accept("a", "finish_session", session := model.partition(":")[0], f"finish:{session}", {})
        return model

    async def then(service: Service, trainer: PlainTrainer) -> None:
        while trainer.models or service.sessions_of("a"):
            await asyncio.sleep(0.001)

    service, before = make(tmp_path, snapshot_every=100)
    model = asyncio.run(running_on(service, first(service)))
    gradient = before.models[model]["gradient"]
    assert sum("proto" in call.body for call in Journal(tmp_path).calls.values()) == 2
    service, after = make(tmp_path, snapshot_every=100)
    service._finished.clear()  # so that the model is there to be looked at
    asyncio.run(running_on(service, asyncio.sleep(0)))
    assert torch.equal(after.models[model]["gradient"], gradient)
    service, after = make(tmp_path, snapshot_every=100)
    asyncio.run(asyncio.wait_for(running_on(service, then(service, after)), 20))
