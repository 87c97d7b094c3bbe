"""Sharded transfers: which rank of the trainer sends which part of each tensor to which worker of an engine.

A worker asks its model's loader which parts of each tensor of the checkpoint it stores (its needs), a rank knows which
parts it holds, and `plan_shards` joins the two. Parts are boxes in the coordinates of the checkpoint's tensors, so that
neither side knows how the other cuts or fuses them. Pure; both sides import this file.

How they meet is in rltool.engines.transfer.wire.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from rltool.engines.transfer import wire
from rltool.engines.types import Bucket, TensorMeta

CHUNK_BYTES = 4 << 20
"""What several ranks hold is shared out among them in pieces of about this size."""

TENSORS = "tensors"
"""Key in a rank's store: the buckets, as `buckets_text` writes them."""


def needs_key(worker: int) -> str:
    """Key in a rank's store: what a worker needs, as `needs_text` writes it."""
    return f"needs/{worker}"


def sends_key(worker: int) -> str:
    """Key in a rank's store: the pieces that the rank sends to this worker, as `sends_text` writes them."""
    return f"sends/{worker}"


def read_key(worker: int) -> str:
    """Key in a rank's store that says that a worker knows why there is no plan."""
    return f"read/{worker}"


UNIQUE_ID = "unique_id"
"""Key in a rank's store, over NCCL: the unique id of the one communicator, in base64."""
MEMORY = "memory"
"""Key in a rank's store, over CUDA IPC: the rank's Memory, as `memory_text` writes it."""
LIES = "lies"
"""Key in a rank's store, over CUDA IPC: what lies in that memory, of each bucket, as `lies_text` writes it."""
INDEX = "slices.index.json"
"""File of a version on disk: what each rank has written, as `index_text` writes it."""


def reach_key(worker: int) -> str:
    """Key in a rank's store, over CUDA IPC: the ranks whose memory a worker can open, as `reach_text` writes them."""
    return f"reach/{worker}"


class ShardError(ValueError):
    """The two layouts do not fit together; the message has the tensor."""


class Box(NamedTuple):
    """A part of a tensor: from `start` on, `shape` elements in each dimension."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def overlap(self, other: Box) -> Box | None:
        start = tuple(map(max, self.start, other.start))
        ends = zip(self.start, self.shape, other.start, other.shape, strict=True)
        shape = tuple(min(a + n, b + m) - at for at, (a, n, b, m) in zip(start, ends, strict=True))
        return Box(start, shape) if all(size > 0 for size in shape) else None

    def of(self, tensor: torch.Tensor, origin: Box) -> torch.Tensor:
        """The view of `tensor`, which holds `origin`, that is this box."""
        for dim, (at, size, first) in enumerate(zip(self.start, self.shape, origin.start, strict=True)):
            tensor = tensor.narrow(dim, at - first, size)
        return tensor

    def rows(self, count: int) -> list[Box]:
        """Cut along the first dimension into boxes of this many rows at most."""
        if not self.shape:
            return [self]
        first, total = self.start[0], self.shape[0]
        return [
            Box((first + at, *self.start[1:]), (min(count, total - at), *self.shape[1:]))
            for at in range(0, total, count)
        ]


class Held(NamedTuple):
    """A box, and the ranks that hold it, each all of it."""

    box: Box
    ranks: tuple[int, ...]


class Piece(NamedTuple):
    """A part of the need number `need` (of its worker, of tensor `name`) that travels in one piece."""

    name: str
    need: int
    box: Box


Needs = Mapping[str, Sequence[Box]]
"""Of one worker, by the tensor's name; a tensor of which it needs nothing may be left out."""
Sends = list[list[Piece]]
"""From one rank to one worker: the pieces of each bucket, in the order in which they travel."""


Reach = Mapping[int, int]
"""Of one worker: how far each rank is that it can be sent to from."""


