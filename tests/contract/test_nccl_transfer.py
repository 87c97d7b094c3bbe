"""Weights over NCCL into fake engines: the trainer's classes, real HTTP, and real bytes through a fake NCCL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import pytest
import torch

from rltool.config.rollout import WeightsConfig
from rltool.engines.client import EngineClient
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.transfer.wire import meta_of, plan_buckets
from rltool.errors import EngineError
from rltool.weights.send.sender import SendReport, WeightSender
from rltool.weights.transport import Receiver, choose, transport
from rltool.weights.transports import nccl_sender
from tests.contract.fakes import nccl as fake_nccl
from tests.contract.fakes.sglang import EXPECTED_KEY, FakeSglang
from tests.contract.fakes.vllm import FakeVllm
from tests.ranks import plan_of

TENSORS = {
    "a.weight": torch.arange(12.0).reshape(3, 4).to(torch.bfloat16),
    "b.weight": torch.arange(40, dtype=torch.bfloat16),
    "c.weight": torch.full((9,), 0.25, dtype=torch.bfloat16),
    "router.bias": torch.arange(5.0),
    "d.weight": torch.arange(30, dtype=torch.bfloat16).reshape(5, 6).t(),
    "e.weight": torch.ones(2, dtype=torch.bfloat16),
}
"""Two dtypes, a tensor that is not contiguous, and several buckets at LIMIT bytes."""
LIMIT = 60
GROUP = "test-group"
SECONDS = 3.0


@pytest.fixture(autouse=True)
def nccl_of_this_process(monkeypatch) -> None:
    fake_nccl.installed(monkeypatch)
    monkeypatch.setattr(nccl_sender, "COMPLETE_SECONDS", 0.5)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class Link:
    """The trainer and one engine."""

    def __init__(self, client: EngineClient, engine: Any, tmp_path: Any) -> None:
        self.client, self.engine = client, engine
        key = tmp_path / "key"
        key.write_text(EXPECTED_KEY)
        kind = "sglang" if isinstance(engine, FakeSglang) else "vllm"
        self.endpoint = EngineEndpoint(url=engine.url, dialect=kind, key_file=key)
        self.config = WeightsConfig(bucket_bytes=LIMIT)
        self.sender = WeightSender(
            self.config, plan_of(TENSORS), device=torch.device("cpu"), deadline=SECONDS, model_files=tmp_path / "model"
        )
        self.directory = tmp_path

    async def run(self, requests: Any) -> None:
        await self.client.run(self.endpoint, requests, timeout=2 * SECONDS)

    async def connect(self) -> None:
        info = await self.client.probe(self.endpoint)
        backend = choose(info, self.config, "cuda")
        self.control = transport(info.dialect, backend).control
        await self.run(self.control.leave(GROUP))
        receiver = Receiver(self.engine.url, info.dialect, backend, info.world_size)
        meeting = self.sender.host([receiver], GROUP, self.directory)
        joining = asyncio.create_task(asyncio.to_thread(self.sender.join))
        if not meeting:
            raise EngineError(str(await joining))
        self.meeting = meeting[self.engine.url]
        await self.run(self.control.init(self.meeting, rank_offset=1, timeout_seconds=SECONDS))
        assert await joining == {}

    async def sync(self, tensors: Mapping[str, torch.Tensor], version: str, stream: Any = None) -> SendReport:
        metas = [meta_of(name, tensor) for name, tensor in tensors.items()]
        buckets = plan_buckets(metas, LIMIT)
        stream = stream or zip(metas, tensors.values(), strict=True)
        await self.run(self.control.begin())
        announced = self.control.announce(buckets, self.meeting, version=version)
        assert sum(count for _, count in announced) == len(buckets)
        sending = asyncio.create_task(asyncio.to_thread(self.sender.send, stream, version, [self.engine.url]))
        try:
            await self.run([request for request, _ in announced])
        except EngineError as error:
            self.sender.abort([self.engine.url], str(error))
            await sending
            raise
        report = await sending
        if not report.failures:
            await self.run(self.control.finish(version))
        return report


@asynccontextmanager
async def link(engine: Any, tmp_path: Any) -> AsyncIterator[Link]:
    async with EngineClient() as client:
        made = Link(client, engine, tmp_path)
        await made.connect()
        try:
            yield made
        finally:
            made.sender.close()


def engine_of(kind: str, stack: ExitStack, workers: int = 1) -> Any:
    if kind == "sglang":
        return stack.enter_context(FakeSglang(tp=workers))
    engine = FakeVllm(key=EXPECTED_KEY, plugin=kind == "plugin")
    engine.world_size, engine.device = workers, "cuda"
    engine.forget()
    return stack.enter_context(engine)


def held(engine: Any) -> dict[str, torch.Tensor]:
    if isinstance(engine, FakeSglang):
        named = {name: torch.frombuffer(bytearray(raw), dtype=torch.uint8) for name, raw in engine.weights.items()}
        return {n: raw.view(TENSORS[n].dtype).reshape(TENSORS[n].shape) for n, raw in named.items()}
    return engine.tensors


def version_of(engine: Any) -> str:
    return engine.weight_version if isinstance(engine, FakeSglang) else engine.version


def assert_holds(engine: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    found = held(engine)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def scaled(factor: float) -> dict[str, torch.Tensor]:
    return {name: tensor * factor for name, tensor in TENSORS.items()}


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("kind", ["stock", "plugin", "sglang"])
def test_every_worker_gets_every_byte_at_every_sync(kind, workers, stack, tmp_path):
    engine = engine_of(kind, stack, workers)

    async def run() -> None:
        async with link(engine, tmp_path) as to:
            for number in range(3):
                report = await to.sync(scaled(number + 1), f"v{number}")
                assert report.failures == {} and report.bytes == sum(t.nbytes for t in TENSORS.values())
                assert_holds(engine, scaled(number + 1))
                assert version_of(engine) == f"v{number}"

    asyncio.run(run())


def test_a_stock_vllm_is_asked_once_for_each_run_of_one_dtype(stack, tmp_path):
    engine = engine_of("stock", stack)

    async def run() -> None:
        async with link(engine, tmp_path) as to:
            await to.sync(TENSORS, "v0")

    asyncio.run(run())
    updates = [r.body["update_info"]["names"] for r in engine.requests if r.path == "/update_weights"]
    assert updates == [["a.weight", "b.weight", "c.weight"], ["router.bias"], ["d.weight", "e.weight"]]


@pytest.mark.parametrize("kind", ["stock", "plugin", "sglang"])
def test_a_trainer_that_fails_half_way_leaves_no_worker_waiting(kind, stack, tmp_path):
    """The broadcasts that the engine waits for are made with other bytes, and the version is not given."""
    engine = engine_of(kind, stack)

    def broken() -> Iterator[Any]:
        for number, (name, tensor) in enumerate(scaled(2).items()):
            if number == 2:
                raise OSError("planned")
            yield meta_of(name, tensor), tensor

    async def run() -> None:
        async with link(engine, tmp_path) as to:
            await to.sync(TENSORS, "v0")
            with pytest.raises(OSError, match="planned"):  # and not a request that the engine never answers
                await to.sync(TENSORS, "v1", broken())
            assert version_of(engine) != "v1"
            await to.connect()
            assert (await to.sync(scaled(3), "v2")).failures == {}
            assert_holds(engine, scaled(3))

    asyncio.run(run())


def test_what_a_failed_update_left_in_a_stock_vllm_does_not_get_into_the_next(stack, tmp_path):
    engine = engine_of("stock", stack)

    async def run() -> None:
        async with link(engine, tmp_path) as to:
            engine.native.refuse = "d.weight"
            with pytest.raises(EngineError, match=r"d\.weight"):
                await to.sync(TENSORS, "v0")
            await to.connect()
            await to.sync(scaled(2), "v1")
            assert_holds(engine, scaled(2))

    asyncio.run(run())


def test_an_update_that_its_trainer_left_open_is_closed_by_the_next_trainer(stack, tmp_path):
    engine = engine_of("stock", stack)

    async def run() -> None:
        async with link(engine, tmp_path) as to:
            await to.run(to.control.begin())
        async with link(engine, tmp_path) as to:
            await to.sync(TENSORS, "v0")
            assert_holds(engine, TENSORS)

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["stock", "plugin"])
def test_an_engine_that_never_joins_is_given_up_at_the_deadline(kind, stack, tmp_path):
    engine = engine_of(kind, stack)

    async def run() -> None:
        async with EngineClient() as client:
            to = Link(client, engine, tmp_path)
            to.sender.deadline = 0.2
            info = await client.probe(to.endpoint)
            backend = choose(info, to.config, "cuda")
            to.sender.host([Receiver(engine.url, info.dialect, backend, 1)], GROUP, tmp_path)
            failures = await asyncio.to_thread(to.sender.join)
            assert "0.2 s" in failures[engine.url]

    asyncio.run(run())


def test_a_trainer_with_an_old_nccl_says_so_before_it_asks_a_stock_vllm_to_join(stack, tmp_path, monkeypatch):
    engine = engine_of("stock", stack)
    monkeypatch.setattr(fake_nccl.FakeLibrary, "number", 22809)

    async def run() -> None:
        async with link(engine, tmp_path):
            pass

    with pytest.raises(
        EngineError, match=r"need NCCL 2\.29\.0 or newer, this process loads NCCL 2\.28\.9.*VLLM_NCCL_SO_PATH"
    ):
        asyncio.run(run())
    assert "/init_weight_transfer_engine" not in engine.paths()
