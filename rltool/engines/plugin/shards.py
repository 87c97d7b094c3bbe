"""Sharded weights in a vLLM worker: what it stores of each tensor, and loading from that alone.

Both ask the model's own loaders, with stand-ins: tensors of the checkpoint's shapes without memory. What a loader
copies out of one is noted (`needs_of`); in an update it is copied out of what has come instead (`StandIns`). So there
is nothing here of how vLLM fuses, pads or replicates, and no worker has more of a tensor than it stores.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rltool.engines.plugin.channels import ChannelError
from rltool.engines.plugin.replay import NotACopy
from rltool.engines.transfer import wire
from rltool.engines.transfer.shards import (
    TENSORS,
    Box,
    Needs,
    Sends,
    ShardError,
    box_of,
    message_metas,
    needs_key,
    needs_text,
    parse_buckets,
    parse_sends,
    sends_key,
)
from rltool.engines.types import Bucket, TensorMeta

Load = Callable[[str, torch.Tensor], None]
"""Hands one tensor to the model's loader, which during a reload stores nothing yet."""
Boxes = Mapping[str, Mapping[Box, torch.Tensor]]


def needs_of(buckets: Sequence[Bucket], load: Load) -> Needs:
    """What the loaders copy. Nothing is stored. Raises NotACopy, with the tensor's name, where that is no box."""
    needs: dict[str, list[Box]] = {}
    for meta in (meta for bucket in buckets for meta in bucket):
        recorder = _Recorder(meta)
        try:
            with recorder:
                load(meta.name, recorder.stand_in)
        except NotACopy as error:
            raise NotACopy(f"{meta.name}: {error}") from error
        except Exception as error:  # of a loader that asks a tensor without memory for its values
            raise NotACopy(f"{meta.name}: its loader does more than copy ({type(error).__name__}: {error})") from error
        if recorder.boxes:
            needs[meta.name] = list(recorder.boxes)
    return needs


class _Recorder(TorchDispatchMode):
    def __init__(self, meta: TensorMeta) -> None:
        super().__init__()
        self.stand_in, self._meta = stand_in_of(meta), meta
        self.boxes: dict[Box, None] = {}  # in the order of the loader

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[1].is_meta:
            if storage(args[1]) != storage(self.stand_in):
                raise NotACopy("its loader computes what it stores")
            box = box_of(self._meta.shape, args[1])
            if box is None:
                raise NotACopy(f"its loader takes no block of it, but a view of {tuple(args[1].shape)}")
            self.boxes[box] = None
            return args[0]
        return func(*args, **(kwargs or {}))