def plan_shards(
    buckets: Sequence[Bucket], held: Mapping[str, Sequence[Held]], needs: Sequence[Needs], ranks: int,
    reach: Sequence[Reach] | None = None,
) -> dict[tuple[int, int], Sends]:  # fmt: skip
    """(rank, worker) -> what travels between them.

    held: by tensor, boxes that do not overlap; needs: of each worker; reach: of each worker, None: all ranks are as
    near. What several ranks hold is sent by the nearest, of these by the one that has sent the fewest bytes so far, of
    these by the first, in pieces of CHUNK_BYTES. Every element that a worker needs comes once for each of its boxes. A
    pure function, so that all ranks make the same plan without talking. Raises ShardError for a box that no rank holds,
    none holds in whole, or none that the worker reaches.
    """
    plan: dict[tuple[int, int], Sends] = {
        (rank, worker): [[] for _ in buckets] for rank in range(ranks) for worker in range(len(needs))
    }
    sent = [0] * ranks
    known = {meta.name for bucket in buckets for meta in bucket}
    if unknown := sorted({name for need in needs for name in need} - known):
        raise ShardError(f"{unknown[0]} is needed by an engine's worker and is not sent")
    for number, bucket in enumerate(buckets):
        for meta in bucket:
            itemsize = wire.dtype_of(meta.dtype).itemsize
            for worker, wanted in enumerate(needs):
                for index, box in enumerate(wanted.get(meta.name, ())):
                    covered = 0
                    for source in held.get(meta.name, ()):
                        if (part := box.overlap(source.box)) is None:
                            continue
                        covered += part.elements
                        nearest = source.ranks if reach is None else _nearest(meta.name, source.ranks, reach[worker])
                        for chunk in _chunks(part, nearest, itemsize):
                            rank = min(nearest, key=lambda r: (sent[r], r))
                            sent[rank] += chunk.elements * itemsize
                            plan[rank, worker][number].append(Piece(meta.name, index, chunk))
                    if covered != box.elements:
                        raise ShardError(
                            f"{meta.name}: an engine's worker needs {box}, of which the trainer's ranks hold "
                            f"{covered} of {box.elements} elements"
                        )
    return plan


def _nearest(name: str, ranks: Sequence[int], reach: Reach) -> Sequence[int]:
    least = min((reach[rank] for rank in ranks if rank in reach), default=None)
    if least is None:
        raise ShardError(
            f"{name}: an engine's worker needs what rank {', '.join(map(str, ranks))} holds, on another host, whose "
            'memory CUDA IPC does not reach: set weights.transport = "gloo"'
        )
    return [rank for rank in ranks if reach.get(rank) == least]


