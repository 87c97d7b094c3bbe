"""gloo, sharded: each rank of the trainer sends what it holds to the workers that store it; nothing is gathered.

A group for each pair of rank and engine, of which the rank is rank 0 and hosts the store: one that cannot be reached is
named, and takes no other group with it. Who sends what is planned once for each connection (join): see
rltool.engines.transfer.shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  # public

from rltool.engines.transfer import shards, wire
from rltool.engines.types import Bucket, EngineInfo, HttpRequest
from rltool.megatron.shards import held
from rltool.weights.memory import Memory
from rltool.weights.transport import Receiver, Rendezvous, SenderOptions, SenderTransport, Transport, TransportError
from rltool.weights.transports import vllm
from rltool.weights.transports.gloo import VllmGlooControl
from rltool.weights.transports.rendezvous import host_rendezvous


class _Messages:
    """To all workers, side by side. The group's own timeout ends them."""

    def __init__(self, works: Sequence[Any], messages: Sequence[Tensor]) -> None:
        self._works, self._messages = works, messages  # gloo reads them until the works have ended

    def wait(self, seconds: float) -> None:
        for work in self._works:
            work.wait()
        self._messages = ()


class ShardedGlooSender(SenderTransport):
    """See SenderTransport; its buckets are the rank's own parts of the plan's. As with GlooSender, a blocked call ends
    with its timeout."""

    device = torch.device("cpu")

    def __init__(self, receiver: Receiver, options: SenderOptions) -> None:
        assert options.part is not None, "weights.sharded"
        self._receiver, self._options, self._part = receiver, options, options.part
        self._store: TCPStore | None = None
        self._group: Any = None
        self._aborted: str | None = None
        self._sends: list[shards.Sends] = []  # of each worker
        self._largest = self._sent = 0

    @property
    def memory(self) -> Memory:
        return Memory(host=self._largest)

    def host(self) -> Rendezvous:
        options = self._options
        address, self._store = host_rendezvous(self._receiver.url, options.config, options.deadline)
        self._store.set(shards.TENSORS, shards.buckets_text(self._part.whole_buckets))
        world_size, meeting = 1 + self._receiver.world_size, {str(self._part.rank): (address, self._store.port)}
        return Rendezvous("gloo-sharded", world_size, options.group, address, self._store.port, stores=meeting)

    def join(self, seconds: float) -> None:
        store, workers = self._store, self._receiver.world_size
        assert store is not None, "host comes first"
        group = wire.open_group(store.host, store.port, 0, 1 + workers, self._options.group, seconds, store=store)
        part = self._part
        try:
            needs = [shards.parse_needs(store.get(shards.needs_key(worker))) for worker in range(workers)]
            everything = held(part.plan, part.layout)
            planned = shards.plan_shards(part.whole_buckets, everything, needs, part.layout.world_size)
            self._sends = [planned[part.rank, worker] for worker in range(workers)]
        except shards.ShardError as error:
            for worker in range(workers):
                store.set(shards.sends_key(worker), shards.sends_text([], str(error)))
            raise TransportError(str(error)) from error
        for worker, sends in enumerate(self._sends):
            store.set(shards.sends_key(worker), shards.sends_text(sends))
        if self._aborted is not None:  # while it was blocked: the engine is to join another one
            raise TransportError(self._aborted)
        self._group = group

    def begin(self, version: str, buckets: Sequence[Bucket]) -> None:
        self._numbers = {bucket: number for number, bucket in enumerate(buckets)}
        self.sent_bytes = self._sent = self._largest = 0

    def send(self, bucket: Bucket, flat: Tensor) -> _Messages:
        if self._aborted is not None:
            raise TransportError(self._aborted)
        tensors, number = dict(wire.split_flat(flat, bucket)), self._numbers[bucket]
        works, messages = [], []
        for worker, sends in enumerate(self._sends):
            if not (pieces := sends[number]):
                continue
            message = torch.cat(
                [
                    piece.box.of(tensors[piece.name], self._part.boxes[piece.name]).reshape(-1).view(torch.uint8)
                    for piece in pieces
                ]
            )
            works.append(self._group.send([message], 1 + worker, 0))
            messages.append(message)
        size = sum(message.numel() for message in messages)
        self.sent_bytes = self._sent = self._sent + size
        self._largest = max(self._largest, size)
        return _Messages(works, messages)

    def finish(self) -> None: ...

    def abort(self, reason: str) -> None:
        # The group stays: its destructor waits for what is in flight, and holds the GIL meanwhile.
        self._aborted = reason

    def close(self) -> None:
        """A dropped group or store is closed by its destructor."""
        self._group = self._store = None


class ShardedGlooControl(VllmGlooControl):
    def init(self, rendezvous: Rendezvous, *, rank_offset: int, timeout_seconds: float) -> list[HttpRequest]:
        return [
            vllm.init_request(
                transport="gloo-sharded",
                stores=[list(rendezvous.stores[rank]) for rank in sorted(rendezvous.stores, key=int)],
                rank_offset=rank_offset,
                world_size=rendezvous.world_size,
                group=rendezvous.group,
                timeout_seconds=timeout_seconds,
            )
        ]


def _obstacle(info: EngineInfo, trainer_device: str) -> str | None:
    return vllm.without_plugin(info, "cannot be sent sharded weights: its backend is")


VLLM = Transport(ShardedGlooSender, ShardedGlooControl(), _obstacle, senders="owners")
