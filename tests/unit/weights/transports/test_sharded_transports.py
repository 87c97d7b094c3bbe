"""Sharded syncs over every transport: real senders and the plugin's own channels in threads, a mixture of experts cut
in several ways. CUDA's handles and NCCL are the tests' own."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from rltool.config.parallel import ParallelLayout
from rltool.config.rollout import WeightsConfig
from rltool.engines.plugin.channels import ChannelError
from rltool.engines.plugin.sharded import Info, ShardedChannel, ShardedGlooChannel, ShardedIpcChannel, open_shards
from rltool.engines.transfer import ipc, nccl, shards
from rltool.engines.transfer.shards import Box
from rltool.engines.transfer.wire import bucket_bytes
from rltool.engines.types import Bucket
from rltool.errors import EngineError
from rltool.megatron.export_plan import full_plan
from rltool.megatron.shards import OwnPart
from rltool.weights.send.sender import Rank, SendReport, WeightSender, one_meeting, one_report
from rltool.weights.transport import Receiver, TransportError, transport
from rltool.weights.transports import sharded, sharded_disk
from rltool.weights.transports.disk import version_directory
from tests.contract.fakes import ipc as fake_ipc
from tests.contract.fakes import nccl as fake_nccl
from tests.unit.megatron.test_shards import family_of

CPU = torch.device("cpu")
SECONDS = 20.0
BUCKET_BYTES = 3000
URL = "http://127.0.0.1:1"
BACKENDS = ["gloo-sharded", "nccl-sharded", "ipc-sharded", "disk-sharded"]
LAYOUTS = {
    "tp 2 to tp 1": (ParallelLayout(2, tp=2), 1),
    "tp 2 to tp 2": (ParallelLayout(2, tp=2), 2),
    "tp 2 to tp 4": (ParallelLayout(2, tp=2), 4),
    "tp 1 to tp 2": (ParallelLayout(1), 2),
    "pp 2 to tp 2": (ParallelLayout(2, pp=2), 2),
    "ep 2 to tp 2": (ParallelLayout(2, ep=2), 2),
    "dp 2 to tp 2": (ParallelLayout(2), 2),
    "tp 2, pp 2, ep 2 to tp 2": (ParallelLayout(8, tp=2, pp=2, ep=2), 2),
}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch) -> Any:
    fake_ipc.installed(monkeypatch)
    fake_nccl.installed(monkeypatch)
    yield
    assert fake_ipc.SharedExport.live == set(), "every buffer is freed"


class Sync:
    """Ranks of this layout, each on a GPU of its own, and an engine of tensor-parallel workers on the first ones."""

    def __init__(self, backend: Any, layout: ParallelLayout, workers: int, directory: Path) -> None:
        self.backend, self.layout, self.workers, self.directory = backend, layout, workers, directory
        family = family_of("Qwen3MoeForCausalLM", layers=4)
        config = WeightsConfig(sharded=True, bucket_bytes=BUCKET_BYTES)
        self.senders = [
            WeightSender(
                config, full_plan(family, torch.float32), device=CPU, deadline=SECONDS, model_files=directory,
                rank=Rank(rank, f"gpu-{rank}", layout),
            )
            for rank in range(layout.world_size)
        ]  # fmt: skip
        self.plan = self.senders[0].plan
        self.cuts = [
            OwnPart(self.plan, ParallelLayout(workers, tp=workers), worker, BUCKET_BYTES) for worker in range(workers)
        ]
        self.buckets = self.plan.buckets(BUCKET_BYTES)
        self.control = transport("vllm", backend).control
        self.pool = ThreadPoolExecutor(layout.world_size + workers)
        self.channels: list[ShardedChannel] = []

    def weights(self, number: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        return {meta.name: torch.randn(meta.shape, generator=generator) for meta in self.plan.tensors}

    def connect(self, needs_of: Any = None) -> None:
        receiver = Receiver(URL, "vllm", self.backend, self.workers)
        meetings = [sender.host([receiver], "g", self.directory) for sender in self.senders]
        self.meeting = one_meeting(meetings)[URL]
        joining = [self.pool.submit(sender.join) for sender in self.senders]
        self.opening = [self.pool.submit(self.open, worker, needs_of) for worker in range(self.workers)]
        self.failures = [each.result(2 * SECONDS) for each in joining]
        self.channels = [each.result(2 * SECONDS) for each in self.opening if each.exception(2 * SECONDS) is None]

    def open(self, worker: int, needs_of: Any) -> ShardedChannel:
        [request] = self.control.init(self.meeting, rank_offset=1, timeout_seconds=SECONDS)
        blank = {name: getattr(Info, name, None) for name in Info.__annotations__}
        info: Any = SimpleNamespace(**blank | json.loads(json.dumps(request.body))["init_info"])

        def needs(buckets: Any) -> dict[str, list[Box]]:
            assert buckets == self.buckets
            return {name: [box] for name, box in self.cuts[worker].boxes.items()}

        return open_shards(info, 1 + worker, CPU, lambda: f"gpu-{worker}", needs_of or needs)

    def send(self, rank: int, weights: dict[str, torch.Tensor], version: str) -> SendReport:
        sender = self.senders[rank]
        part = sender.part
        assert part is not None
        local = {
            e.parameter.name: e.parameter.shard(
                e.parameter.merge([weights[name] for name, _ in e.parameter.hf]), part.tp_rank, self.layout.tp
            )
            for e in part.exports
        }
        return sender.send(part.tensors(local), version, [URL])

    def update(self, number: int) -> SendReport:
        """As the rollout manager has it done; every worker's boxes are compared."""
        weights, version = self.weights(number), f"{'a' * 32}:0:{number}"
        sending = [self.pool.submit(self.send, rank, weights, version) for rank in range(self.layout.world_size)]
        if self.control.after_send:
            wait(sending, SECONDS)
        taken = 0
        for request, count in self.control.announce(self.buckets, self.meeting, version=version):
            self.acknowledge(version, taken)
            for bucket in self.buckets[taken : taken + count]:
                self.take(bucket, weights, (request.body or {})["update_info"].get("path"))
            taken += count
        assert taken == len(self.buckets)
        self.acknowledge(version, taken)
        return one_report([each.result(SECONDS) for each in sending])

    def acknowledge(self, version: str, taken: int) -> None:
        if self.control.acknowledged:
            asked = [self.pool.submit(s.ready, URL, version, taken, SECONDS) for s in self.senders]
            assert [each.result(SECONDS) for each in asked] == [None] * len(asked)

    def take(self, bucket: Bucket, weights: dict[str, torch.Tensor], path: str | None) -> None:
        asked = [ThreadPoolExecutor(1).submit(channel.receive_boxes, bucket, path) for channel in self.channels]
        for cut, each in zip(self.cuts, asked, strict=True):
            boxes = each.result(SECONDS)
            assert {name: list(found) for name, found in boxes.items()} == {m.name: [cut.boxes[m.name]] for m in bucket}
            for name, found in boxes.items():
                [(box, tensor)] = found.items()
                assert torch.equal(tensor, box.of(weights[name], Box.whole(weights[name].shape)))

    def needed(self, worker: int) -> int:
        return sum(map(bucket_bytes, self.cuts[worker].buckets))

    def close(self) -> None:
        for each in (*self.channels, *self.senders):
            each.close()
        self.pool.shutdown()


