"""Sharded, over gloo, NCCL and CUDA IPC: each rank of the trainer sends what it holds to the workers that store it;
nothing is gathered.

Each rank hosts a store for each engine, over which its workers and the ranks agree on who sends what, once for each
connection (join): see rltool.engines.transfer.shards. A rank that cannot be reached is named.
"""

from __future__ import annotations

import base64
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  # public

from rltool.engines.transfer import ipc, nccl, shards, wire
from rltool.engines.types import Bucket, EngineInfo, HttpRequest
from rltool.errors import EngineError
from rltool.megatron.shards import OwnPart, held
from rltool.weights.memory import Memory
from rltool.weights.transport import (
    Backend,
    Receiver,
    Rendezvous,
    SenderOptions,
    SenderTransport,
    Transport,
    TransportError,
    Work,
)
from rltool.weights.transports import vllm
from rltool.weights.transports.gloo import VllmGlooControl
from rltool.weights.transports.ipc import IpcSender, VllmIpcControl
from rltool.weights.transports.nccl_sender import no_gpu
from rltool.weights.transports.nccl_vllm import PluginControl
from rltool.weights.transports.rendezvous import host_rendezvous

READ_SECONDS = 5.0
"""For workers to read why there is no plan, before the store goes."""


class Agreement:
    """A rank's store for one engine. sends: to each worker, once `plan` has returned."""

    def __init__(self, backend: Backend, receiver: Receiver, options: SenderOptions) -> None:
        assert options.part is not None, "weights.sharded"
        self.part: OwnPart = options.part
        self.workers = receiver.world_size
        self.sends: list[shards.Sends] = []
        self.sizes: list[int] = []
        """By bucket: of what workers are sent of it."""
        self._backend: Backend = backend
        self._receiver, self._options = receiver, options
        self._store: TCPStore | None = None

    @property
    def store(self) -> TCPStore:
        assert self._store is not None, "host comes first"
        return self._store

    def host(self, more: Mapping[str, str] | None = None) -> Rendezvous:
        """Opens the store. more: further keys and values that workers read there."""
        options = self._options
        address, self._store = host_rendezvous(self._receiver.url, options.config, options.deadline)
        for key, text in {shards.TENSORS: shards.buckets_text(self.part.whole_buckets), **(more or {})}.items():
            self._store.set(key, text)
        port, stores = self._store.port, {str(self.part.rank): (address, self._store.port)}
        ranks = self.part.layout.world_size
        return Rendezvous(
            self._backend, 1 + self.workers, options.group, address, port, stores=stores, store_ranks=ranks
        )

    def plan(self, *, by_reach: bool = False) -> None:
        """Blocks until all workers have said what they need, and by_reach which ranks they reach."""
        store, part, workers = self.store, self.part, range(self.workers)
        try:
            needs = [shards.parse_needs(store.get(shards.needs_key(worker))) for worker in workers]
            reach = [shards.parse_reach(store.get(shards.reach_key(worker))) for worker in workers if by_reach]
            planned = shards.plan_shards(
                part.whole_buckets, held(part.plan, part.layout), needs, part.layout.world_size, reach or None
            )
        except shards.ShardError as error:
            for worker in workers:
                store.set(shards.sends_key(worker), shards.sends_text([], str(error)))
            with suppress(RuntimeError):  # of a worker that has gone
                store.wait([shards.read_key(worker) for worker in workers], timedelta(seconds=READ_SECONDS))
            raise TransportError(str(error)) from error
        self.sends = [planned[part.rank, worker] for worker in workers]
        for worker, sends in enumerate(self.sends):
            store.set(shards.sends_key(worker), shards.sends_text(sends))
        dtypes = {meta.name: meta.dtype for bucket in part.whole_buckets for meta in bucket}
        self.sizes = [
            shards.sends_bytes([sends[number] for sends in self.sends], dtypes)
            for number in range(len(part.whole_buckets))
        ]

    def close(self) -> None:
        """A dropped store is closed by its destructor."""
        self._store = None


# -- messages


