"""Calls on a served trainer: accepted once, in order, in turns, and the same after a kill at any point."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import re
import shutil
import subprocess
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp.test_utils import TestClient, TestServer
from rich.console import Console

import rltool.report.served as report_module
import rltool.tinker.books as books_module
import rltool.tinker.journal as journal_module
import rltool.tinker.main as main_module
import rltool.tinker.service as service_module
from rltool.algorithms.named_losses import LOSSES, NOT_HERE
from rltool.cli import main
from rltool.commands.tables import served_line
from rltool.commands.top_view import served_frame
from rltool.config.serve_trainer import ServeTrainerConfig
from rltool.config.train import TrainConfig
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.run_client import SERVED_ROLE
from rltool.engines.types import EngineInfo
from rltool.errors import EngineUnreachable, UsageError
from rltool.processes.run_directory import open_run
from rltool.processes.state import state_of_this_process, write_state
from rltool.report.served import read_served
from rltool.tinker.full_weights import PublishedWeights
from rltool.tinker.journal import Call, Journal, Lines
from rltool.tinker.limits import Refused
from rltool.tinker.paths import STATES, CheckpointPath
from rltool.tinker.samples import Samples
from rltool.tinker.sampling import Absent, LoadedAdapters, SampleRequest, parse_sample
from rltool.tinker.server import PREFIX, TinkerServer
from rltool.tinker.service import Service
from rltool.tinker.wire import SampledTokens, SampleOutput, Topk, decode_forward, encode_output, encode_samples
from rltool.training.checks.preflight import EnginesAway
from rltool.training.served import StepOutput
from rltool.training.stopping import StopSignal
from tests.contract.tinker.plain_trainer import PlainTrainer
from tests.contract.tinker.protos import field, forward_proto
from tests.contract.tinker.services import (
    Endless,
    clock,
    forward,
    full_disk,
    made,
    make,
    model_of,
    only_one,
    running_on,
)
from tests.e2e.engines import clients_python


class Killed(BaseException):
    """Nothing of the process goes on after it."""


async def life(service: Service, session: str, known: dict[int, Any]) -> list[Any]:
    """A client's whole loop. known: results by the place of their call, which grow; such calls are not made again, all
    others are, from the first: those that were acknowledged are known to the service."""
    model = f"{session}:train:0"
    made: list[Any] = []

    async def call(make: Callable[[], Awaitable[Any]]) -> None:
        made.append(None if len(made) in known else await make())

    async def fetch() -> None:
        for place, each in enumerate(made):
            if place not in known:
                known[place] = await service.result("a", each.number, 5)

    of_model = {"session_id": session, "model_seq_id": 0, "base_model": "base"}
    await call(lambda: service.create_model("a", of_model))
    seq = 0
    for step in range(2):
        for each in range(2):
            seq += 1
            await call(partial(forward, service, "a", model, seq, seed=each + step))
        seq += 1
        adam = {"model_id": model, "seq_id": seq, "adam_params": {"learning_rate": 0.1}}
        await call(partial(service.optim_step, "a", adam))
        seq += 1
        await call(partial(service.save_weights, "a", {"model_id": model, "seq_id": seq, "path": f"s{step}"}))
        await call(partial(service.create_model, "a", of_model | {"model_seq_id": 1 + step}))
        await fetch()
        await call(partial(service.unload_model, "a", {"model_id": f"{session}:train:{1 + step}"}))  # it leaves
    body = {"model_id": model, "seq_id": seq + 1, "path": f"tinker://{model}/weights/s0", "optimizer": True}
    await call(lambda: service.load_weights("a", body))
    await service.delete_checkpoint("a", CheckpointPath(model, STATES, "s0"))
    for each in (2, 3, 4):
        await call(partial(forward, service, "a", model, seq + each))
    await fetch()
    return list(known.values())


async def driven(service: Service, session: str | None, known: dict[int, Any]) -> list[Any]:
    running = asyncio.create_task(service.run())
    living = asyncio.create_task(life(service, session or await service.open_session("a"), known))
    done, _ = await asyncio.wait({running, living}, return_when=asyncio.FIRST_COMPLETED)
    calls = list(service._journal.calls.values())
    if living in done and living.exception() is None:  # what was acknowledged long ago is carried out again
        while service._done.get(calls[-1].model, -1) < calls[-1].number and not running.done():
            await asyncio.sleep(0.001)
        done, _ = await asyncio.wait({running, living}, timeout=0)
    for task in (running, living):
        task.cancel()
    await asyncio.wait({running, living})
    for task in (running, living):
        # An exception that is not retrieved is logged when the task is collected; inside of ast.parse, in a test of
        # another file, that was a SystemError ("AST constructor recursion depth mismatch", Python 3.11).
        _ = task.cancelled() or task.exception()
    for task in done:
        task.result()
    return living.result()


@contextmanager
def killed_at(count: int, monkeypatch: pytest.MonkeyPatch, *, compacting: bool) -> Iterator[list[int]]:
    """The process dies at the count-th time that it writes something: before it, or after it, in turns. compacting: of
    what a compaction writes."""
    seen = [0]

    def dying(original: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            seen[0] += 1
            if seen[0] > count // 2:
                if count % 2:
                    original(*arguments, **named)
                raise Killed
            return original(*arguments, **named)

        return call

    with monkeypatch.context() as patch:
        places = (
            (Journal, "accept"), (Journal, "finish"), (service_module, "write_json_atomic"),
            (PlainTrainer, "snapshot"), (PlainTrainer, "save"), (service_module.shutil, "rmtree"), (Journal, "compact"),
        )  # fmt: skip
        steps = ((Lines, "replace"), (journal_module, "sync_directory"), (os, "replace"), (Service, "_forget"))
        for place, name in steps if compacting else places:
            patch.setattr(place, name, dying(getattr(place, name)))
        yield seen


async def attempt(directory: Path, known: dict[int, Any] | None = None) -> tuple[list[Any], PlainTrainer]:
    service, trainer = make(directory)
    try:
        session = next(iter(service._sessions), None)
        return await driven(service, session, {} if known is None else known), trainer
    finally:
        service.close()


def without_session(found: object, directory: Path) -> str:
    session = Journal(directory).calls[0].model
    return str(found).replace(session, "SESSION")


@pytest.mark.parametrize("forgets", [False, True])
def test_after_a_kill_at_any_point_the_state_is_that_of_the_acknowledged_calls(tmp_path, monkeypatch, forgets):
    """forgets: results that were fetched go with the next snapshot, and the client does not ask for them again."""
    monkeypatch.setattr(os, "fsync", lambda _: None)  # of no matter to a kill, and what takes the time here
    if forgets:
        monkeypatch.setattr(service_module, "FETCHED_SECONDS", 0.0)
    expected, trainer = asyncio.run(attempt(tmp_path / "whole"))
    assert not any("error" in each for each in expected)
    want = without_session(expected, tmp_path / "whole")
    [saved] = (tmp_path / "whole" / "checkpoints").iterdir()
    assert {each.name for each in saved.iterdir()} == {"s1"}
    count = 0
    for count in range(900):
        directory, known = tmp_path / str(count), dict[int, Any]()
        with killed_at(count, monkeypatch, compacting=forgets):
            try:
                asyncio.run(attempt(directory, known))
            except Killed:
                pass
            else:
                break  # it came to its end: there is no later point
        for name in ("calls", "results"):  # as a kill in the middle of its writing leaves it
            (directory / f"{name}.jsonl.new").write_bytes(b'{"number":0,"cl')
        found, again = asyncio.run(attempt(directory, known if forgets else None))
        assert without_session(found, directory) == want, f"killed at {count}"
        [one], [other] = trainer.models.values(), again.models.values()
        assert all(torch.equal(one[name], other[name]) for name in one), f"killed at {count}"
        shutil.rmtree(directory)
    assert 40 < count < 899


def test_what_was_done_is_done_again_in_the_order_of_before_also_where_a_client_unloaded_for_another(tmp_path):
    """Of each client the first calls in turn would make b's model beside a's, which the trainer refuses."""

    async def first(service: Service) -> tuple[str, str]:
        one = await made(service, "a")
        await service.result("a", (await forward(service, "a", one, 1)).number, 5)
        refused = await service.create_model(
            "b", {"session_id": await service.open_session("b"), "model_seq_id": 0, "base_model": "base"}
        )
        assert "trains all weights" in (await service.result("b", refused.number, 5) or {})["error"]
        gone = await service.unload_model("a", {"model_id": one})
        await service.result("a", gone.number, 5)
        two = await made(service, "b")
        call = await service.optim_step("b", {"model_id": two, "seq_id": 1, "adam_params": {"learning_rate": 0.1}})
        await service.result("b", call.number, 5)
        return refused.model, two

    async def then(service: Service, model: str) -> dict[str, Any]:
        call = await forward(service, "b", model, 2)
        return await service.result("b", call.number, 5) or {}

    service, before = only_one(tmp_path)
    refused, two = asyncio.run(running_on(service, first(service)))
    weights = before.models[two]["weights"]
    service, after = only_one(tmp_path)
    assert "proto" in asyncio.run(running_on(service, then(service, two)))
    assert list(after.models) == [two] and torch.equal(after.models[two]["weights"], weights)
    assert service.models() == {"b": 1} and refused not in service.models_of("b")


def test_a_journal_stays_small_and_knows_what_it_has_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr(service_module, "FETCHED_SECONDS", 0.0)
    monkeypatch.setattr(books_module, "KEPT_SAMPLERS", 5)
    threads, forget = set[int](), Service._forget

    def noted(service: Service, call: Call) -> None:
        threads.add(threading.get_ident())
        forget(service, call)

    monkeypatch.setattr(Service, "_forget", noted)

    async def steps(service: Service, model: str, begin: int, end: int) -> None:
        for seq in range(begin, end, 2):
            await forward(service, "a", model, seq)
            call = await service.optim_step("a", {"model_id": model, "seq_id": seq + 1, "adam_params": {}})
            for each in (call.number - 1, call.number):
                assert await service.result("a", each, 5)
            body = {"session_id": model.partition(":")[0], "sampling_session_seq_id": seq, "base_model": "base"}
            await service.open_sampler("a", body)

    async def stopped(service: Service, running: asyncio.Task[None]) -> int:
        running.cancel()
        await asyncio.wait({running})
        service.close()
        return sum((tmp_path / name).stat().st_size for name in ("calls.jsonl", "results.jsonl"))

    async def case() -> None:
        service, trainer = make(tmp_path)
        running = asyncio.create_task(service.run())
        model = await model_of(service, "a")
        unasked, early = await forward(service, "a", model, 1), await forward(service, "a", model, 2)
        await steps(service, model, 3, 31)
        assert await service.result("a", early.number, 5)
        sizes = [await stopped(service, running)]
        for begin in (31, 131):
            before = trainer.models[model]["weights"]
            service, trainer = make(tmp_path)
            assert service.models_of("a") == [model]
            assert service._last_calls == {}
            running = asyncio.create_task(service.run())
            with pytest.raises(UsageError, match="is too old"):
                await forward(service, "a", model, 5)
            with pytest.raises(Refused, match="fetched long ago"):
                await service.result("a", unasked.number + 4, 5)
            if begin == 31:  # it was not fetched until now
                assert await forward(service, "a", model, 1) == replace(unasked, body={})
                assert "proto" in (await service.result("a", unasked.number, 0) or {})
            await steps(service, model, begin, begin + 100)
            assert set(service._last_calls) == {model}, "not of each sampling session"
            assert not torch.equal(trainer.models[model]["weights"], before)
            sizes.append(await stopped(service, running))
        assert len(trainer.models) == 1 and max(sizes) < 9000, sizes
        assert abs(sizes[2] - sizes[1]) < 1500, sizes
        assert threads == {threading.get_ident()}, "requests read the books meanwhile"

    asyncio.run(case())


def test_a_history_is_folded_with_the_journal_and_says_the_same(tmp_path, monkeypatch):
    """Over two starts, of which the first leaves half a line."""

    async def steps(service: Service, model: str, begin: int, end: int) -> None:
        for seq in range(begin, end, 3):
            for each in range(2):
                await forward(service, "a", model, seq + each)
            service.history.sampled("a", 2)
            call = await service.optim_step("a", {"model_id": model, "seq_id": seq + 2, "adam_params": {}})
            await service.result("a", call.number, 5)
        service.history.refused("b", f"at {begin}")

    def life(directory: Path, folds: int) -> Any:
        lab = directory / "lab"
        with monkeypatch.context() as patch:
            patch.setattr(journal_module, "HISTORY_BYTES", folds)
            patch.setattr(report_module, "KEPT_POINTS", 8)
            patch.setattr(os, "fsync", lambda _: None)
            service, _ = make(lab / "served")
            model = asyncio.run(running_on(service, both(service)))
            with (lab / "served" / "history.jsonl").open("ab") as file:
                file.write(b'{"time": 1, "cli')
            service, _ = make(lab / "served")
            asyncio.run(running_on(service, steps(service, model, 90, 120)))
        return read_served(lab), (lab / "served" / "history.jsonl").stat().st_size

    async def both(service: Service) -> str:
        model = await made(service, "a")
        await steps(service, model, 0, 90)
        return model

    (whole, size), (folded, small) = life(tmp_path / "whole", 10**9), life(tmp_path / "folded", 1000)
    [one], [other] = whole.models.values(), folded.models.values()
    assert (one.calls, one.steps, one.failed) == (other.calls, other.steps, other.failed) == (121, 40, 0)
    assert set(other.losses) < set(one.losses) and set(other.norms) < set(one.norms)
    assert other.losses[-1] == one.losses[-1] and len(other.losses) >= 4
    assert whole.clients == folded.clients == {
        "a": {"samples": 40, "sampled_tokens": 80}, "b": {"last_refusal": "at 90", "refused": 2},
    }  # fmt: skip
    assert whole.starts == folded.starts == 2
    assert small < 6000 < size


def test_no_file_of_the_server_is_readable_by_others_not_even_while_it_is_compacted(tmp_path, monkeypatch):
    """Whatever the umask, and whatever file a kill has left in the place of the new one."""
    monkeypatch.setattr(journal_module, "HISTORY_BYTES", 0)
    written: dict[str, set[int]] = {}
    write, replaced = os.write, list[str]()
    rename = os.replace

    def noted(file: int, data: Any) -> int:
        path, mode = Path(os.readlink(f"/proc/self/fd/{file}")), os.fstat(file).st_mode & 0o777
        if path.parent == tmp_path:
            written.setdefault(path.name, set()).add(mode)
        return write(file, data)

    def renamed(new: Any, path: Any) -> None:
        written.setdefault(Path(new).name, set()).add(Path(new).stat().st_mode & 0o777)
        replaced.append(Path(path).name)
        rename(new, path)

    async def case(service: Service) -> None:
        model = await made(service, "a")
        for seq in range(3):
            await service.result("a", (await forward(service, "a", model, seq)).number, 5)
        while "history.jsonl" not in replaced:
            await asyncio.sleep(0.001)

    before = os.umask(0)
    try:
        (tmp_path / "history.jsonl.new").touch(mode=0o666)
        (tmp_path / "calls.jsonl.new").touch(mode=0o666)
        service, _ = make(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", noted)
            patch.setattr(os, "replace", renamed)
            asyncio.run(running_on(service, case(service)))
    finally:
        os.umask(before)
    files = {name for each in ("calls", "results", "history") for name in (f"{each}.jsonl", f"{each}.jsonl.new")}
    assert {name for name, modes in written.items() if modes == {0o600}} >= files
    assert {"calls.jsonl", "results.jsonl", "history.jsonl"} <= set(replaced)
    assert all(file.stat().st_mode & 0o077 == 0 for file in tmp_path.iterdir())


@pytest.mark.parametrize(("lengths", "size"), [((64, 4096), 62), ((4096, None), 64), ((), 64), ((4096,), 64)])
def test_engines_are_compared_over_no_more_tokens_than_they_take(lengths, size):
    """vLLM takes max_model_len tokens with the one that it samples beside scoring."""
    engines = [SimpleNamespace(max_model_len=length) for length in lengths]
    assert main_module.checked_tokens(8192, engines) == size and main_module.checked_tokens(33, engines) == 32


def test_a_line_that_a_kill_left_half_written_is_cut_off(tmp_path):
    expected, _ = asyncio.run(attempt(tmp_path))
    with (tmp_path / "calls.jsonl").open("ab") as file:
        file.write(b'{"number":99,"cli')
    found, _ = asyncio.run(attempt(tmp_path))
    assert found == expected
    assert (tmp_path / "calls.jsonl").read_bytes().endswith(b"\n")


def test_a_damaged_line_is_an_error_that_names_it(tmp_path):
    asyncio.run(attempt(tmp_path))
    lines = (tmp_path / "calls.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "calls.jsonl").write_bytes(b"".join([lines[0], lines[1][:9] + b"\n", *lines[2:]]))
    with pytest.raises(UsageError, match=r"calls.jsonl, line 2 is damaged"):
        make(tmp_path)


def test_a_call_that_the_disk_does_not_take_is_answered_503_and_the_journal_stays_whole(tmp_path, monkeypatch):
    async def post(http: Any, route: str, body: Any) -> tuple[int, Any]:
        async with http.post(PREFIX + route, json=body, headers={"X-API-Key": "tml-a"}) as reply:
            return reply.status, await reply.json()

    async def case(ahead: list[float]) -> None:
        service, _ = make(tmp_path, models=1, session_timeout=60.0, snapshot_every=100)
        running = asyncio.create_task(service.run())
        async with TestClient(TestServer(TinkerServer(service, {"a": "tml-a"}).app())) as http:
            with full_disk(monkeypatch, "calls.jsonl"):
                for _ in range(3):
                    status, said = await post(http, "create_session", {})
                    assert status == 503 and f"{tmp_path} cannot be written" in said["error"]
                assert (tmp_path / "calls.jsonl").read_bytes() == b""
            idle = await made(service, "a")
            ahead[0] += 61
            body = {"session_id": await service.open_session("a"), "model_seq_id": 0, "base_model": "base"}
            with full_disk(monkeypatch, "calls.jsonl"):
                assert (await post(http, "create_model", body))[0] == 503
            assert service.models_of("a") == [idle] and not service._models[idle].unloaded, "both or none"
            assert service.queued.by_client() == {}
            status, promised = await post(http, "create_model", body)
            assert status == 200 and "error" not in (await post(http, "retrieve_future", promised))[1]
        running.cancel()
        await asyncio.wait({running})
        service.close()

    with clock(monkeypatch) as ahead:
        asyncio.run(case(ahead))
    kinds = [call.kind for call in Journal(tmp_path).calls.values()]
    assert kinds == ["session", "create_model", "session", "unload_model", "create_model"]


def test_a_result_that_the_disk_does_not_take_is_given_out_when_it_does_and_the_calls_behind_it_wait(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(service_module, "FULL_SECONDS", 0.01)

    async def case(is_full: bool) -> tuple[list[Any], torch.Tensor]:
        service, trainer = make(tmp_path / str(is_full), snapshot_every=2)
        running = asyncio.create_task(service.run())
        model = await made(service, "a")
        with full_disk(monkeypatch, "results.jsonl") if is_full else nullcontext():
            await forward(service, "a", model, 1)
            step = {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": 0.1}}
            number = (await service.optim_step("a", step)).number
            if is_full:
                assert await service.result("a", number - 1, 0.1) is None and not running.done()
                assert await service.exclusively(lambda: asyncio.sleep(0, "done")) == "done"
                assert torch.equal(trainer.models[model]["mean"], torch.zeros_like(trainer.models[model]["mean"]))
                assert service.waiting() == {"a": 1} and service.queued.by_client()["a"] > 0
                assert f"cannot be written to {tmp_path / 'True'} (" in service.stalled
        found = [await service.result("a", each, 5) for each in (number - 1, number)]
        assert service.stalled == ""
        running.cancel()
        await asyncio.wait({running})
        service.close()
        assert [*Journal(tmp_path / str(is_full)).results] == [1, 2, 3]
        _, again = make(tmp_path / str(is_full))
        assert again.models
        return found, trainer.models[model]["mean"]

    (found, one), (expected, other) = asyncio.run(case(True)), asyncio.run(case(False))
    assert "proto" in found[0] and "metrics" in found[1] and len(expected) == 2
    assert one.any() and one.shape == other.shape


def test_a_snapshot_that_the_disk_does_not_take_is_made_later_and_calls_go_on(tmp_path, monkeypatch, caplog):
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    async def case(service: Service) -> None:
        model, seq = await made(service, "a"), 0
        for place, name in ((PlainTrainer, "snapshot"), (service_module, "write_json_atomic"), (Lines, "replace")):
            with monkeypatch.context() as patch:
                patch.setattr(place, name, full)
                for _ in range(4):
                    seq += 1
                    call = await forward(service, "a", model, seq)
                    assert "proto" in (await service.result("a", call.number, 5) or {})
            assert len([*(tmp_path / "snapshots").iterdir()]) == (place is Lines), "nothing is left of it"
        for _ in range(2):
            seq += 1
            await service.result("a", (await forward(service, "a", model, seq)).number, 5)

    service, _ = make(tmp_path, snapshot_every=2)
    asyncio.run(running_on(service, case(service)))
    said = [each.getMessage() for each in caplog.records]
    assert said and all(f"a snapshot was not written to {tmp_path}: No space left" in each for each in said)
    service, trainer = make(tmp_path, snapshot_every=2)
    assert len(trainer.models) == 1 and len(service._replay) <= 3


def test_a_server_that_is_started_again_waits_for_engines_that_are_started_again_too(monkeypatch):
    found = iter([EnginesAway("one"), EnginesAway("one"), "fleet"])

    needs: list[int | None] = []

    def probed(_: object, needed: int | None) -> object:
        needs.append(needed)
        each = next(found)
        if isinstance(each, Exception):
            raise each
        return each

    monkeypatch.setattr(main_module, "probed", probed)
    monkeypatch.setattr(main_module, "AWAY_SECONDS", 0.0)
    stop, config = StopSignal(lambda _: None), TrainConfig.model_construct()
    assert main_module._engines(config, ServeTrainerConfig(), stop, goes_on=True) == "fleet"
    found = iter([EnginesAway("one"), EnginesAway("one")])
    with pytest.raises(EnginesAway):
        main_module._engines(config, ServeTrainerConfig(ready_timeout=1e-9), stop, goes_on=False)
    assert needs[:3] == [1, 1, 1] and set(needs[3:]) == {None}, "one is enough, but at the first start"


def test_a_compaction_keeps_a_call_that_is_in_the_journal_and_not_yet_in_the_books(tmp_path):
    async def case() -> None:
        service, _ = make(tmp_path)
        model = await model_of(service, "a")
        body = {"kind": STATES, "name": "s", "expires": 5.0}
        service._journal.accept(Call(service._journal.next, "a", "checkpoint_ttl", model, "ttl:1", "", body))
        service._compact()
        service.close()

    asyncio.run(case())
    assert [call.kind for call in Journal(tmp_path).calls.values()][-1] == "checkpoint_ttl"


def test_other_requests_are_answered_while_a_call_waits_for_the_disk_and_one_whose_client_left_is_accepted(
    tmp_path, monkeypatch
):
    begun, ends, fsync = threading.Event(), threading.Event(), os.fsync

    def slow(file: int) -> None:
        begun.set()
        ends.wait(10)
        fsync(file)

    async def case() -> None:
        service, _ = make(tmp_path)
        session = await service.open_session("a")
        monkeypatch.setattr(os, "fsync", slow)
        accepting = asyncio.create_task(service.open_session("b"))
        await asyncio.to_thread(begun.wait, 10)
        service.heartbeat("a", session)
        assert not accepting.done() and service.sessions_of("b") == []
        accepting.cancel()
        await asyncio.wait({accepting})
        ends.set()
        await service.open_session("c")
        assert len(service.sessions_of("b")) == 1
        service.close()
        again, _ = make(tmp_path)
        assert [len(again.sessions_of(client)) for client in "abc"] == [1, 1, 1]

    asyncio.run(case())


def test_a_repeated_call_is_carried_out_once_and_another_of_its_number_is_refused(tmp_path):
    async def case() -> None:
        service, _ = make(tmp_path)
        model = await model_of(service, "a")
        first, again = await forward(service, "a", model, 1), await forward(service, "a", model, 1)
        assert first == again
        with pytest.raises(UsageError, match="a seq_id is used once"):
            await forward(service, "a", model, 1, seed=1)
        made = {"session_id": model.partition(":")[0], "model_seq_id": 1, "base_model": "base"}
        model = (await service.create_model("a", made | {"lora_config": {"rank": 1}})).model
        saves = [{"model_id": model, "seq_id": 1, "sampling_session_seq_id": number} for number in (4, 5)]
        first, again = [await service.save_weights_for_sampler("a", each) for each in saves]  # as the client repeats it
        assert first == again and first.body["sampling_session"].endswith(":sample:4")
        with pytest.raises(UsageError, match="a seq_id is used once"):
            await service.save_weights_for_sampler("a", saves[0] | {"kind": "inflight"})

    asyncio.run(case())


def test_polls_of_one_result_that_give_up_leave_the_others_waiting(tmp_path):
    """As a client asks again where an answer takes long."""

    async def case() -> None:
        service, _ = make(tmp_path)
        call = await forward(service, "a", await model_of(service, "a"), 1)
        waiting = asyncio.create_task(service.result("a", call.number, 20))
        cancelled = asyncio.create_task(service.result("a", call.number, 20))
        assert await service.result("a", call.number, 0.01) is None
        cancelled.cancel()
        await asyncio.wait({cancelled})
        assert not waiting.done()
        running = asyncio.create_task(service.run())
        assert "proto" in (await waiting or {})
        running.cancel()
        await asyncio.wait({running})
        service.close()

    asyncio.run(case())


def test_two_calls_of_one_number_at_once_are_one_and_a_refusal_and_a_call_without_a_number_is_refused(tmp_path):
    async def case() -> None:
        service, _ = make(tmp_path)
        model = await model_of(service, "a")
        step = {"model_id": model, "seq_id": 7, "adam_params": {}}
        calls = forward(service, "a", model, 7), service.optim_step("a", step)
        both = await asyncio.gather(*calls, return_exceptions=True)
        assert sorted(type(each).__name__ for each in both) == ["Call", "UsageError"]
        with pytest.raises(UsageError, match="seq_id is None, expected an integer .*: it makes a repetition known"):
            await service.optim_step("a", {"model_id": model, "adam_params": {}})

    asyncio.run(case())


def test_an_unloaded_model_leaves_the_others_as_they_are_and_zero_weights_change_nothing(tmp_path):
    async def case(unloads: bool) -> torch.Tensor:
        service, trainer = make(tmp_path / str(unloads))
        running = asyncio.create_task(service.run())
        session = await service.open_session("a")
        body = {"session_id": session, "base_model": "base"}
        names = [f"{session}:train:{i}" for i in range(2)]
        for i in range(2):
            await service.create_model("a", body | {"model_seq_id": i, "lora_config": {"rank": 1, "seed": i}})
        for seq, weight in enumerate((1.0, 0.0), 1):
            for name in names[: 2 if unloads else 1]:
                weights = {"weights": [weight] * 3} if unloads or weight else {}
                proto = forward_proto(name, seq, tokens=[1, 2, 3], targets=[2, 3, 5], **weights)
                if weights:
                    kept = {"proto": base64.b64encode(proto).decode()}
                    await service.on_model("a", "forward_backward", name, seq, kept)
        if unloads:
            await service.unload_model("a", {"model_id": names[1]})
        call = await service.optim_step("a", {"model_id": names[0], "seq_id": 3, "adam_params": {"learning_rate": 0.1}})
        assert "metrics" in (await service.result("a", call.number, 5) or {})
        running.cancel()
        await asyncio.wait({running})
        assert set(trainer.models) == {names[0], *([] if unloads else names[1:])}
        return trainer.models[names[0]]["weights"]

    assert torch.equal(asyncio.run(case(True)), asyncio.run(case(False)))


def test_clients_take_turns_and_each_models_calls_keep_their_order(tmp_path, monkeypatch):
    order: list[tuple[str, int]] = []
    original = service_module.perform

    def noted(trainer: Any, call: Any, checkpoints: Any, samplers: Any) -> Any:
        order.append((call.client, call.number))
        return original(trainer, call, checkpoints, samplers)

    monkeypatch.setattr(service_module, "perform", noted)

    async def case() -> None:
        service, _ = make(tmp_path)
        models = {client: await model_of(service, client) for client in "ab"}
        calls = [await forward(service, each, models[each], seq) for seq, each in enumerate("aaaaabb")]
        running = asyncio.create_task(service.run())
        assert await service.result("b", calls[-1].number, 5)
        assert await service.result("a", calls[-3].number, 5)
        running.cancel()

    asyncio.run(case())
    assert "".join(client for client, _ in order) == "abababaaa"
    for client in "ab":
        numbers = [number for name, number in order if name == client]
        assert numbers == sorted(numbers)


def test_another_clients_sessions_models_results_and_checkpoints_are_not_there(tmp_path):
    async def case() -> None:
        service, _ = make(tmp_path)
        model = await model_of(service, "a")
        call = await forward(service, "a", model, 1)
        session = await service.open_session("b")
        theirs = {"session_id": model.split(":")[0], "model_seq_id": 1, "base_model": "base"}
        load = {"session_id": session, "model_seq_id": 0, "path": f"tinker://{model}/weights/x"}
        for refused in (
            service.result("b", call.number, 0), forward(service, "b", model, 2),
            service.create_model("b", theirs), service.load_weights("b", load),
        ):  # fmt: skip
            with pytest.raises(Refused) as error:
                await refused
            assert error.value.status == 404

    asyncio.run(case())


def test_over_http_a_cancelled_sample_ends_and_health_needs_no_key(tmp_path):
    service, _ = make(tmp_path)
    samples = Samples(Endless(), vocab_size=10, most=1)
    server = TinkerServer(
        service, {"a": "tml-a"}, samples=samples, poll_seconds=0.01, watched_by=("lab", "the-run")
    )

    async def scenario() -> None:
        async with TestClient(TestServer(server.app())) as http:
            assert (await http.get(PREFIX + "healthz")).status == 200
            assert (await http.post(PREFIX + "cancel_future", json={})).status == 401
            session = await service.open_session("a")

            async def post(path: str, body: dict[str, Any]) -> tuple[int, Any]:
                async with http.post(PREFIX + path, json=body, headers={"X-API-Key": "tml-a"}) as reply:
                    return reply.status, await reply.json()

            assert (await post("session_heartbeat", {"session_id": session}))[0] == 200
            assert (await post("session_heartbeat", {"session_id": "another"}))[0] == 404
            assert (await post("telemetry", {"events": [{"event": "SESSION_START"}]}))[0] == 200
            opened = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "base"}
            sampler = (await post("create_sampling_session", opened))[1]["sampling_session_id"]
            asked = {
                "sampling_session_id": sampler, "seq_id": 0, "prompt": {"chunks": [{"tokens": [1, 2]}]},
                "sampling_params": {"max_tokens": 4},
            }  # fmt: skip
            status, promised = await post("asample", asked)
            assert status == 200
            assert (await post("retrieve_future", promised))[0] == 408
            assert (await post("asample", asked | {"seq_id": 1}))[0] == 429
            assert (await post("cancel_future", promised))[0] == 200
            assert "cancelled" in (await post("retrieve_future", promised))[1]["error"]
            assert (await post("asample", asked | {"seq_id": 1}))[0] == 200
            await samples.close()

    asyncio.run(scenario())


def test_over_http_polls_are_answered_when_the_server_ends_and_a_key_that_is_no_text_is_no_key(tmp_path):
    service, _ = make(tmp_path)
    samples = Samples(Endless(), vocab_size=10, most=1)
    server = TinkerServer(service, {"a": "tml-a"}, samples=samples, poll_seconds=1e6, watched_by=("lab", "the-run"))

    async def scenario() -> None:
        http = TestClient(TestServer(server.app()))
        await http.start_server()
        for path, header in ((f"{PREFIX}checkpoints", "X-API-Key"), ("/status", "Authorization")):
            reader, writer = await asyncio.open_connection(http.host, http.port)
            writer.write(f"GET {path} HTTP/1.1\r\nHost: here\r\n{header}: ".encode() + b"tml-\xff\xfe\r\n\r\n")
            assert b" 401 " in await reader.readline()
            writer.close()
        model = await model_of(service, "a")
        sampler = {"session_id": model.partition(":")[0], "sampling_session_seq_id": 0, "base_model": "base"}
        asked = {
            "sampling_session_id": await service.open_sampler("a", sampler), "seq_id": 0,
            "prompt": {"chunks": [{"tokens": [1, 2]}]}, "sampling_params": {"max_tokens": 4},
        }  # fmt: skip
        head = {"X-API-Key": "tml-a"}
        async with http.post(PREFIX + "asample", json=asked, headers=head) as reply:
            sample = await reply.json()
        call = await forward(service, "a", model, 1)

        async def poll(number: str) -> int:
            async with http.post(PREFIX + "retrieve_future", json={"request_id": number}, headers=head) as reply:
                return reply.status

        assert await poll("9" * 5000) == 404
        polls = [asyncio.create_task(poll(number)) for number in (str(call.number), sample["request_id"])]
        while server.requests[f"POST {PREFIX}retrieve_future"] < 3:
            await asyncio.sleep(0.001)
        await http.server.close()
        assert await asyncio.gather(*polls) == [408, 408]
        await http.close()
        await samples.close()

    asyncio.run(scenario())


class Counted:
    """Samples without a sequence; two at a time."""

    max_model_len, at_once = 8, 2

    def __init__(self) -> None:
        self.running = 0

    async def sample(self, asked: SampleRequest, weights: Path | None) -> SampleOutput:
        self.running += 1
        assert self.running <= self.at_once
        try:
            await asyncio.sleep(0.001)
        finally:
            self.running -= 1
        return SampleOutput(())


def test_samples_of_clients_take_turns_however_many_one_has_sent_and_cancelled_ones_keep_no_slot():
    async def case() -> list[str]:
        order: list[str] = []
        samples = Samples(Counted(), vocab_size=10, most=100, ended=lambda client, _: order.append(client))
        body = {"sampling_session_id": "s", "prompt": {"chunks": [{"tokens": [1]}]}}
        body["sampling_params"] = {"max_tokens": 1}
        numbers = [samples.begin("a", body | {"seq_id": seq}, lambda: None) for seq in range(20)]
        await asyncio.sleep(0)
        for number in (*numbers[:2], *numbers[10:]):  # two that run, and some that wait
            samples.cancel("a", number)
        asked = [samples.begin("b", body | {"seq_id": seq}, lambda: None) for seq in range(3)]
        for client, number in [*(("b", each) for each in asked), *(("a", each) for each in numbers[2:10])]:
            assert "proto" in (await samples.result(client, number, 5) or {})
        await samples.close()
        return order

    order = asyncio.run(case())
    assert Counter(order) == {"a": 8, "b": 3}
    assert order.index("b") <= 3 and "".join(order).rindex("b") <= 7, order


class FakeNames:
    """NamedAdapters that load at once."""

    def __init__(self) -> None:
        self.loaded: list[str] = []

    async def publish(self, name: str, directory: Path, engines: Any) -> dict[str, Any]:
        self.loaded.append(directory.name)
        return {}

    async def unload(self, name: str) -> dict[str, Any]:
        return {}


def test_an_adapter_gets_a_place_though_requests_never_end_to_come_for_those_that_have_them():
    async def case() -> None:
        engines = SimpleNamespace(fleet=SimpleNamespace(members=lambda *_: ()), client=None)
        adapters: Any = LoadedAdapters(engines, slots=2, deadline=1.0, prefix="t")  # type: ignore[arg-type]
        names = adapters._named = FakeNames()
        ends = asyncio.Event()

        async def user(name: str, seconds: float) -> None:
            """Two of them, so that there is no moment without a request."""
            while not ends.is_set():
                async with adapters.using(Path("/adapters") / name):
                    await asyncio.sleep(seconds)

        users = [asyncio.create_task(user(name, each)) for name in "ab" for each in (0.003, 0.005)]
        await asyncio.sleep(0.02)
        for _ in range(3):
            async with asyncio.timeout(60), adapters.using(Path("/adapters/c")):
                assert sum(not held.draining for held in adapters._held.values()) >= 1
            await asyncio.sleep(0.02)
        given_up = asyncio.create_task(user("d", 0))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.sleep(0.05)
        assert {"a", "b"} <= set(names.loaded[-8:]), "an evicted one comes back"
        ends.set()
        async with asyncio.timeout(60):
            await asyncio.gather(*users)
        assert len(adapters._held) <= 2 and not any(held.users for held in adapters._held.values())

    asyncio.run(case())


@pytest.mark.parametrize("problem", [None, "serves another model"])
def test_an_engine_that_was_away_joins_when_it_answers_and_fits(problem):
    endpoint, said = EngineEndpoint(url="http://127.0.0.1:9"), list[str]()
    answers: list[Any] = [EngineUnreachable("away"), EngineUnreachable("away"), SimpleNamespace()]
    checked: list[Any] = [EngineUnreachable("it has died again"), problem]

    async def probe(*_: Any, **__: Any) -> Any:
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(found, Exception):
            raise found
        return found

    async def check(*_: Any) -> str | None:
        found = checked.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    joined: list[Any] = []

    async def carried_out() -> None:
        joined.append("shown")

    fleet = SimpleNamespace(
        policy=SimpleNamespace(probe_seconds=0.001), add_probed=lambda each, info, takes_weights: joined.append(each)
    )
    engines: Any = SimpleNamespace(fleet=fleet, client=SimpleNamespace(probe=probe), log=said.append)
    monitor: Any = SimpleNamespace(carry_out=carried_out)
    asyncio.run(asyncio.wait_for(Absent((endpoint,), check).join(endpoint, engines, monitor), 60))
    assert joined == ([] if problem else [endpoint, "shown"]) and not checked
    assert said == ([f"engine {endpoint.url} does not join: {problem}"] if problem else [])


@pytest.mark.parametrize(
    ("own", "text"),
    [
        ({}, None), ({"lora_rank": 2}, "adapters up to rank 2"), ({"max_model_len": 63}, "max_model_len is 63, less"),
        ({"lora_slots": 2}, "lora_slots is 2, less"), ({"score": -9.0}, "log-probabilities differ by 8"),
    ],
)  # fmt: skip
def test_an_engine_that_joins_is_checked_as_the_first_ones_are(tmp_path, own, text):
    async def score(endpoint: EngineEndpoint, tokens: Any, timeout: float) -> tuple[float, ...]:
        return (own.get("score", -1.0),) * (len(tokens) - 1)

    config = TrainConfig.model_validate({"model": {"path": tmp_path, "dtype": "float32"}})
    client: Any = SimpleNamespace(score=score)
    base = main_module.BaseCheck(config, client, (1, 2, 3), np.array([-1.0, -1.0]))
    there = EngineInfo(
        dialect="vllm", engine_version="0", model_id="m", world_size=1, max_model_len=64, vocab_size=9, dtype="float32",
        weight_backend=None, weight_version=None, boot_id=None, plugin=True, device="cpu", lora_rank=8, lora_slots=4,
    )  # fmt: skip
    joins = replace(there, **{key: value for key, value in own.items() if key != "score"})
    fleet: Any = SimpleNamespace(infos={"http://127.0.0.1:8": there})
    endpoint = EngineEndpoint(url="http://127.0.0.1:9")
    problem = asyncio.run(main_module._joining_problem(8, fleet, base, endpoint, joins))
    assert problem is None if text is None else text in (problem or "")


def test_status_metrics_and_top_count_calls_models_and_samples_and_want_the_runs_key(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RLTOOL_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(journal_module, "TALLY_SECONDS", 0.0)
    lab = open_run("lab", create=True)
    service, _ = make(lab.path / "served")
    samples = Samples(Endless(), vocab_size=10, most=1)
    server = TinkerServer(service, {"a": "tml-a"}, samples=samples, watched_by=("lab", "the-run"))

    lab.key_file.write_text("the-run")

    def say(*words: str) -> None:
        with pytest.raises(SystemExit) as ended:
            main([*words])
        assert ended.value.code == 0

    async def scenario() -> tuple[Any, str]:
        running = asyncio.create_task(service.run())
        session = await service.open_session("a")
        model = f"{session}:train:0"
        async with TestClient(TestServer(server.app())) as http:
            url = str(http.make_url("")).rstrip("/")
            write_state(lab, state_of_this_process(SERVED_ROLE, argv=["rltool", "serve-trainer"], url=url))
            proto = forward_proto(model, 1, tokens=[1, 2, 3], targets=[2, 3, 5])
            head = {"X-API-Key": "tml-a", "Content-Type": "application/x-protobuf"}
            await service.create_model("a", {"session_id": session, "model_seq_id": 0, "base_model": "base"})
            async with http.post(PREFIX + "forward_backward", data=proto, headers=head) as reply:
                number = int((await reply.json())["request_id"])
            assert "proto" in (await service.result("a", number, 5) or {})
            await service.save_weights("a", {"model_id": model, "seq_id": 3, "path": "s"})
            call = await service.on_model("a", "optim_step", model, 4, {"adam_params": {"beta3": 0.5}})
            assert "error" in (await service.result("a", call.number, 5) or {})
            wrong, own = {"model_id": "other", "seq_id": 1}, {"X-API-Key": "tml-a"}
            async with http.post(PREFIX + "optim_step", json=wrong, headers=own) as reply:
                assert reply.status == 404
            await asyncio.to_thread(say, "report", "lab")
            for key in ("Bearer tml-a", ""):
                assert (await http.get("/status", headers={"Authorization": key})).status == 401
            run = {"Authorization": "Bearer the-run"}
            async with http.get("/status", headers=run) as reply:
                status = await reply.json()
            async with http.get("/metrics", headers=run) as reply:
                metrics = await reply.text()
            await asyncio.to_thread(say, "top", "--once")
        running.cancel()
        await asyncio.wait({running})
        return status, metrics

    status, metrics = asyncio.run(scenario())
    page = (lab.path / "report.html").read_text()
    assert "there is no model &#x27;other&#x27;" in page and "beta3 is not supported" in page
    kinds = {kind: (counts["calls"], counts["failed"], counts["tokens"]) for kind, counts in status["calls"].items()}
    assert kinds == {
        "create_model": (1, 0, 0), "forward_backward": (1, 0, 3), "save_weights": (1, 0, 0), "optim_step": (1, 1, 0),
    }  # fmt: skip
    assert status["refused"] == {"a": 1} and 'rltool_served_refused_total{run="lab",client="a"} 1' in metrics
    assert status["models"] == {"a": 1} and status["waiting"] == {} and status["samples"] == 0
    assert 'rltool_served_call_tokens_total{run="lab",kind="forward_backward"} 3.0' in metrics
    assert 'rltool_served_calls_total{run="lab",kind="optim_step"} 1.0' in metrics
    assert 'rltool_served_models{run="lab",client="a"} 1' in metrics and status["queued_bytes"] == {}
    said = served_line(status)
    assert "9 bytes have not ended (a 9)" in served_line(status | {"queued_bytes": {"a": 9}})
    stalled = status | {"stalled": "calls wait for a disk", "running": ""}
    assert "; calls wait for a disk; " in served_line(stalled)
    top = Console(record=True, width=200, file=io.StringIO())
    top.print(served_frame("lab", stalled))
    assert "served trainer lab: calls wait for a disk" in top.export_text()
    assert said.startswith("4 calls done (") and "with 3 tokens" in said and "1 models (a 1)" in said
    rows = [re.split(r"\s*[│┃]\s*", line.strip("│┃ ")) for line in capsys.readouterr().out.splitlines()]
    shown = {row[0]: row[1:] for row in rows}
    assert shown["optim_step"][:2] == ["1", "1"] and shown["forward_backward"][3] == "3"
    kept = status["result_bytes"]["a"]
    assert kept > 0 and f'rltool_served_result_bytes{{run="lab",client="a"}} {kept}' in metrics
    assert shown["a"] == ["1", "0", "0", "0", str(kept)] and ["served trainer lab: waits for calls"] in rows


class Engines:
    """In place of PolicyEngines: what they hold is what the trainer holds when they are sent it."""

    def __init__(self, trainer: PlainTrainer, fresh: torch.Tensor) -> None:
        self.trainer, self.now = trainer, fresh
        self.sent, self.fails, self.weights, self.engines, self.fleet = [], 0, self, self, self
        self.policy, self.probe_seconds, self.guard = self, 0.001, self

    async def attempt(self, step: int) -> Any:
        if self.fails:
            self.fails -= 1
            return None
        weights = self.trainer.held if self.trainer.held is not None else self.now
        await asyncio.sleep(0)
        self.sent.append((step, float(weights[0, 0])))
        return SimpleNamespace(line=lambda: "sent")

    async def start(self) -> None: ...
    async def close(self) -> None: ...
    async def leave(self) -> dict[str, str]:
        return {}

    def log(self, line: str) -> None: ...
    def check(self) -> None: ...
    def members(self, *_: Any) -> tuple[Any, ...]:
        return ()


def test_requests_of_different_weights_take_turns_at_the_engines_and_none_runs_beside_another(tmp_path):
    async def case() -> None:
        service, trainer = make(tmp_path / "served")
        running = asyncio.create_task(service.run())
        paths = [tmp_path / name for name in ("base", "one", "two")]
        for number, path in enumerate(paths):
            path.mkdir()
            torch.save({"weights": torch.full((1, 1), float(number))}, path / "state.pt")
        engines = Engines(trainer, torch.full((1, 1), 9.0))
        held = PublishedWeights(engines, trainer, service, paths[0])
        inside: list[int] = []
        most: list[int] = []

        async def request(number: int) -> None:
            async with held.using(paths[number] if number else None):
                inside.append(number)
                assert set(inside) == {number}, "of one version at a time"
                assert engines.sent[-1][1] == number and trainer.held is None
                most.append(len(inside))
                await asyncio.sleep(0.002)
                inside.remove(number)

        await asyncio.gather(*(request(number) for number in (0, 1, 0, 2, 1, 0, 2, 2)))
        assert [number for _, number in engines.sent] == [0, 1, 2] and max(most) == 3
        assert [step for step, _ in engines.sent] == [1, 2, 3]
        engines.fails = 2  # none takes them; the same version is tried again
        await request(1)
        assert engines.sent[3:] == [(4, 1.0)]
        cancelled = asyncio.create_task(request(2))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.wait({cancelled})
        await request(1)
        with pytest.raises(UsageError, match="weights are gone"):
            async with held.using(tmp_path / "none"):
                pass
        service.fresh = paths[2]
        async with held.using(paths[2]):
            assert engines.sent[-1][1] == 9.0, "the ranks' own, where they are those that were saved"
        await held.close()
        running.cancel()
        await asyncio.wait({running})

    asyncio.run(case())


def test_the_tables_of_the_docs_have_every_route_of_the_released_client():
    theirs = set(of_the_client("routes"))
    page = (Path(__file__).parents[3] / "docs" / "tinker-api.md").read_text()
    rows = re.findall(r"^\| `([A-Z]+ \S+)`", page, re.MULTILINE)
    ours = [re.sub("{[^}]*}", "{}", row.replace("/{kind}/{name}", "/{name}")) for row in rows]
    assert len(ours) == len(set(ours)), "a route is in one of the tables, once"
    assert set(ours) - theirs == {"POST unload_model"}, "the client still has the types of its answer"
    assert theirs <= set(ours)


def test_each_loss_of_the_released_client_is_computed_or_refused_by_name_at_the_call(tmp_path):
    theirs = set(of_the_client("losses"))
    assert theirs - set(LOSSES) == set(NOT_HERE) and set(LOSSES) <= theirs
    service, _ = make(tmp_path)
    server = TinkerServer(service, {"a": "tml-a"}, poll_seconds=5)
    policy = {"logprobs": [0.0] * 3, "advantages": [1.0] * 3}

    async def case() -> None:
        model = await made(service, "a")
        async with TestClient(TestServer(server.app())) as http:

            async def answer(seq: int, loss: str, **more: Any) -> tuple[int, Any]:
                inputs = policy if loss != "cross_entropy" else {}
                inputs = inputs | ({"sequence_ratio_mask": [0.0, 1.0, 1.0]} if loss == "gspo" else {})
                proto = forward_proto(model, seq, tokens=[1, 2, 3], targets=[2, 3, 5], loss=loss, **inputs, **more)
                head = {"X-API-Key": "tml-a", "Content-Type": "application/x-protobuf"}
                async with http.post(PREFIX + "forward_backward", data=proto, headers=head) as reply:
                    return reply.status, await reply.json()

            for seq, loss in enumerate(sorted(LOSSES), 1):
                clip = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2} if loss == "gspo" else {}
                status, promised = await answer(seq, loss, settings=clip)
                assert status == 200, promised
                assert "proto" in (await service.result("a", int(promised["request_id"]), 5) or {}), loss
            for loss in sorted(theirs - set(LOSSES)):
                status, refused = await answer(50, loss)
                assert status == 422 and f"loss {loss!r} is not supported: it {NOT_HERE[loss]}" in refused["error"]
            # A server that ran them would say so in client/config; with the id of one the call is this.
            status, refused = await answer(50, "custom", settings={"loss_id": "own"})
            assert status == 422 and "loss 'custom' is not supported" in refused["error"]
            status, refused = await answer(50, "ppo", settings={"beta": 1.0})
            assert status == 422 and "loss_fn_config has beta, which it does not read" in refused["error"]

    asyncio.run(running_on(service, case()))
    assert all(call.key.rpartition(":")[2] != "50" for call in Journal(tmp_path).calls.values())


def of_the_client(*arguments: str) -> Any:
    command = [str(clients_python()), str(Path(__file__).with_name("client_package.py")), *arguments]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def test_the_released_client_reads_what_is_encoded_here_and_what_it_encodes_is_read(tmp_path):
    sequences = (SampledTokens((1, 2, 3), (-0.5, -1.25, -2.0), "stop"), SampledTokens((7,), (-0.125,), "length"))
    prompt, nan = np.array([np.nan, -0.25], np.float32), float("nan")
    ids, logprobs = np.array([[-1, -1], [11, 12], [13, -1]]), np.array([[nan, nan], [-0.5, -1.0], [-0.25, nan]])
    table = Topk(ids, np.where(ids < 0, -np.inf, logprobs))
    none = Topk(ids[:1], np.full((1, 2), -np.inf))
    written = {
        "samples-plain": SampleOutput(sequences), "samples-prompt": SampleOutput(sequences[:1], prompt),
        "samples-topk": SampleOutput(sequences[:1], prompt, table), "samples-none": SampleOutput((), prompt[:1], none),
    }  # fmt: skip
    for name, output in written.items():
        (tmp_path / name).write_bytes(encode_samples(output))
    rows = tuple(np.array(each, np.float32) for each in ([-0.5, -0.25, -1.0], [-2.0]))
    output = StepOutput(rows, tuple(-each for each in rows), {"loss_sum": 3.75, "num_tokens": 4.0})
    (tmp_path / "output").write_bytes(encode_output(output))
    read = of_the_client("wire", str(tmp_path))
    assert read["samples-plain"] == {
        "sequences": [[[1, 2, 3], [-0.5, -1.25, -2.0], "stop"], [[7], [-0.125], "length"]], "prompt": None,
        "topk": None,
    }  # fmt: skip
    assert read["samples-prompt"]["prompt"] == [None, -0.25] and read["samples-prompt"]["topk"] is None
    assert read["samples-topk"]["topk"] == [None, [[11, -0.5], [12, -1.0]], [[13, -0.25]]]
    assert read["samples-none"] == {"sequences": [], "prompt": [None], "topk": [None]}
    shown, metrics = read["output"]
    assert [each["logprobs"] for each in shown] == [[-0.5, -0.25, -1.0], [-2.0]]
    assert shown[1]["elementwise_loss"] == [2.0] and metrics["loss:sum"] == 3.75
    request = decode_forward((tmp_path / "request").read_bytes())
    assert (request.model, request.seq, request.loss, request.backward) == ("m", 7, "ppo", True)
    [datum] = request.data
    assert datum.tokens.tolist() == [1, 2, 3] and datum.targets.tolist() == [2, 3, 4]
    assert datum.inputs["weights"].tolist() == [1.0, 0.5, 0.0] and request.settings == {"clip_low_threshold": 0.5}
    with pytest.raises(UsageError, match="is not a ForwardBackwardRequest"):
        decode_forward(b"\xff\xfe no message")
    picture = field(3, field(1, field(2, b"png")))  # a chunk that is no text
    with pytest.raises(UsageError, match="datum 0: model_input has a picture or sound"):
        decode_forward(field(1, b"m") + picture)
    for chunk in ({"type": "image", "data": "", "format": "png"}, {"type": "encoded_text"}):
        with pytest.raises(UsageError, match="prompt has a picture or sound"):
            parse_sample({"prompt": {"chunks": [chunk]}}, vocab_size=16, max_model_len=8)


def test_the_table_of_the_docs_has_every_route_of_the_server(tmp_path):
    service, _ = make(tmp_path)
    samples = Samples(Endless(), vocab_size=10, most=1)
    app = TinkerServer(service, {"a": "tml-a"}, samples=samples).app()
    routes = {f"{route.method} {route.resource.canonical}" for route in app.router.routes() if route.method != "HEAD"}
    page = (Path(__file__).parents[3] / "docs" / "tinker-api.md").read_text().partition("Answered with 404")[0]
    table = {f"{method} {PREFIX}{path}" for method, path in re.findall(r"^\| `([A-Z]+) (\S+)`", page, re.MULTILINE)}
    assert routes - {"GET /health", "* /{path}"} == table
