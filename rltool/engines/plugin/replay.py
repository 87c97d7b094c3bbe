"""Loading that is prepared once and replayed as device copies.

vLLM's layerwise reload costs 0.03 to 0.05 s of Python for each update (an H200, 0.5B to 7B), a millisecond for each
matrix of an expert, whatever the size of the tensors, and always ends in the same copies. So after the first update,
which goes the slow way, `load_weights` is run once more with tensors that have no memory, and every copy into a
parameter is written down instead of made. The second update goes the slow way again, and what it has stored is
compared, byte by byte, with what the copies would store. From the third on, a bucket is a list of copies.

The slow way stays where loading does more than copy:
- a quantised layer, or any other whose values are processed after loading (experts by another kernel than Triton's);
- a loader that computes what it stores, or looks at the values;
- the CPU, where linear layers are prepacked.
The log has which. Attention layers are processed anew after each replayed update, as vLLM does after a reload.

Sharded weights ask the same loaders, with stand-ins: tensors of the checkpoint's shapes without memory. What a loader
copies out of one is noted (`needs_of`); in an update it is copied out of what has come instead (`StandIns`). So there
is nothing here of how vLLM fuses, pads or replicates, and no worker has more of a tensor than it stores.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rltool.engines.transfer import wire
from rltool.engines.transfer.shards import Box, Needs, box_of
from rltool.engines.types import Bucket, TensorMeta

Load = Callable[[str, torch.Tensor], None]
"""Hands one tensor to the model's loader."""


class NotACopy(Exception):
    """Loading does more than copy; the message has what and where."""


@dataclass(frozen=True)
class Copy:
    """A part of a bucket, and the part of a parameter where it goes.

    destination: a view of the parameter. dtype, shape, stride, offset: of the source as a view of the bucket's bytes,
    the last two in elements of dtype.
    """

    destination: torch.Tensor
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def source(self, flat: torch.Tensor) -> torch.Tensor:
        """The view of `flat` ([bytes] uint8) that is copied."""
        return torch.as_strided(flat.view(self.dtype), self.shape, self.stride, self.offset)


class ReplayPlan:
    """The copies of every bucket of an update."""

    def __init__(self, copies: Mapping[Bucket, Sequence[Copy]]) -> None:
        self._copies = copies

    def __contains__(self, bucket: Bucket) -> bool:
        return bucket in self._copies

    def missing(self, received: set[Bucket]) -> list[str]:
        """The first tensor of each bucket that has not come."""
        return [bucket[0].name for bucket in self._copies if bucket not in received]

    @torch.no_grad()
    def apply(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """Enqueue all copies of one bucket. flat: [bytes] uint8 on the parameters' device."""
        copies = self._copies[bucket]
        if not copies:  # of other pipeline stages
            return
        torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
            [copy.destination for copy in copies], [copy.source(flat) for copy in copies]
        )

    def copies(self, bucket: Bucket) -> Sequence[Copy]:
        return self._copies[bucket]


def record_plan(buckets: Sequence[Bucket], load: Load) -> ReplayPlan:
    """Watch where the loader writes each tensor of the buckets. Nothing is written. Raises NotACopy."""
    plan: dict[Bucket, list[Copy]] = {}
    for bucket in buckets:
        flat = torch.empty(wire.bucket_bytes(bucket), dtype=torch.uint8, device="meta")
        recorder = _Recorder(flat)
        for name, tensor in wire.split_flat(flat, bucket):
            try:
                with recorder:
                    load(name, tensor)
            except NotACopy as error:
                raise NotACopy(f"{name}: {error}") from error
            except Exception as error:  # of a loader that asks a tensor without memory for its values
                raise NotACopy(f"{name}: its loader does more than copy ({type(error).__name__}: {error})") from error
        plan[bucket] = recorder.copies
    return ReplayPlan(plan)


def stored_otherwise(copy: Copy, source: torch.Tensor) -> bool:
    """Whether the destination holds other bytes than the copy of `source` would put there."""
    wanted = source.to(copy.destination.dtype)
    return not torch.equal(_as_bytes(copy.destination), _as_bytes(wanted))


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class _Recorder(TorchDispatchMode):
    """Writes copies out of `flat` down, and refuses every other change of a tensor that was there before."""

    CONSTANTS = frozenset({torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default})
    """Padding: written by the first update alone."""

    def __init__(self, flat: torch.Tensor) -> None:
        super().__init__()
        self.copies: list[Copy] = []
        self._storage = flat.untyped_storage()._cdata

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self._note(args[0], args[1])
            return args[0]
        if func in self.CONSTANTS:
            return args[0]
        if func._schema.is_mutable:
            raise NotACopy(f"its loader calls {func}")
        return func(*args, **(kwargs or {}))

    def _note(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        if source.untyped_storage()._cdata != self._storage:
            raise NotACopy("its loader computes what it stores")
        if destination.shape != source.shape:
            source = source.expand(destination.shape)
        self.copies.append(
            Copy(destination, source.dtype, tuple(source.shape), tuple(source.stride()), int(source.storage_offset()))
        )


# -- sharded


def needs_of(buckets: Sequence[Bucket], load: Load) -> Needs:
    """What the loaders copy. Nothing is stored. Raises NotACopy, with the tensor's name, where that is no box."""
    needs: dict[str, list[Box]] = {}
    for meta in (meta for bucket in buckets for meta in bucket):
        recorder = _NeedsRecorder(meta)
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


class _NeedsRecorder(TorchDispatchMode):
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
        if not view.numel():  # of a worker whose rows are padding alone: nothing travels for it
            return torch.empty(view.shape, dtype=view.dtype)
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