@pytest.fixture
def sync(request, tmp_path) -> Any:
    made: list[Sync] = []

    def make(backend: str, layout: str) -> Sync:
        made.append(Sync(backend, *LAYOUTS[layout], tmp_path))
        return made[0]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_worker_gets_the_bits_that_it_stores_and_the_ranks_share_the_bytes(sync, backend, layout):
    to = sync(backend, layout)
    to.connect()
    assert to.failures == [{}] * to.layout.world_size
    for number in (0, 1, 1):  # the same version once more, over the same connection
        report = to.update(number)
        assert report.failures == {}
        total = to.plan.bytes if backend == "disk-sharded" else sum(map(to.needed, range(to.workers)))
        assert sum(report.sent_bytes) == total
        ranks = to.layout.world_size
        assert ranks == 1 or max(report.sent_bytes) <= 0.7 * total, report.sent_bytes
        largest = max(bucket_bytes(bucket) for sender in to.senders for bucket in sender.part.buckets)
        assert report.memory.host <= (2 + 2 * to.workers) * largest


def test_of_replicas_a_worker_reads_the_memory_on_its_own_gpu_alone(sync):
    to = sync("ipc-sharded", "dp 2 to tp 2")
    to.connect()
    for worker, channel in enumerate(to.channels):
        assert isinstance(channel, ShardedIpcChannel)
        assert [any(sends) for sends in channel._sends] == [worker == 0, worker == 1]
    assert to.update(0).sent_bytes == (to.needed(0), to.needed(1))


