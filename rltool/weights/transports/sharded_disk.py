"""Sharded, over disk: each rank of the trainer writes what it holds into one directory for each version, and workers
read the slices that they store. What several ranks hold is written once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rltool.engines.transfer import shards
from rltool.engines.transfer.wire import split_flat
from rltool.engines.types import Bucket, HttpRequest
from rltool.megatron.shards import OwnPart, held
from rltool.weights.memory import Memory
from rltool.weights.transport import (
    Receiver,
    Rendezvous,
    SenderOptions,
    SenderTransport,
    Transport,
    TransportError,
    Work,
)
from rltool.weights.transports import vllm
from rltool.weights.transports.disk import Written, remove_old_versions, version_directory
from rltool.weights.transports.sharded import obstacle


class ShardedDiskSender(SenderTransport):
    """A file of each bucket, renamed when it is complete; rank 0 writes the index of all ranks' slices. Workers are
    told of the version when all ranks have written it."""

    device = torch.device("cpu")

    def __init__(self, receiver: Receiver, options: SenderOptions) -> None:
        assert options.part is not None, "weights.sharded"
        self._world_size, self._options, self._part = 1 + receiver.world_size, options, options.part
        self._files: list[shards.Sends] = []  # of each rank
        self._version = ""
        self._largest = self._sent = 0

    def host(self) -> Rendezvous:
        directory = str(self._options.directory.absolute())
        return Rendezvous("disk-sharded", self._world_size, self._options.group, directory=directory)

    def join(self, seconds: float) -> None:
        part: OwnPart = self._part
        self._files = shards.written(part.whole_buckets, held(part.plan, part.layout), part.layout.world_size)

    @property
    def memory(self) -> Memory:
        """The slices of a bucket that are written."""
        return Memory(host=self._largest)

    def begin(self, version: str, buckets: Sequence[Bucket]) -> None:
        self._version = version
        self._numbers = {bucket: number for number, bucket in enumerate(buckets)}
        self.sent_bytes = self._sent = self._largest = 0
        self._directory.mkdir(parents=True, exist_ok=True)
        if self._part.rank == 0:  # before it is written: those that could not be are as large, and go too
            remove_old_versions(self._directory, version.split(":")[0])

    def send(self, bucket: Bucket, flat: Tensor) -> Work:
        part, number, tensors = self._part, self._numbers[bucket], dict(split_flat(flat, bucket))
        # safetensors refuses tensors that share memory, as views of one bucket do.
        slices = {
            shards.slice_key(piece.name, piece.box): piece.box.of(tensors[piece.name], part.boxes[piece.name]).clone(
                memory_format=torch.contiguous_format
            )
            for piece in self._files[part.rank][number]
        }
        if slices:
            name = shards.slices_file(part.rank, part.layout.world_size, number)
            temporary = self._directory / f".{name}.partial"
            try:
                save_file(slices, temporary, metadata={"format": "pt"})
            except SafetensorError as error:  # a full disk is one
                raise TransportError(f"{temporary}: {error}") from error
            os.replace(temporary, self._directory / name)
        size = sum(tensor.nbytes for tensor in slices.values())
        self.sent_bytes = self._sent = self._sent + size
        self._largest = max(self._largest, size)
        return Written()

    def finish(self) -> None:
        if self._part.rank == 0:
            index = self._directory / shards.INDEX
            index.write_text(shards.index_text(self._part.whole_buckets, self._files))

    def abort(self, reason: str) -> None:
        """A write cannot be ended; what it leaves is never read."""

    def close(self) -> None: ...

    @property
    def _directory(self) -> Path:
        return version_directory(self._options.directory, self._version)


class ShardedDiskControl(vllm.VllmControl):
    after_send = True

    def init(self, rendezvous: Rendezvous, *, rank_offset: int, timeout_seconds: float) -> list[HttpRequest]:
        return [vllm.init_request(transport=rendezvous.transport)]

    def announce(
        self, buckets: Sequence[Bucket], rendezvous: Rendezvous, *, version: str
    ) -> list[tuple[HttpRequest, int]]:
        assert rendezvous.directory is not None, "host names it"
        path = str(version_directory(Path(rendezvous.directory), version))
        return [(vllm.bucket_request(bucket, path=path), 1) for bucket in buckets]


VLLM = Transport(ShardedDiskSender, ShardedDiskControl(), obstacle, shared=True, listens=False, senders="owners")