class StandIns(TorchDispatchMode):
    """Of one update: to be entered wherever loaders may run."""

    def __init__(self) -> None:
        super().__init__()
        self._came: dict[int, tuple[TensorMeta, torch.Tensor, Mapping[Box, torch.Tensor]]] = {}  # by storage

    def add(self, meta: TensorMeta, boxes: Mapping[Box, torch.Tensor]) -> torch.Tensor:
        """What is handed to the loader; boxes: what has come of the tensor."""
        stand_in = stand_in_of(meta)
        self._came[storage(stand_in)] = meta, stand_in, boxes  # the stand-in too: a freed storage's number is reused
        return stand_in

    def keep(self, storages: Collection[int]) -> None:
        """What came is freed, but for the tensors whose stand-ins have these storages."""
        self._came = {number: came for number, came in self._came.items() if number in storages}

    @property
    def held_bytes(self) -> int:
        return sum(box.nbytes for _, _, boxes in self._came.values() for box in boxes.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[1].is_meta and not args[0].is_meta:
            args = (args[0], self._found(args[1]), *args[2:])
        return func(*args, **(kwargs or {}))

    def _found(self, view: torch.Tensor) -> torch.Tensor:
        if (came := self._came.get(storage(view))) is None:
            raise NotACopy("a loader computes what it stores")
        meta, _, boxes = came
        box = box_of(meta.shape, view)
        if box is None or box not in boxes:
            raise NotACopy(f"{meta.name}: its loader takes another part than when the engine joined")
        return boxes[box].reshape(view.shape)


def stand_in_of(meta: TensorMeta) -> torch.Tensor:
    """The tensor without memory."""
    return torch.empty(meta.shape, dtype=wire.dtype_of(meta.dtype), device="meta")


def storage(tensor: torch.Tensor) -> int:
    """The same for all views of a tensor."""
    return tensor.untyped_storage()._cdata


class ShardedGlooChannel:
    """A group with each rank of the trainer: the contract is rltool.engines.transfer.wire. stores: address and port of
    the ranks', in their order; worker: number of this one in its engine; timeout_seconds: for joining, and then for
    each bucket."""

    def __init__(
        self, stores: Sequence[tuple[str, int]], *, worker: int, rank: int, world_size: int, group: str,
        timeout_seconds: float,
    ) -> None:  # fmt: skip
        self._worker, self._seconds = worker, timeout_seconds
        self._stores = [wire.connect_store(address, port, timeout_seconds) for address, port in stores]
        self._groups = [
            wire.open_group(address, port, rank, world_size, group, timeout_seconds, store=store)
            for (address, port), store in zip(stores, self._stores, strict=True)
        ]
        self._needs: Needs = {}
        self._sends: list[Sends] = []
        self._numbers: dict[Bucket, int] = {}

    def agree(self, needs_of: Callable[[Sequence[Bucket]], Needs]) -> None:
        """With the ranks on what they send. Raises ChannelError, which they get as well."""
        buckets = parse_buckets(self._stores[0].get(TENSORS))
        try:
            self._needs = needs_of(buckets)
        except Exception as error:
            reason = f"weights.sharded: {error}"
            self._tell(needs_text({}, reason))
            raise ChannelError(reason) from error
        self._tell(needs_text(self._needs))
        try:
            self._sends = [parse_sends(store.get(sends_key(self._worker))) for store in self._stores]
        except ShardError as error:
            raise ChannelError(f"weights.sharded: {error}") from error
        self._numbers = {bucket: number for number, bucket in enumerate(buckets)}

    def receive_boxes(self, bucket: Bucket) -> Boxes:
        """What this worker stores of a bucket, on the host. Raises ChannelError."""
        if bucket not in self._numbers:
            raise ChannelError(f"{bucket[0].name}: the bucket is none of those that this connection was made for")
        number, dtypes = self._numbers[bucket], {meta.name: meta.dtype for meta in bucket}
        boxes = {meta.name: dict[Box, torch.Tensor]() for meta in bucket}
        arriving = []
        for rank, (group, sends) in enumerate(zip(self._groups, self._sends, strict=True)):
            if pieces := sends[number]:
                metas = message_metas(pieces, dtypes)
                flat = torch.empty(wire.bucket_bytes(metas), dtype=torch.uint8)
                arriving.append((rank, pieces, metas, flat, group.recv([flat], 0, 0)))
        for rank, pieces, metas, flat, work in arriving:
            try:
                work.wait()
            except RuntimeError as error:
                what = f"{flat.numel()} bytes from the trainer's rank {rank}"
                raise ChannelError(f"{what} did not come: {error}") from error
            for piece, (name, tensor) in zip(pieces, wire.split_flat(flat, metas), strict=True):
                need = self._needs[name][piece.need]
                if piece.box == need:
                    boxes[name][need] = tensor
                    continue
                if need not in boxes[name]:
                    boxes[name][need] = tensor.new_empty(need.shape)
                piece.box.of(boxes[name][need], need).copy_(tensor)
        return boxes

    def close(self) -> None:
        for group in self._groups:
            group.shutdown()
        self._stores = []

    def _tell(self, text: str) -> None:
        for store in self._stores:
            store.set(needs_key(self._worker), text)
