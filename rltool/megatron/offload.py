"""A model's memory on its device, given away while others use the device, and brought back bit by bit.

Only the storages below the tensors are emptied: every tensor, and every view that Megatron has of a buffer, stays the
object that it is and finds its bytes again after `onload`, at another address. In between none of them may be touched.
On the CPU it works alike: the bytes move to another buffer. There numpy may have borrowed a storage (`Tensor.numpy`),
which torch then refuses to empty: its bytes are overwritten, so that any use meets NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, UntypedStorage

from rltool.errors import RltoolError
from rltool.megatron.host_memory import room_for

Part = Literal["parameters", "gradients", "optimizer"]
PARTS: tuple[Part, ...] = get_args(Part)


BORROWED = 0xFF
"""Each byte of a storage that could not be emptied: NaN in every floating-point format."""


class DeviceFull(RltoolError):
    """What was offloaded does not fit on its device any more: another process holds the memory."""


def tensors_of(ddp: Any, optimizer: Any) -> dict[Part, list[Tensor]]:
    """Everything that a model in training holds, by part.

    ddp: Megatron's DistributedDataParallel; optimizer: a MegatronOptimizer, or several that it has chained. What
    belongs to several parts (in fp32 the optimizer updates the parameters themselves) is listed in each of them.
    """
    buffers = [*ddp.buffers, *ddp.expert_parallel_buffers]
    parameters = list(ddp.parameters())
    inner = [each.optimizer for each in getattr(optimizer, "chained_optimizers", [optimizer])]
    updated = [p for each in inner if each is not None for group in each.param_groups for p in group["params"]]
    states = [value for each in inner if each is not None for state in each.state.values() for value in state.values()]
    return {
        "parameters": [*parameters, *(buffer.param_data for buffer in buffers if buffer.param_data is not None)],
        "gradients": [
            *(buffer.grad_data for buffer in buffers),
            *(p.grad for p in (*parameters, *updated) if p.grad is not None),
        ],
        "optimizer": [*updated, *(value for value in states if isinstance(value, Tensor))],
    }


@dataclass
class _Away:
    """What lay in the storages of one part. copies: by position; those that held nothing but zeros have none."""

    storages: list[UntypedStorage]
    sizes: list[int]
    copies: dict[int, Tensor] = field(default_factory=dict)


class Offloader:
    """One model's. tensors: asked at each offload, for an optimizer makes its state at its first step.

    Not thread-safe. Copies in the host's memory are kept for the next time: pinning it takes longer than copying.
    """

    def __init__(self, tensors: Callable[[], Mapping[Part, Iterable[Tensor]]], device: torch.device) -> None:
        self._tensors, self._device = tensors, device
        self._away: dict[Part, _Away] = {}
        self._room: dict[Part, dict[str, Tensor]] = {}

    @property
    def away(self) -> tuple[Part, ...]:
        """What is not on the device."""
        return tuple(part for part in PARTS if part in self._away)

    def offload(self, parts: Sequence[Part] = PARTS) -> None:
        """Their bytes move to the host, and the device's memory is given back to it. Parts that are away stay away."""
        wanted: list[Part] = [part for part in parts if part not in self._away]
        found = self._storages()
        moving: dict[Part, _Away] = {part: self._copied(part, found[part]) for part in wanted}
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        for part, away in moving.items():
            self._away[part] = away
            for storage in away.storages:
                _empty(storage)
        self.give_back()

    def give_back(self) -> None:
        """What torch has cached of the device's memory, and nothing uses."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self, parts: Sequence[Part] = PARTS) -> None:
        """As they were before `offload`. Raises DeviceFull where they do not fit; then they are still away."""
        for part in parts:
            if part not in self._away:
                continue
            self._bring_back(self._away[part])
            if self._device.type == "cuda":  # before the copy in the host's memory may be written again
                torch.cuda.current_stream(self._device).synchronize()
            del self._away[part]

    def _storages(self) -> dict[Part, list[UntypedStorage]]:
        """Each storage once, with the first part that it belongs to, whatever is away; empty ones are left out."""
        seen: set[int] = set()
        found: dict[Part, list[UntypedStorage]] = {part: [] for part in PARTS}
        tensors = self._tensors()
        for part in PARTS:
            for tensor in tensors[part]:
                storage = tensor.untyped_storage()
                if tensor.device == self._device and storage.nbytes() and storage.data_ptr() not in seen:
                    seen.add(storage.data_ptr())
                    found[part].append(storage)
        return found

    def _copied(self, part: Part, storages: list[UntypedStorage]) -> _Away:
        away = _Away(storages, [storage.nbytes() for storage in storages])
        views = {str(i): _bytes(storage) for i, storage in enumerate(storages)}
        if part == "gradients":  # of a finished step they are zeros, or of no use but to be equal: the bus is slow
            views = {name: view for name, view in views.items() if bool(view.any())}
        room = self._room.get(part, {})
        if {name: view.numel() for name, view in views.items()} != {name: held.numel() for name, held in room.items()}:
            self._room.pop(part, None)
            room = self._room[part] = room_for(views, pinned=self._device.type == "cuda")
        for name, view in views.items():
            away.copies[int(name)] = room[name].copy_(view, non_blocking=True)
        return away

    def _bring_back(self, away: _Away) -> None:
        try:
            for storage, size in zip(away.storages, away.sizes, strict=True):
                if storage.nbytes() != size:
                    storage.resize_(size)
        except torch.OutOfMemoryError as error:
            for storage in away.storages:
                _empty(storage)
            raise DeviceFull(
                f"the trainer's memory ({sum(away.sizes):,} bytes) does not fit on {self._device} again: {error}. What "
                "else is on that GPU? Engines that share it must sleep while the trainer works, and while they do not, "
                "leave room with their own flags (--gpu-memory-utilization, --mem-fraction-static)"
            ) from error
        for i, storage in enumerate(away.storages):
            copy = away.copies.get(i)
            if copy is None:
                _bytes(storage).zero_()
            else:
                _bytes(storage).copy_(copy, non_blocking=True)


def _empty(storage: UntypedStorage) -> None:
    if storage.resizable():
        storage.resize_(0)
    else:
        _bytes(storage).fill_(BORROWED)


def _bytes(storage: UntypedStorage) -> Tensor:
    """[nbytes] uint8, a view of it."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
