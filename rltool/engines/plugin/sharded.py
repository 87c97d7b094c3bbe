"""How sharded weights come into a vLLM worker: from each rank of the trainer what this worker stores of its part. One
class for each transport of rltool.engines.transfer.wire; who sends what is planned in rltool.engines.transfer.shards.
"""

from __future__ import annotations

import base64
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from rltool.engines.plugin.channels import Boxes, ChannelError
from rltool.engines.transfer import ipc, nccl, shards, wire
from rltool.engines.transfer.shards import Box, Held, Lies, Memory, Needs, Piece, Reach, Sends, ShardError
from rltool.engines.types import Bucket

NeedsOf = Callable[[Sequence[Bucket]], Needs]
"""What the worker's model stores of these tensors."""
OWN_GPU, OWN_HOST = 0, 1
"""How far a rank is whose memory a worker can open."""


class ShardedChannel(Protocol):
    def receive_boxes(self, bucket: Bucket, path: str | None = None) -> Boxes:
        """What this worker stores of a bucket; path: of the version's directory, for files. Raises ChannelError."""
        ...

    def close(self) -> None: ...


class Info(Protocol):
    """Init info, see rltool.engines.transfer.wire."""

    transport: str
    stores: list[tuple[str, int]]
    rank_offset: int
    world_size: int
    group: str
    timeout_seconds: float
    unique_id: str
    nccl_version: int


def open_shards(
    info: Info, rank: int, device: torch.device, gpu: Callable[[], str], needs_of: NeedsOf
) -> ShardedChannel:
    """Of the worker that is this rank of the group, and on the GPU of this UUID. Blocks until it has agreed with the
    ranks. Raises ChannelError, or what the transport raises."""
    if info.transport == "disk-sharded":
        return ShardedFiles(needs_of)
    stores = [(address, port) for address, port in info.stores]
    worker, workers, seconds = rank - info.rank_offset, info.world_size - info.rank_offset, info.timeout_seconds
    if info.transport == "nccl-sharded":
        channel = ShardedNcclChannel(
            stores, info.unique_id, trainer_version=info.nccl_version, worker=worker, workers=workers, device=device,
            timeout_seconds=seconds,
        )  # fmt: skip
    elif info.transport == "ipc-sharded":
        channel = ShardedIpcChannel(stores, worker=worker, gpu=gpu(), device=device, timeout_seconds=seconds)
    else:
        channel = ShardedGlooChannel(
            stores, worker=worker, rank=rank, world_size=info.world_size, group=info.group, timeout_seconds=seconds
        )
    try:
        channel.agree(needs_of)
    except BaseException:
        channel.close()
        raise
    return channel


class _Places:
    """What has come of a bucket, in its place."""

    def __init__(self, bucket: Bucket, needs: Needs) -> None:
        self.boxes = {meta.name: dict[Box, torch.Tensor]() for meta in bucket}
        self._needs = needs

    def put(self, piece: Piece, tensor: torch.Tensor, *, borrowed: bool) -> None:
        """borrowed: it lies in memory that is another's."""
        need, boxes = self._needs[piece.name][piece.need], self.boxes[piece.name]
        if piece.box == need and not borrowed:
            boxes[need] = tensor
            return
        if need not in boxes:
            boxes[need] = torch.empty(need.shape, dtype=tensor.dtype, device=tensor.device)
        piece.box.of(boxes[need], need).copy_(tensor)