class MessageSender(SenderTransport):
    """See SenderTransport; its buckets are the rank's own parts of the plan's, and go as one message to each worker
    that stores some of it."""

    def __init__(self, backend: Backend, receiver: Receiver, options: SenderOptions) -> None:
        self._agreement, self._options = Agreement(backend, receiver, options), options
        self._aborted: str | None = None
        self._largest = self._sent = 0

    @property
    def memory(self) -> Memory:
        return Memory.on(self.device, self._largest * (2 if self.announced_ahead else 1))

    def host(self) -> Rendezvous:
        return self._agreement.host()

    def join(self, seconds: float) -> None:
        self.connect(seconds)
        self._agreement.plan()
        self.go_on()  # it may have been aborted while it was blocked: the engine is to join another one

    @abstractmethod
    def connect(self, seconds: float) -> None:
        """Blocks until the workers are there."""

    def begin(self, version: str, buckets: Sequence[Bucket]) -> None:
        self._numbers = {bucket: number for number, bucket in enumerate(buckets)}
        self.sent_bytes = self._sent = self._largest = 0

    def send(self, bucket: Bucket, flat: Tensor) -> Work:
        self.go_on()
        part, number = self._agreement.part, self._numbers[bucket]
        tensors, dtypes = dict(wire.split_flat(flat, bucket)), {meta.name: meta.dtype for meta in bucket}
        messages = []
        for worker, sends in enumerate(self._agreement.sends):
            if not (pieces := sends[number]):
                continue
            metas = shards.message_metas(pieces, dtypes)
            message = torch.empty(wire.bucket_bytes(metas), dtype=torch.uint8, device=flat.device)
            for piece, (_, place) in zip(pieces, wire.split_flat(message, metas), strict=True):
                place.copy_(piece.box.of(tensors[piece.name], part.boxes[piece.name]))
            messages.append((message, worker))
        size = sum(message.numel() for message, _ in messages)
        self.sent_bytes = self._sent = self._sent + size
        self._largest = max(self._largest, size)
        return self.post(messages)

    @abstractmethod
    def post(self, messages: Sequence[tuple[Tensor, int]]) -> Work:
        """Each to its worker. Until the work is done they are the transport's."""

    def finish(self) -> None: ...

    def go_on(self) -> None:
        if self._aborted is not None:
            raise TransportError(self._aborted)


class _Posted:
    """Side by side. The group's own timeout ends them."""

    def __init__(self, works: Sequence[Any], messages: Sequence[Any]) -> None:
        self._works, self._messages = works, messages  # gloo reads them until the works have ended

    def wait(self, seconds: float) -> None:
        for work in self._works:
            work.wait()
        self._messages = ()


class ShardedGlooSender(MessageSender):
    """A group for each pair of rank and engine, of which the rank is rank 0: one that fails takes no other with it. As
    with GlooSender, a blocked call ends with its timeout."""

    device = torch.device("cpu")

    def __init__(self, receiver: Receiver, options: SenderOptions) -> None:
        super().__init__("gloo-sharded", receiver, options)
        self._group: Any = None

    def connect(self, seconds: float) -> None:
        store, agreement = self._agreement.store, self._agreement
        self._group = wire.open_group(
            store.host, store.port, 0, 1 + agreement.workers, self._options.group, seconds, store=store
        )

    def post(self, messages: Sequence[tuple[Tensor, int]]) -> Work:
        return _Posted([self._group.send([message], 1 + worker, 0) for message, worker in messages], messages)

    def abort(self, reason: str) -> None:
        # The group stays: its destructor waits for what is in flight, and holds the GIL meanwhile.
        self._aborted = reason

    def close(self) -> None:
        """A dropped group is closed by its destructor."""
        self._group = None
        self._agreement.close()


class _InFlight:
    def __init__(self, sender: ShardedNcclSender, work: nccl.Work | None) -> None:
        self._sender, self._work = sender, work

    def wait(self, seconds: float) -> None:
        if self._work is not None:
            self._work.wait(seconds, check=self._sender.go_on)


class ShardedNcclSender(MessageSender):
    """One communicator of all ranks and all workers of an engine. Workers that wait for a message which never comes
    are free again at their own deadline."""

    announced_ahead = True

    def __init__(self, receiver: Receiver, options: SenderOptions) -> None:
        super().__init__("nccl-sharded", receiver, options)
        self.device = options.device
        self._library: nccl.NcclLibrary | None = None
        self._communicator: nccl.Communicator | None = None

    def host(self) -> Rendezvous:
        self._library = library = nccl.NcclLibrary()
        meeting = replace(self._agreement.host(), nccl_version=library.version())
        if self._agreement.part.rank:
            return meeting
        return replace(meeting, unique_id=base64.b64encode(library.unique_id()).decode())

    def connect(self, seconds: float) -> None:
        assert self._library is not None, "host comes first"
        agreement = self._agreement
        unique_id = base64.b64decode(agreement.store.get(shards.UNIQUE_ID), validate=True)
        part, ranks = agreement.part, agreement.part.layout.world_size
        self._communicator = nccl.Communicator(
            self._library, unique_id, ranks + agreement.workers, part.rank, self.device, seconds=self._options.deadline
        )
        self.go_on()  # or no one would abort it: an abort that came before has found none
        self._communicator.join(seconds)

    def post(self, messages: Sequence[tuple[Tensor, int]]) -> Work:
        if self._communicator is None:
            raise TransportError("its transfer group has been left")
        if not messages:
            return _InFlight(self, None)
        first = self._agreement.part.layout.world_size
        return _InFlight(
            self, self._communicator.exchange([(message, first + worker) for message, worker in messages], ())
        )

    def abort(self, reason: str) -> None:
        self._aborted = reason or "aborted"
        if (communicator := self._communicator) is not None:
            communicator.abort(self._aborted)

    def close(self) -> None:
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.abort(self._aborted or "the transfer group was left")
        self._agreement.close()


