"""The memory that buckets are filled into and sent from, in trainer rank 0."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rltool.weights.memory import NONE, Memory, most
from rltool.weights.send.channel import Call, Channel

BUFFERS = 2
"""One is filled while the other is sent."""

CPU = torch.device("cpu")

Taking = tuple[Channel, Call]
"""A channel that takes a bucket, and the call that ends when it has taken it."""


@dataclass
class _Buffer:
    memory: dict[torch.device, Tensor] = field(default_factory=dict)
    takers: Sequence[Taking] = ()


class BucketBuffers:
    """BUFFERS buffers, filled and sent in turn. One is filled anew when the last channel has taken what it holds; a
    channel that failed is not waited for, and as it may still read the buffer, that gets new memory.

    source: where the tensors are; wanted: the devices that channels send from. The bucket is filled where it is wanted
    nearest to its source, and copied once to the host's memory where it is wanted there as well. memory: that they had
    at most.
    """

    def __init__(self, source: torch.device, wanted: Collection[torch.device]) -> None:
        self._source, self._wanted = source, set(wanted)
        self._filled_on = source if source in self._wanted else CPU
        self._buffers = deque(_Buffer() for _ in range(BUFFERS))
        self._size = 0
        self._given_up = NONE  # to channels that failed
        self.memory = NONE

    def take(self, size: int) -> Tensor:
        """[size] uint8, to be filled. Waits until it is free."""
        self._buffers.rotate(-1)
        buffer = self._buffers[0]
        for channel, call in buffer.takers:
            channel.wait(call)
        if any(channel.failure is not None for channel, _ in buffer.takers):
            self._given_up += _held(buffer)
            buffer.memory = {}
        buffer.takers, self._size = (), size
        return self._memory(buffer, self._filled_on)

    def filled(self) -> dict[torch.device, Tensor]:
        """The bucket that was taken last, complete, on every device that it is wanted on: [size] uint8 each."""
        buffer = self._buffers[0]
        flat = self._memory(buffer, self._filled_on)
        copies = {self._filled_on: flat}
        if self._filled_on != CPU and CPU in self._wanted:
            copies[CPU] = self._memory(buffer, CPU).copy_(flat, non_blocking=True)
        if self._source.type == "cuda":  # channels send from threads, and on streams, of their own
            torch.cuda.current_stream(self._source).synchronize()
        return copies

    def sent_to(self, takers: Sequence[Taking]) -> None:
        """Who is taking that bucket."""
        self._buffers[0].takers = takers

    def _memory(self, buffer: _Buffer, device: torch.device) -> Tensor:
        held = buffer.memory.get(device)
        if held is None or held.numel() < self._size:
            buffer.memory.pop(device, None)
            held = None  # the old memory goes before the larger one is allocated
            pinned = device == CPU and self._source.type == "cuda"
            held = torch.empty(self._size, dtype=torch.uint8, device=device, pin_memory=pinned)
            buffer.memory[device] = held
            self.memory = most((self.memory, sum(map(_held, self._buffers), self._given_up)))
        return held[: self._size]


def _held(buffer: _Buffer) -> Memory:
    return sum((Memory.on(device, flat.numel()) for device, flat in buffer.memory.items()), NONE)