class _StoresChannel(ABC):
    """Of workers that agree with the ranks through a store of each rank's. stores: address and port of the ranks', in
    their order; worker: number of this one in its engine; timeout_seconds: for joining, and then for each bucket."""

    borrows = False
    """Its tensors lie in the ranks' memory."""

    def __init__(self, stores: Sequence[tuple[str, int]], *, worker: int, timeout_seconds: float) -> None:
        self._worker, self._seconds = worker, timeout_seconds
        self._stores = [
            wire.connect_store(address, port, timeout_seconds, of=f"the trainer's rank {number}")
            for number, (address, port) in enumerate(stores)
        ]
        self._needs: Needs = {}
        self._sends: list[Sends] = []
        self._buckets: Sequence[Bucket] = ()
        self._numbers: dict[Bucket, int] = {}

    def agree(self, needs_of: NeedsOf) -> None:
        """With the ranks on what they send. Raises ChannelError, which they get as well."""
        buckets = shards.parse_buckets(self._stores[0].get(shards.TENSORS))
        try:
            self._needs = needs_of(buckets)
        except Exception as error:
            reason = f"weights.sharded: {error}"
            self._tell(shards.needs_key(self._worker), shards.needs_text({}, reason))
            self._tell(shards.read_key(self._worker), "")
            raise ChannelError(reason) from error
        self._tell(shards.needs_key(self._worker), shards.needs_text(self._needs))
        try:
            self._sends = [shards.parse_sends(store.get(shards.sends_key(self._worker))) for store in self._stores]
        except ShardError as error:
            self._tell(shards.read_key(self._worker), "")
            raise ChannelError(f"weights.sharded: {error}") from error
        self._buckets = buckets
        self._numbers = {bucket: number for number, bucket in enumerate(buckets)}

    def receive_boxes(self, bucket: Bucket, path: str | None = None) -> Boxes:
        if bucket not in self._numbers:
            raise ChannelError(f"{bucket[0].name}: the bucket is none of those that this connection was made for")
        places = _Places(bucket, self._needs)
        for piece, tensor in self._pieces(self._numbers[bucket]):
            places.put(piece, tensor, borrowed=self.borrows)
        return places.boxes

    @abstractmethod
    def _pieces(self, number: int) -> Iterator[tuple[Piece, torch.Tensor]]:
        """All of bucket `number`."""

    def _dtypes(self, number: int) -> dict[str, str]:
        """By tensor."""
        return {meta.name: meta.dtype for meta in self._buckets[number]}

    def close(self) -> None:
        self._stores = []

    def _tell(self, key: str, text: str) -> None:
        for store in self._stores:
            store.set(key, text)


# -- messages


class _Message(NamedTuple):
    """From one rank. metas: what it holds, back to back; flat: [bytes] uint8, where it comes."""

    rank: int
    pieces: Sequence[Piece]
    metas: Bucket
    flat: torch.Tensor


class _MessageChannel(_StoresChannel):
    device = torch.device("cpu")

    def _pieces(self, number: int) -> Iterator[tuple[Piece, torch.Tensor]]:
        for message in self._arriving(number):
            tensors = wire.split_flat(message.flat, message.metas)
            yield from ((piece, tensor) for piece, (_, tensor) in zip(message.pieces, tensors, strict=True))

    def _messages(self, number: int) -> list[_Message]:
        """Of a bucket, that will come."""
        messages, dtypes = [], self._dtypes(number)
        for rank, sends in enumerate(self._sends):
            if pieces := sends[number]:
                metas = shards.message_metas(pieces, dtypes)
                flat = torch.empty(wire.bucket_bytes(metas), dtype=torch.uint8, device=self.device)
                messages.append(_Message(rank, pieces, metas, flat))
        return messages

    @abstractmethod
    def _arriving(self, number: int) -> Iterator[_Message]:
        """Each of a bucket as soon as it has come. Raises ChannelError."""


