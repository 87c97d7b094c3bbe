"""How buckets come into a vLLM worker: one class for each transport of rltool.engines.transfer.wire; in
rltool.engines.plugin.sharded those of sharded weights.

A channel is opened by the init request and closed when the trainer, or another one, connects anew.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Protocol

import torch

from rltool.engines.transfer import ipc, nccl, wire
from rltool.engines.transfer.shards import Box
from rltool.engines.types import Bucket, TensorMeta


class ChannelError(RuntimeError):
    """The bytes of a bucket did not arrive; the message goes to the trainer. `broken`: no others will."""

    def __init__(self, message: str, *, broken: bool = True) -> None:
        super().__init__(message)
        self.broken = broken


Arriving = Generator[tuple[Bucket, torch.Tensor]]
"""Each bucket with its bytes ([bytes] uint8), in order. Close it if you leave before its end."""


Boxes = Mapping[str, Mapping[Box, torch.Tensor]]
"""Of each tensor of a bucket the parts that a worker stores."""


class FlatChannel(Protocol):
    """Buckets come as flat runs of bytes."""

    def receive(self, buckets: Sequence[Bucket]) -> Arriving:
        """Raises ChannelError."""
        ...

    def close(self) -> None: ...


class GlooChannel:
    """Into the host's memory, one after another. timeout_seconds: for joining, and then for each bucket."""

    def __init__(
        self, address: str, port: int, *, rank: int, world_size: int, group: str, timeout_seconds: float
    ) -> None:
        self._group = wire.open_group(address, port, rank, world_size, group, timeout_seconds)

    def receive(self, buckets: Sequence[Bucket]) -> Arriving:
        for bucket in buckets:
            flat = torch.empty(wire.bucket_bytes(bucket), dtype=torch.uint8)
            try:
                wire.broadcast(self._group, flat)
            except RuntimeError as error:
                raise ChannelError(f"the broadcast of {flat.numel()} bytes from the trainer failed: {error}") from error
            yield bucket, flat

    def close(self) -> None:
        self._group.shutdown()


class NcclChannel:
    """Into the GPU's memory: the next bucket arrives while the one before is loaded, so two of them lie there."""

    def __init__(
        self,
        unique_id: bytes,
        *,
        trainer_version: int,
        rank: int,
        world_size: int,
        device: torch.device,
        timeout_seconds: float,
    ) -> None:
        """trainer_version: of its NCCL. timeout_seconds: for joining, and then for each bucket."""
        library = nccl.NcclLibrary()
        nccl.check_version(trainer_version, least=0, engine=library.version())
        self._seconds, self._device = timeout_seconds, device
        self._communicator = nccl.Communicator(library, unique_id, world_size, rank, device, seconds=timeout_seconds)
        self._communicator.join(timeout_seconds)

    def receive(self, buckets: Sequence[Bucket]) -> Arriving:
        ahead: list[tuple[Bucket, torch.Tensor, nccl.Work | None]] = []
        try:
            for bucket in buckets:
                ahead.append(self._begin(bucket))
                if len(ahead) == 2:
                    yield self._end(*ahead.pop(0))
            for begun in ahead:
                yield self._end(*begun)
        except nccl.NcclError as error:
            raise ChannelError(f"receiving weights over NCCL: {error}") from error
        except GeneratorExit:  # a bucket could not be loaded, the next one is on its way and is not received
            self.close()
            raise

    def close(self) -> None:
        self._communicator.abort("the transfer group was left")

    def _begin(self, bucket: Bucket) -> tuple[Bucket, torch.Tensor, nccl.Work | None]:
        flat = torch.empty(wire.bucket_bytes(bucket), dtype=torch.uint8, device=self._device)
        return bucket, flat, self._communicator.broadcast(flat) if flat.numel() else None

    def _end(self, bucket: Bucket, flat: torch.Tensor, work: nccl.Work | None) -> tuple[Bucket, torch.Tensor]:
        if work is not None:
            work.wait(self._seconds)
        return bucket, flat


class IpcChannel:
    """Out of memory of the trainer's rank on this worker's own GPU, one bucket for each request; or all of them."""

    def __init__(self, handles: Mapping[str, str], gpu: str, device: torch.device) -> None:
        """handles: by the UUID of the GPU that they were exported on; gpu: this worker's."""
        if not handles.get(gpu):
            raise ChannelError(
                f"this worker is on GPU {gpu}, and the trainer's ranks are on {', '.join(handles)}: each GPU of a "
                "colocated engine needs a rank"
            )
        try:
            self._buffer = ipc.OpenedBuffer(handles[gpu], device)
        except ipc.IpcError as error:
            raise ChannelError(f"opening the trainer's memory on GPU {gpu}: {error}") from error

    def receive(self, buckets: Sequence[Bucket]) -> Arriving:
        if len(buckets) != 1:
            raise ChannelError(f"{len(buckets)} buckets were announced at once, and the trainer's memory holds one")
        # A copy: the trainer fills its memory anew once the request is answered, while layers that are not complete
        # wait with the tensors that they have got.
        yield buckets[0], self._buffer.flat(wire.bucket_bytes(buckets[0])).clone()

    def lying(self, buckets: Sequence[Bucket]) -> Arriving:
        """Views of the trainer's memory, where all of them lie back to back until the request is answered."""
        flat = self._buffer.flat(sum(map(wire.bucket_bytes, buckets)))
        yield from zip(buckets, flat.split([wire.bucket_bytes(bucket) for bucket in buckets]), strict=True)

    def close(self) -> None:
        self._buffer.close()


def receive_bytes(channel: FlatChannel, size: int) -> torch.Tensor:
    """One broadcast: [size] uint8 on the CPU. Raises ChannelError."""
    ((_, flat),) = channel.receive([(TensorMeta("message", "uint8", (size,)),)])
    return flat.cpu()


def read_bucket_file(bucket: Bucket, path: str) -> list[tuple[str, torch.Tensor]]:
    """The disk's way: one safetensors file holds exactly the announced tensors. Raises ChannelError."""
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except Exception as error:  # the library raises its own type, OSError or what the header provokes
        raise ChannelError(
            f"cannot read {path}: {error} (the engine must see the trainer's file system)", broken=False
        ) from error
    found = {name: wire.meta_of(name, tensor) for name, tensor in tensors.items()}
    wrong = [meta.name for meta in bucket if found.get(meta.name) != meta]
    wrong += sorted(found.keys() - {meta.name for meta in bucket})
    if wrong:
        raise ChannelError(
            f"{path} does not hold what was announced: {wrong[0]} is missing, surplus or of another form", broken=False
        )
    return [(meta.name, tensors[meta.name]) for meta in bucket]
