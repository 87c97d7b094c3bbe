"""How buckets come into a worker over NCCL, with a fake NCCL between threads."""

from __future__ import annotations

import base64
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rltool.config.rollout import WeightsConfig
from rltool.engines.delta.memory import MemoryCopy
from rltool.engines.delta.messages import take
from rltool.engines.delta.rebuild import Rebuilt
from rltool.engines.plugin.channels import ChannelError, NcclChannel, read_bucket_file, receive_bytes
from rltool.engines.transfer import nccl
from rltool.engines.types import TensorMeta
from rltool.weights.delta.encoder import DeltaEncoder
from rltool.weights.transport import Receiver, SenderOptions
from rltool.weights.transports import nccl_sender
from rltool.weights.transports.delta_group import NcclDeltaSender
from tests.contract.fakes import nccl as fake_nccl

CPU = torch.device("cpu")
BUCKETS = [(TensorMeta(name, "uint8", (size,)),) for name, size in (("a", 3), ("b", 5), ("empty", 0), ("c", 4))]
SECONDS = 60.0


@pytest.fixture
def both(monkeypatch) -> tuple[Any, NcclChannel]:
    """The trainer's communicator and the worker's channel, joined."""
    fake_nccl.installed(monkeypatch)
    unique_id = fake_nccl.FakeLibrary().unique_id()
    trainer = nccl.Communicator(nccl.NcclLibrary(), unique_id, 2, 0, CPU, seconds=SECONDS)
    joining = threading.Thread(target=trainer.join, args=(SECONDS,))
    joining.start()
    worker = channel(unique_id)
    joining.join()
    return trainer, worker


def channel(unique_id: bytes, *, version: int = fake_nccl.VERSION, seconds: float = SECONDS) -> NcclChannel:
    return NcclChannel(unique_id, trainer_version=version, rank=1, world_size=2, device=CPU, timeout_seconds=seconds)


def bytes_of(number: int, bucket: Any) -> torch.Tensor:
    return torch.full((bucket[0].shape[0],), number, dtype=torch.uint8)


def send(trainer: Any, numbers: list[int]) -> list[Any]:
    return [trainer.broadcast(bytes_of(n, BUCKETS[n])) for n in numbers if BUCKETS[n][0].shape[0]]


def test_buckets_come_in_order_and_one_without_bytes_is_not_waited_for(both):
    trainer, worker = both
    send(trainer, [0, 1, 2, 3])
    arrived = list(worker.receive(BUCKETS))
    assert [bucket for bucket, _ in arrived] == BUCKETS
    assert all(torch.equal(flat, bytes_of(n, BUCKETS[n])) for n, (_, flat) in enumerate(arrived))


def test_the_next_bucket_is_awaited_while_one_is_loaded(both):
    trainer, worker = both
    send(trainer, [0])
    arriving = worker.receive(BUCKETS)
    assert next(arriving)[0] == BUCKETS[0]
    (second,) = send(trainer, [1])
    assert next(arriving)[0] == BUCKETS[1]
    second.wait(SECONDS)
    arriving.close()


def test_a_bucket_that_cannot_be_loaded_ends_the_channel(both):
    trainer, worker = both
    send(trainer, [0])
    with pytest.raises(KeyError), closing(worker.receive(BUCKETS)) as arriving:  # noqa: PT012  # its own last line
        for _ in arriving:
            raise KeyError
    with pytest.raises(ChannelError, match="the transfer group was left"):
        list(worker.receive(BUCKETS))


def test_a_trainer_that_sends_nothing_is_given_up(monkeypatch, both):
    _, worker = both
    monkeypatch.setattr(worker, "_seconds", 0.01)
    with pytest.raises(ChannelError, match=r"took longer than 0\.01 s") as raised:
        list(worker.receive(BUCKETS))
    assert raised.value.broken


def test_another_nccl_than_the_trainers_is_refused_before_anybody_waits(monkeypatch):
    fake_nccl.installed(monkeypatch)
    with pytest.raises(nccl.NcclError, match=r"the trainer has NCCL 2\.28\.9, the engine NCCL 2\.29\.7"):
        channel(bytes(128), version=22809)


class Delta:
    """A trainer that sends messages over NCCL, and the worker's own channel."""

    def __init__(self, monkeypatch: Any) -> None:
        fake_nccl.installed(monkeypatch)
        monkeypatch.setattr(nccl_sender, "COMPLETE_SECONDS", 0.1)
        self.encoder, self.copy = DeltaEncoder(anchor_every=10, kept=2), MemoryCopy()
        options = SenderOptions("g", WeightsConfig(), CPU, SECONDS, Path(), Path(), encoder=self.encoder)
        self.sender = NcclDeltaSender(Receiver("http://e:1", "vllm", "nccl-delta", 1), options)
        meeting = self.sender.host()
        joining = threading.Thread(target=self.sender.join, args=(SECONDS,))
        joining.start()
        self.worker = channel(base64.b64decode(meeting.unique_id or ""))
        joining.join()

    def send(self, number: int) -> None:
        version, flats = f"{'0' * 32}:0:{number}", [bytes_of(number + n, bucket) for n, bucket in enumerate(BUCKETS)]
        self.encoder.begin(version, BUCKETS)
        self.sender.begin(version, BUCKETS)
        for bucket, flat in zip(BUCKETS, flats, strict=True):
            self.encoder.add(bucket, flat)
            self.sender.send(bucket, flat).wait(SECONDS)
        self.encoder.finish()
        self.sender.finish()

    def taking(self, number: int) -> Future[Rebuilt]:
        receive = partial(receive_bytes, self.worker)
        return ThreadPoolExecutor(1).submit(take, self.copy, receive, BUCKETS, f"{'0' * 32}:0:{number}")


def test_versions_come_as_messages_over_the_channel_of_whole_weights(monkeypatch):
    delta = Delta(monkeypatch)
    for number in range(3):
        taken = delta.taking(number)
        delta.send(number)
        assert taken.result(SECONDS).anchor == (number == 0)
        held = {bucket[0].name: flat for bucket, flat in delta.copy.buckets()}
        assert all(torch.equal(held[b[0].name], bytes_of(number + n, b)) for n, b in enumerate(BUCKETS))


def test_a_worker_that_waits_for_a_message_is_freed_when_the_group_is_left(monkeypatch):
    delta = Delta(monkeypatch)
    taken = delta.taking(0)
    delta.sender.abort("the trainer failed")
    delta.sender.close()
    delta.worker.close()
    with pytest.raises(ChannelError, match="the transfer group was left"):
        taken.result(SECONDS)


def test_a_file_must_hold_exactly_what_was_announced(tmp_path: Path):
    path = tmp_path / "bucket.safetensors"
    save_file({"a": torch.zeros(3, dtype=torch.uint8)}, path)
    [(name, tensor)] = read_bucket_file(BUCKETS[0], str(path))
    assert name == "a" and tensor.shape == (3,)
    for other in (BUCKETS[1], (*BUCKETS[0], *BUCKETS[1]), (TensorMeta("a", "uint8", (4,)),)):
        with pytest.raises(ChannelError, match="does not hold what was announced"):
            read_bucket_file(other, str(path))
    with pytest.raises(ChannelError, match="cannot read .*the engine must see the trainer's file system"):
        read_bucket_file(BUCKETS[0], str(tmp_path / "absent"))