# -- memory


class ShardedIpcSender(IpcSender):
    """A rank's part of each bucket lies in memory that it shares, and workers on GPUs of its host copy out of it what
    they store."""

    def __init__(self, receiver: Receiver, options: SenderOptions) -> None:
        self._agreement = Agreement("ipc-sharded", receiver, options)
        largest = max(map(wire.bucket_bytes, self._agreement.part.buckets), default=0)
        super().__init__(receiver, replace(options, largest_bucket=largest))
        self._sent = 0

    def host(self) -> Rendezvous:
        part = self._agreement.part
        self._buffer = ipc.ExportedBuffer(self._options.largest_bucket, self.device)
        memory = shards.Memory(self._options.gpu, ipc.host_id(), self._buffer.handle)
        lies = [{meta.name: part.boxes[meta.name] for meta in bucket} for bucket in part.buckets]
        more = {shards.MEMORY: shards.memory_text(memory), shards.LIES: shards.lies_text(lies)}
        return self._agreement.host(more)

    def join(self, seconds: float) -> None:
        self._agreement.plan(by_reach=True)

    def begin(self, version: str, buckets: Sequence[Bucket]) -> None:
        self.sent_bytes = self._sent = 0
        super().begin(version, buckets)

    def send(self, bucket: Bucket, flat: Tensor) -> IpcSender:
        super().send(bucket, flat)
        self.sent_bytes = self._sent = self._sent + self._agreement.sizes[self._filled - 1]
        return self

    def close(self) -> None:
        super().close()
        self._agreement.close()


# -- what the engine is asked


def _init(rendezvous: Rendezvous, rank_offset: int, timeout_seconds: float, **more: Any) -> list[HttpRequest]:
    """EngineError where a rank has no store: workers would take the ranks for fewer than they are."""
    if without := [rank for rank in range(rendezvous.store_ranks) if str(rank) not in rendezvous.stores]:
        raise EngineError(
            f"the trainer's rank {', '.join(map(str, without))} could not open its end of the transfer: is there a "
            "port for each rank and engine in weights.port_range, and room on its GPU?"
        )
    return [
        vllm.init_request(
            transport=rendezvous.transport,
            stores=[list(rendezvous.stores[rank]) for rank in sorted(rendezvous.stores, key=int)],
            rank_offset=rank_offset,
            world_size=rendezvous.world_size,
            group=rendezvous.group,
            timeout_seconds=timeout_seconds,
            **more,
        )
    ]


class ShardedGlooControl(VllmGlooControl):
    def init(self, rendezvous: Rendezvous, *, rank_offset: int, timeout_seconds: float) -> list[HttpRequest]:
        return _init(rendezvous, rank_offset, timeout_seconds)


class ShardedIpcControl(VllmIpcControl):
    def init(self, rendezvous: Rendezvous, *, rank_offset: int, timeout_seconds: float) -> list[HttpRequest]:
        return _init(rendezvous, rank_offset, timeout_seconds)


class ShardedNcclControl(PluginControl):
    def init(self, rendezvous: Rendezvous, *, rank_offset: int, timeout_seconds: float) -> list[HttpRequest]:
        own = {"unique_id": rendezvous.unique_id, "nccl_version": rendezvous.nccl_version}
        return _init(rendezvous, rank_offset, timeout_seconds, **own)


def obstacle(info: EngineInfo, trainer_device: str) -> str | None:
    return vllm.without_plugin(info, "cannot be sent sharded weights: its backend is")


def _nccl_obstacle(info: EngineInfo, trainer_device: str) -> str | None:
    return obstacle(info, trainer_device) or no_gpu(info, trainer_device)


def _ipc_obstacle(info: EngineInfo, trainer_device: str) -> str | None:
    if (why := obstacle(info, trainer_device)) is not None or (trainer_device == "cuda" and info.device != "cpu"):
        return why
    return 'cannot be sent weights over ipc, for which trainer and engine need GPUs: leave weights.transport at "auto"'


GLOO = Transport(ShardedGlooSender, ShardedGlooControl(), obstacle, senders="owners")
NCCL = Transport(ShardedNcclSender, ShardedNcclControl(), _nccl_obstacle, senders="owners")
IPC = Transport(ShardedIpcSender, ShardedIpcControl(), _ipc_obstacle, senders="owners")