def test_memory_on_another_host_is_refused_by_name_on_both_sides(sync, monkeypatch):
    hosts = iter(["here", "there", "here", "here"])  # of both ranks, and of the workers
    monkeypatch.setattr(ipc, "host_id", lambda: next(hosts))
    to = sync("ipc-sharded", "pp 2 to tp 2")
    to.connect()
    for failures in to.failures:
        assert "what rank 1 holds, on another host, whose memory CUDA IPC does not reach" in failures[URL]
    assert all("on another host" in str(each.exception()) for each in to.opening)


@pytest.mark.parametrize("backend", BACKENDS[:3])
def test_what_a_model_cannot_be_asked_for_is_named_on_both_sides(sync, backend):
    def needs_of(buckets: Any) -> Any:
        raise ValueError("its loader computes what it stores")

    to = sync(backend, "tp 2 to tp 1")
    to.connect(needs_of)
    for each in to.opening:
        with pytest.raises(ChannelError, match=r"weights\.sharded: its loader computes"):
            each.result()
    assert all("its loader computes" in failures[URL] for failures in to.failures)


@pytest.mark.parametrize("backend", ["nccl-sharded", "ipc-sharded"])
def test_an_abort_frees_a_rank_that_waits_for_the_workers(sync, backend):
    to = sync(backend, "tp 2 to tp 1")
    to.connect()
    sending = [to.pool.submit(to.send, rank, to.weights(0), f"{'a' * 32}:0:0") for rank in range(2)]
    for sender in to.senders:
        sender.abort([URL], "the engine died")
    assert [each.result(SECONDS).failures for each in sending] == [{URL: "the engine died"}] * 2
    assert all(sender.ready(URL, "v", 0, SECONDS) == "the engine died" for sender in to.senders)


def test_over_gloo_the_next_bucket_comes_while_one_is_loaded_and_no_other_is_taken_for_it(sync):
    to = sync("gloo-sharded", "tp 2 to tp 1")
    to.connect()
    [channel] = to.channels
    assert isinstance(channel, ShardedGlooChannel)
    weights = to.weights(0)
    sending = [to.pool.submit(to.send, rank, weights, f"{'a' * 32}:0:0") for rank in range(2)]
    to.take(to.buckets[0], weights, None)
    assert channel._ahead is not None
    number, coming = channel._ahead
    for _, work in coming:
        work.wait()
    assert number == 1 and len(coming) == 2
    with pytest.raises(ChannelError, match="bucket 2 was announced, and bucket 1 is on its way") as raised:
        channel.receive_boxes(to.buckets[2])
    assert raised.value.broken
    for sender in to.senders:
        sender.abort([URL], "the engine failed")
    assert [each.result(SECONDS).failures for each in sending] == [{URL: "the engine failed"}] * 2


