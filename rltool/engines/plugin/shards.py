"""Sharded weights in a vLLM worker: what it stores of each tensor, and loading from that alone.

Both ask the model's own loaders, with stand-ins: tensors of the checkpoint's shapes without memory. What a loader
copies out of one is noted (`needs_of`); in an update it is copied out of what has come instead (`StandIns`). So there
is nothing here of how vLLM fuses, pads or replicates, and no worker has more of a tensor than it stores.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rltool.engines.plugin.channels import ChannelError
from rltool.engines.plugin.replay import NotACopy
from rltool.engines.transfer import wire
from rltool.engines.transfer.shards import (
    TENSORS,
    Box,
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
Uses = Counter[tuple[str, Box]]
"""How often a loader copies out of each box of a tensor."""
Boxes = Mapping[str, Mapping[Box, torch.Tensor]]


def needs_of(buckets: Sequence[Bucket], load: Load) -> Uses:
    """What the loaders copy. Nothing is stored. Raises NotACopy, with the tensor's name, where that is no box."""
    uses: Uses = Counter()
    for meta in (meta for bucket in buckets for meta in bucket):
        recorder = _Recorder(meta, uses)
        try:
            with recorder:
                load(meta.name, recorder.stand_in)
        except NotACopy as error:
            raise NotACopy(f"{meta.name}: {error}") from error
        except Exception as error:  # of a loader that asks a tensor without memory for its values
            raise NotACopy(f"{meta.name}: its loader does more than copy ({type(error).__name__}: {error})") from error
    return uses


class _Recorder(TorchDispatchMode):
    def __init__(self, meta: TensorMeta, uses: Uses) -> None:
        super().__init__()
        self.stand_in = _stand_in(meta)
        self._meta, self._uses = meta, uses

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[1].is_meta:
            if _storage(args[1]) != _storage(self.stand_in):
                raise NotACopy("its loader computes what it stores")
            box = box_of(self._meta.shape, args[1])
            if box is None:
                raise NotACopy(f"its loader takes no block of it, but a view of {tuple(args[1].shape)}")
            self._uses[self._meta.name, box] += 1
            return args[0]
        return func(*args, **(kwargs or {}))


@dataclass
class _Loaded:
    """A stand-in, and what came of its tensor: until the loaders have copied it as often as they do."""

    meta: TensorMeta
    tensor: torch.Tensor
    boxes: dict[Box, torch.Tensor]
    left: Uses = field(default_factory=Counter)


class StandIns(TorchDispatchMode):
    """Of one update: to be entered wherever loaders may run. uses: of the whole model."""

    def __init__(self, uses: Uses) -> None:
        super().__init__()
        self._uses = uses
        self._loaded: dict[int, _Loaded] = {}  # by storage

    def add(self, meta: TensorMeta, boxes: Mapping[Box, torch.Tensor]) -> torch.Tensor:
        """What is handed to the loader."""
        stand_in = _stand_in(meta)
        left: Uses = Counter({(meta.name, box): self._uses[meta.name, box] for box in boxes})
        self._loaded[_storage(stand_in)] = _Loaded(meta, stand_in, dict(boxes), left)
        return stand_in

    @property
    def held_bytes(self) -> int:
        """Of what came and no loader has copied yet."""
        return sum(box.nbytes for loaded in self._loaded.values() for box in loaded.boxes.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[1].is_meta and not args[0].is_meta:
            loaded = self._loaded.get(_storage(args[1]))
            if loaded is None:
                raise NotACopy("a loader computes what it stores")
            args = (args[0], _taken(loaded, args[1]), *args[2:])
        return func(*args, **(kwargs or {}))


def _taken(loaded: _Loaded, view: torch.Tensor) -> torch.Tensor:
    box = box_of(loaded.meta.shape, view)
    if box is None or box not in loaded.boxes:
        raise NotACopy(f"{loaded.meta.name}: its loader takes another part than before")
    found = loaded.boxes[box].reshape(view.shape)
    loaded.left[loaded.meta.name, box] -= 1
    if not loaded.left[loaded.meta.name, box]:
        del loaded.boxes[box]
    return found


def _stand_in(meta: TensorMeta) -> torch.Tensor:
    return torch.empty(meta.shape, dtype=wire.dtype_of(meta.dtype), device="meta")


def _storage(tensor: torch.Tensor) -> int:
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
        self.uses: Uses = Counter()
        self._needs: dict[str, list[Box]] = {}
        self._sends: list[Sends] = []
        self._numbers: dict[Bucket, int] = {}

    def agree(self, needs_of: Callable[[Sequence[Bucket]], Uses]) -> None:
        """With the ranks on what they send. Raises ChannelError, which they get as well."""
        buckets = parse_buckets(self._stores[0].get(TENSORS))
        try:
            self.uses = needs_of(buckets)
        except Exception as error:
            reason = f"weights.sharded: {error}"
            self._tell(needs_text({}, reason))
            raise ChannelError(reason) from error
        for name, box in self.uses:
            self._needs.setdefault(name, []).append(box)
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
                raise ChannelError(f"{flat.numel()} bytes from the trainer's rank {rank} did not come: {error}") from error
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
