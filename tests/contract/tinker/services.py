"""A service over a plain trainer, in tests: made, driven, disturbed."""

from __future__ import annotations

import asyncio
import base64
import math
import os
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rltool.tinker.books as books_module
import rltool.tinker.service as service_module
from rltool.errors import UsageError
from rltool.tinker.journal import Call
from rltool.tinker.limits import Limits
from rltool.tinker.sampling import SampleRequest
from rltool.tinker.service import Service
from rltool.tinker.wire import SampleOutput
from tests.contract.tinker.plain_trainer import PlainTrainer
from tests.contract.tinker.protos import forward_proto


class Endless:
    """Samples that no engine ends."""

    max_model_len, at_once = 8, 16

    async def sample(self, asked: SampleRequest, weights: Path | None) -> SampleOutput:
        await asyncio.Event().wait()
        raise AssertionError


def make(directory: Path, *, snapshot_every: int = 3, **limits: Any) -> tuple[Service, PlainTrainer]:
    trainer = PlainTrainer()
    return Service(directory, trainer, "base", limits=Limits(**limits), snapshot_every=snapshot_every), trainer


async def forward(service: Service, client: str, model: str, seq: int, *, seed: int = 0) -> Any:
    proto = forward_proto(model, seq, tokens=[1, 2, 3 + seed], targets=[2, 3 + seed, 5])
    return await service.on_model(client, "forward_backward", model, seq, {"proto": base64.b64encode(proto).decode()})


class OnlyOne(PlainTrainer):
    """Trains all weights, of one model at a time, as ranks do."""

    def create(self, name: str, adapter: Any, seed: int) -> None:
        if self.models:
            raise UsageError(f"model {next(iter(self.models))!r} trains all weights")
        super().create(name, adapter, seed)


def only_one(directory: Path, **limits: Any) -> tuple[Service, PlainTrainer]:
    trainer = OnlyOne()
    return Service(directory, trainer, "base", limits=Limits(rank=0, **limits), snapshot_every=100), trainer


@contextmanager
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """[0]: seconds that the services' clock is ahead."""
    ahead, time = [0.0], service_module.time
    shifted = SimpleNamespace(
        monotonic=lambda: time.monotonic() + ahead[0], time=time.time, perf_counter=time.perf_counter
    )
    with monkeypatch.context() as patch:
        for module in (service_module, books_module):
            patch.setattr(module, "time", shifted)
        patch.setattr(service_module, "STALL_SECONDS", math.inf)
        yield ahead


async def running_on(service: Service, work: Awaitable[Any]) -> Any:
    running = asyncio.create_task(service.run())
    await asyncio.sleep(0)  # from here on it watches for stalls
    while any(each.last > service._done.get(name, -1) for name, each in service._models.items()):
        await asyncio.sleep(0.001)  # what was done before is done again
    try:
        return await work
    finally:
        running.cancel()
        await asyncio.wait({running})
        service.close()


async def made(service: Service, client: str, session: str | None = None, number: int = 0) -> str:
    """A model that the trainer has."""
    session = session or await service.open_session(client)
    body = {"session_id": session, "model_seq_id": number, "base_model": "base"}
    call = await service.create_model(client, body)
    assert "error" not in (await service.result(client, call.number, 5) or {"error": "none"}), call
    return call.model


@contextmanager
def full_disk(monkeypatch: pytest.MonkeyPatch, *only: str) -> Iterator[None]:
    """Writes to files of the journal of these names, or all, fail after half of the bytes; the first time the file
    cannot be cut back either."""
    write, truncate, failing = os.write, os.ftruncate, [True]

    def is_full(file: int) -> bool:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{file}"))
        return name.endswith(".jsonl") and (not only or name in only)

    def half(file: int, data: bytes) -> int:
        if not is_full(file):
            return write(file, data)
        write(file, data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    def cut(file: int, size: int) -> None:
        if is_full(file) and failing:
            failing.clear()
            raise OSError(5, "Input/output error")
        truncate(file, size)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half)
        patch.setattr(os, "ftruncate", cut)
        yield


async def model_of(service: Service, client: str) -> str:
    session = await service.open_session(client)
    call = await service.create_model(client, {"session_id": session, "model_seq_id": 0, "base_model": "base"})
    return call.model


async def is_done(service: Service, call: Call) -> None:
    while not service._is_done(call) or call.number not in service._journal.results:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.005)  # and in the books


async def save(service: Service, model: str, seq: int, name: str, **more: Any) -> None:
    call = await service.save_weights("a", {"model_id": model, "seq_id": seq, "path": name, **more})
    assert "path" in (await service.result("a", call.number, 5) or {})


def names(service: Service, model: str) -> list[str]:
    return [each.path.name for each in service.saved(model)]