class ShardedGlooChannel(_MessageChannel):
    """A group with each rank. The next bucket comes while one is loaded, so two of them lie here."""

    def __init__(
        self, stores: Sequence[tuple[str, int]], *, worker: int, rank: int, world_size: int, group: str,
        timeout_seconds: float,
    ) -> None:  # fmt: skip
        super().__init__(stores, worker=worker, timeout_seconds=timeout_seconds)
        self._groups = [
            wire.open_group(address, port, rank, world_size, group, timeout_seconds, store=store)
            for (address, port), store in zip(stores, self._stores, strict=True)
        ]
        self._ahead: tuple[int, list[tuple[_Message, Any]]] | None = None

    def _begin(self, number: int) -> list[tuple[_Message, Any]]:
        return [(m, wire.receive(self._groups[m.rank], m.flat)) for m in self._messages(number)]

    def _arriving(self, number: int) -> Iterator[_Message]:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] != number:
            raise ChannelError(f"bucket {number} was announced, and bucket {ahead[0]} is on its way")
        for message, work in self._begin(number) if ahead is None else ahead[1]:
            try:
                work.wait()
            except RuntimeError as error:
                what = f"{message.flat.numel()} bytes from the trainer's rank {message.rank}"
                raise ChannelError(f"{what} did not come: {error}") from error
            yield message
        if number + 1 < len(self._buckets):
            self._ahead = number + 1, self._begin(number + 1)

    def close(self) -> None:
        for group in self._groups:
            group.shutdown()
        self._ahead = None
        super().close()


class ShardedNcclChannel(_MessageChannel):
    """One communicator of all ranks, in their order, and all workers of the engine behind them."""

    def __init__(
        self, stores: Sequence[tuple[str, int]], unique_id: str, *, trainer_version: int, worker: int, workers: int,
        device: torch.device, timeout_seconds: float,
    ) -> None:  # fmt: skip
        """unique_id: base64; trainer_version: of its NCCL; workers: of the engine."""
        super().__init__(stores, worker=worker, timeout_seconds=timeout_seconds)
        self.device = device
        library = nccl.NcclLibrary()
        nccl.check_version(trainer_version, least=0, engine=library.version())
        if worker == 0:  # of the ranks only the first knows it
            self._tell(shards.UNIQUE_ID, unique_id)
        ranks, raw = len(stores), base64.b64decode(unique_id, validate=True)
        self._communicator = nccl.Communicator(
            library, raw, ranks + workers, ranks + worker, device, seconds=timeout_seconds
        )
        self._communicator.join(timeout_seconds)

    def _arriving(self, number: int) -> Iterator[_Message]:
        if not (messages := self._messages(number)):
            return
        try:
            work = self._communicator.exchange((), [(message.flat, message.rank) for message in messages])
            work.wait(self._seconds)
        except nccl.NcclError as error:
            raise ChannelError(f"receiving weights over NCCL: {error}") from error
        yield from messages

    def close(self) -> None:
        self._communicator.abort("the transfer group was left")
        super().close()


# -- memory


class ShardedIpcChannel(_StoresChannel):
    """Memory of the ranks of this host, out of which the worker copies what it stores. gpu: the UUID of the worker's;
    device: the same, here."""

    borrows = True

    def __init__(
        self, stores: Sequence[tuple[str, int]], *, worker: int, gpu: str, device: torch.device, timeout_seconds: float
    ) -> None:
        super().__init__(stores, worker=worker, timeout_seconds=timeout_seconds)
        self._gpu, self._device = gpu, device
        self._memory = [shards.parse_memory(store.get(shards.MEMORY)) for store in self._stores]
        self._lies: dict[int, Lies] = {}
        self._opened: dict[int, ipc.OpenedBuffer] = {}

    def agree(self, needs_of: NeedsOf) -> None:
        self._tell(shards.reach_key(self._worker), shards.reach_text(_reach(self._memory, self._gpu)))
        super().agree(needs_of)
        for rank, sends in enumerate(self._sends):
            if any(sends):
                self._opened[rank] = self._open(rank)
                self._lies[rank] = shards.parse_lies(self._stores[rank].get(shards.LIES))

    def _open(self, rank: int) -> ipc.OpenedBuffer:
        memory = self._memory[rank]
        try:
            return ipc.OpenedBuffer(memory.handle, self._device, peer=memory.gpu != self._gpu)
        except ipc.IpcError as error:
            raise ChannelError(
                f"opening the memory of the trainer's rank {rank}, on GPU {memory.gpu}, from GPU {self._gpu}: {error}; "
                'set weights.transport = "gloo"'
            ) from error

    def _pieces(self, number: int) -> Iterator[tuple[Piece, torch.Tensor]]:
        dtypes = self._dtypes(number)
        for rank, opened in self._opened.items():
            if not (pieces := self._sends[rank][number]):
                continue
            lies = self._lies[rank][number]
            metas = shards.boxes_metas(lies, dtypes)
            tensors = dict(wire.split_flat(opened.flat(wire.bucket_bytes(metas)), metas))
            yield from ((piece, piece.box.of(tensors[piece.name], lies[piece.name])) for piece in pieces)

    def close(self) -> None:
        for opened in self._opened.values():
            opened.close()
        self._opened = {}
        super().close()