def test_versions_that_could_not_be_written_do_not_fill_the_disk(sync, tmp_path, monkeypatch):
    def full(*_, **__) -> None:
        raise SafetensorError("No space left on device")

    to, version = sync("disk-sharded", "tp 2 to tp 1"), "a" * 32 + ":0:{}"
    to.connect()
    to.update(0)
    with monkeypatch.context() as failing:
        failing.setattr(sharded_disk, "save_file", full)
        for number in range(1, 5):
            for rank in range(2):
                report = to.send(rank, to.weights(number), version.format(number))
                assert "No space left" in report.failures[URL]
            assert len(list(tmp_path.iterdir())) <= 2, "the one before, and this one"
            to.connect()
    to.update(5)


@pytest.mark.parametrize("backend", BACKENDS[:3])
def test_an_engine_is_not_asked_to_join_where_a_rank_has_no_store(sync, backend, monkeypatch):
    def exhausted(*_: Any) -> Any:
        raise TransportError("no free port")

    to = sync(backend, "tp 2 to tp 1")
    receiver = Receiver(URL, "vllm", backend, to.workers)
    meetings = [to.senders[0].host([receiver], "g", to.directory)]
    monkeypatch.setattr(sharded, "host_rendezvous", exhausted)
    meetings.append(to.senders[1].host([receiver], "g", to.directory))
    with pytest.raises(EngineError, match=r"rank 1 could not open its end.*weights\.port_range"):
        to.control.init(one_meeting(meetings)[URL], rank_offset=1, timeout_seconds=SECONDS)
    assert "no free port" in to.senders[1].join()[URL]


def test_an_abort_that_comes_while_a_communicator_is_made_ends_its_join(sync, monkeypatch):
    to = sync("nccl-sharded", "tp 2 to tp 1")
    made = nccl.Communicator

    def aborted_meanwhile(*args: Any, **more: Any) -> Any:
        if (rank := args[3]) < to.layout.world_size:
            to.senders[rank]._channels[URL].transport.abort("the engine died")
        return made(*args, **more)

    monkeypatch.setattr(nccl, "Communicator", aborted_meanwhile)
    monkeypatch.setattr(fake_nccl.FakeCommunicator, "join", lambda *_, **__: pytest.fail("no one would end it"))
    to.connect(needs_of=lambda _: {})
    assert all("the engine died" in failures[URL] for failures in to.failures)


def test_what_was_written_has_an_index_and_old_versions_go(sync, tmp_path):
    to = sync("disk-sharded", "tp 2 to tp 2")
    to.connect()
    for number in range(4):
        to.update(number)
    left = [version_directory(tmp_path, f"{'a' * 32}:0:{number}") for number in (2, 3)]
    assert sorted(tmp_path.iterdir()) == left
    buckets, _ = shards.parse_index((left[0] / shards.INDEX).read_text())
    names = {f"slices-{rank:05d}-of-00002-{n:05d}.safetensors" for rank in range(2) for n in range(len(buckets))}
    assert {each.name for each in left[0].iterdir()} == {shards.INDEX, *names} and buckets == to.buckets
    (left[1] / shards.slices_file(1, 2, 0)).unlink()
    with pytest.raises(ChannelError, match="slices-00001-of-00002-00000.*each rank of the trainer, must see") as raised:
        to.channels[0].receive_boxes(buckets[0], str(left[1]))
    assert not raised.value.broken
    with pytest.raises(ChannelError, match="none of those in"):
        to.channels[0].receive_boxes(buckets[0][:1], str(left[1]))


def test_memory_of_another_gpu_is_taken_for_the_workers_own():
    import ctypes

    theirs = torch.arange(10, dtype=torch.uint8)
    seen = ipc.peer_tensor(ctypes.c_void_p(theirs.data_ptr()), 6, CPU)
    theirs[2] = 77
    assert seen.tolist() == [0, 1, 77, 3, 4, 5] and seen.device == CPU