def _chunks(part: Box, ranks: Sequence[int], itemsize: int) -> list[Box]:
    if len(ranks) == 1 or not part.shape:
        return [part]
    row = itemsize * math.prod(part.shape[1:])
    return part.rows(max(1, CHUNK_BYTES // row))


def message_metas(pieces: Sequence[Piece], dtypes: Mapping[str, str]) -> Bucket:
    """What a message of these pieces holds, back to back. dtypes: by tensor."""
    return tuple(TensorMeta(piece.name, dtypes[piece.name], piece.box.shape) for piece in pieces)


def boxes_metas(boxes: Mapping[str, Box], dtypes: Mapping[str, str]) -> Bucket:
    """What lies back to back: a box of each of these tensors. dtypes: by tensor."""
    return tuple(TensorMeta(name, dtypes[name], box.shape) for name, box in boxes.items())


def sends_bytes(sends: Sends, dtypes: Mapping[str, str]) -> int:
    """Of all messages. dtypes: by tensor."""
    return sum(wire.bucket_bytes(message_metas(pieces, dtypes)) for pieces in sends)


def box_of(shape: Sequence[int], view: torch.Tensor) -> Box | None:
    """Which box of a contiguous tensor of `shape` a view of it is; None: it is none, or not in the order of its
    dimensions. Dimensions of one element may be missing or surplus."""
    strides = torch.empty(tuple(shape), device="meta").stride()
    rest, start = int(view.storage_offset()), list[int]()
    for stride in strides:
        start.append(rest // stride if stride else 0)
        rest -= start[-1] * stride
    sizes = [(size, stride) for size, stride in zip(view.shape, view.stride(), strict=True) if size != 1]
    found = [1] * len(strides)
    for dim, stride in enumerate(strides):
        if sizes and sizes[0][1] == stride and shape[dim] != 1:
            found[dim] = sizes.pop(0)[0]
    if sizes or rest or any(at + size > whole for at, size, whole in zip(start, found, shape, strict=True)):
        return None
    return Box(tuple(start), tuple(found))


# -- as text, in the ranks' stores


def buckets_text(buckets: Sequence[Bucket]) -> str:
    return json.dumps([[[meta.name, meta.dtype, list(meta.shape)] for meta in bucket] for bucket in buckets])


def parse_buckets(text: str | bytes) -> list[Bucket]:
    return [
        tuple(TensorMeta(name, dtype, tuple(shape)) for name, dtype, shape in bucket) for bucket in json.loads(text)
    ]


def needs_text(needs: Needs, error: str = "") -> str:
    """error: why they are not known."""
    return json.dumps({"needs": {name: list(boxes) for name, boxes in needs.items()}, "error": error})


def parse_needs(text: str | bytes) -> Needs:
    """Raises ShardError with the worker's own error."""
    found = json.loads(text)
    if found["error"]:
        raise ShardError(found["error"])
    return {name: [_box(*box) for box in boxes] for name, boxes in found["needs"].items()}


def sends_text(sends: Sends, error: str = "") -> str:
    """error: why there are none."""
    return json.dumps({"sends": sends, "error": error})


def parse_sends(text: str | bytes) -> Sends:
    """Raises ShardError with the rank's own error."""
    found = json.loads(text)
    if found["error"]:
        raise ShardError(found["error"])
    return _sends(found["sends"])


class Memory(NamedTuple):
    """That a rank shares by CUDA IPC. gpu: its UUID; host: ipc.host_id; handle: of ipc.ExportedBuffer."""

    gpu: str
    host: str
    handle: str


def memory_text(memory: Memory) -> str:
    return json.dumps(memory)


def parse_memory(text: str | bytes) -> Memory:
    return Memory(*json.loads(text))


Lies = Sequence[Mapping[str, Box]]
"""Of each bucket what lies in a rank's memory, by the tensor's name, in order."""


def lies_text(lies: Lies) -> str:
    return json.dumps([list(bucket.items()) for bucket in lies])


def parse_lies(text: str | bytes) -> Lies:
    return [{name: _box(*box) for name, box in bucket} for bucket in json.loads(text)]


def reach_text(reach: Reach) -> str:
    return json.dumps(list(reach.items()))


def parse_reach(text: str | bytes) -> Reach:
    return dict(json.loads(text))


# -- as files


def written(buckets: Sequence[Bucket], held: Mapping[str, Sequence[Held]], ranks: int) -> list[Sends]:
    """What each rank writes, so that all is there once."""
    everything = {meta.name: [Box.whole(meta.shape)] for bucket in buckets for meta in bucket}
    planned = plan_shards(buckets, held, [everything], ranks)
    return [planned[rank, 0] for rank in range(ranks)]


def held_in_files(files: Sequence[Sends]) -> dict[str, list[Held]]:
    """By the tensor's name; files: of each rank."""
    found: dict[str, list[Held]] = {}
    for rank, sends in enumerate(files):
        for piece in (piece for pieces in sends for piece in pieces):
            found.setdefault(piece.name, []).append(Held(piece.box, (rank,)))
    return found


def slices_file(rank: int, ranks: int, bucket: int) -> str:
    """Name of the safetensors file of a rank's part of a bucket."""
    return f"slices-{rank:05d}-of-{ranks:05d}-{bucket:05d}.safetensors"


def slice_key(name: str, box: Box) -> str:
    """Under which a box of a tensor stands in such a file."""
    return f"{name}@{'.'.join(map(str, box.start))}"


def index_text(buckets: Sequence[Bucket], files: Sequence[Sends]) -> str:
    """files: what each rank has written."""
    return json.dumps({"buckets": json.loads(buckets_text(buckets)), "files": files})


def parse_index(text: str | bytes) -> tuple[list[Bucket], list[Sends]]:
    found = json.loads(text)
    return parse_buckets(json.dumps(found["buckets"])), [_sends(each) for each in found["files"]]


def _sends(found: Any) -> Sends:
    return [[Piece(name, need, _box(*box)) for name, need, box in pieces] for pieces in found]


def _box(start: Any, shape: Any) -> Box:
    return Box(tuple(start), tuple(shape))