def _reach(memory: Sequence[Memory], gpu: str) -> Reach:
    """From a worker on this GPU."""
    here = ipc.host_id()
    return {rank: OWN_GPU if m.gpu == gpu else OWN_HOST for rank, m in enumerate(memory) if m.host == here}


# -- files


class ShardedFiles:
    """Of each version an index, and of each rank a file for each bucket, of which the slices are read that this worker
    stores. What is needed of which file is planned once: layouts stay as they are."""

    def __init__(self, needs_of: NeedsOf) -> None:
        self._needs_of = needs_of
        self._index = ""
        self._numbers: dict[Bucket, int] = {}
        self._needs: Needs = {}
        self._reads: list[Sends] = []  # by rank that has written
        self._held: Mapping[str, Sequence[Held]] = {}

    def receive_boxes(self, bucket: Bucket, path: str | None = None) -> Boxes:
        from safetensors import safe_open

        assert path is not None, "it is announced with it"
        directory = Path(path)
        self._plan(directory / shards.INDEX)
        if bucket not in self._numbers:
            raise ChannelError(f"{bucket[0].name}: the bucket is none of those in {path}", broken=False)
        places, number = _Places(bucket, self._needs), self._numbers[bucket]
        for rank, reads in enumerate(self._reads):
            if not (pieces := reads[number]):
                continue
            file = directory / shards.slices_file(rank, len(self._reads), number)
            try:
                with safe_open(file, framework="pt") as opened:
                    for piece in pieces:
                        places.put(piece, self._slice(opened, piece, rank), borrowed=False)
            except Exception as error:  # the library raises its own type, OSError or what the header provokes
                raise _unreadable(file, error) from error
        return places.boxes

    def close(self) -> None: ...

    def _plan(self, file: Path) -> None:
        try:
            text = file.read_text()
        except OSError as error:
            raise _unreadable(file, error) from error
        if text == self._index:
            return
        try:
            buckets, files = shards.parse_index(text)
            self._needs, self._held = self._needs_of(buckets), shards.held_in_files(files)
            plan = shards.plan_shards(buckets, self._held, [self._needs], len(files))
        except Exception as error:
            raise ChannelError(f"weights.sharded: {error}", broken=False) from error
        self._reads = [plan[rank, 0] for rank in range(len(files))]
        self._numbers, self._index = {bucket: number for number, bucket in enumerate(buckets)}, text

    def _slice(self, opened: Any, piece: Piece, rank: int) -> torch.Tensor:
        own = (held.box for held in self._held[piece.name] if rank in held.ranks)
        [box] = [box for box in own if box.overlap(piece.box) is not None]
        key = shards.slice_key(piece.name, box)
        if piece.box == box:
            return opened.get_tensor(key)
        starts = zip(piece.box.start, box.start, piece.box.shape, strict=True)
        return opened.get_slice(key)[tuple(slice(at - first, at - first + size) for at, first, size in starts)]


def _unreadable(file: Path, error: Exception) -> ChannelError:
    where = "the engine, and each rank of the trainer, must see the same directory"
    return ChannelError(f"cannot read {file}: {error} ({where})", broken=False)
