"""How much memory a weight sync takes in a trainer rank, counted where it is allocated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Memory:
    """Bytes. host: pinned or not; device: on the rank's GPU."""

    host: int = 0
    device: int = 0

    @classmethod
    def on(cls, device: torch.device, size: int) -> Memory:
        return cls(host=size) if device.type == "cpu" else cls(device=size)

    def __add__(self, other: Memory) -> Memory:
        return Memory(self.host + other.host, self.device + other.device)


NONE = Memory()


def most(each: Iterable[Memory]) -> Memory:
    """The largest of each kind; none of both where there are none."""
    each = list(each)
    return Memory(max((m.host for m in each), default=0), max((m.device for m in each), default=0))
