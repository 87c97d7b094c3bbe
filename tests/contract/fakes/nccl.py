"""NCCL between threads of one process: a library and communicators that move real bytes, with a broadcast that is done
when every rank has taken it, and a message that is done when its peer has.

`installed(monkeypatch)` puts them in place of rltool.engines.transfer.nccl's. As with the real ones, a peer that has
gone is not noticed.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rltool.engines.transfer import nccl

VERSION = 22907
POLL = 0.001


@dataclass
class Hub:
    """One communicator. sent: all broadcasts so far; taken: how many of them each rank has; messages: from a rank to
    another, that are not taken."""

    world_size: int
    joined: set[int] = field(default_factory=set)
    sent: list[torch.Tensor] = field(default_factory=list)
    taken: dict[int, int] = field(default_factory=dict)
    messages: dict[tuple[int, int], deque[torch.Tensor]] = field(default_factory=lambda: defaultdict(deque))
    lock: threading.Lock = field(default_factory=threading.Lock)


HUBS: dict[bytes, Hub] = {}


class FakeLibrary:
    path = "fake-libnccl.so.2"
    number = VERSION

    def __init__(self, path: str | None = None) -> None:
        self.asked_for = path

    def version(self) -> int:
        return self.number

    def unique_id(self) -> bytes:
        return (uuid.uuid4().bytes * 8)[: nccl.UNIQUE_ID_BYTES]


class FakeWork:
    def __init__(self, communicator: FakeCommunicator, done: Callable[[], bool]) -> None:
        self._communicator, self._done = communicator, done

    def wait(self, seconds: float, *, check: Callable[[], None] | None = None) -> None:
        def done() -> bool:
            if check is not None:
                check()
            return self._done()

        self._communicator.wait(done, seconds, "a broadcast")


class FakeCommunicator:
    """As nccl.Communicator; device is the CPU."""

    def __init__(
        self, library: Any, unique_id: bytes, world_size: int, rank: int, device: torch.device, *, seconds: float
    ) -> None:
        self.rank, self.world_size, self.device, self.seconds = rank, world_size, device, seconds
        self.alive, self.reason = True, ""
        self.hub = HUBS.setdefault(unique_id, Hub(world_size))
        assert self.hub.world_size == world_size, "ranks of one communicator disagree on its size"
        with self.hub.lock:
            assert rank not in self.hub.joined, f"rank {rank} joined twice"
            self.hub.joined.add(rank)
        self._received = 0

    def join(self, seconds: float, *, warm_up: bool = True) -> None:
        self.wait(lambda: len(self.hub.joined) == self.world_size, seconds, "joining")

    def broadcast(self, flat: torch.Tensor, root: int = 0) -> FakeWork:
        self._check()
        hub, number = self.hub, self._received
        self._received += 1
        if self.rank == root:
            hub.sent.append(flat.clone())
            return FakeWork(self, lambda: sum(count > number for count in hub.taken.values()) == self.world_size - 1)

        def receive() -> bool:
            if len(hub.sent) <= number:
                return False
            if hub.taken.get(self.rank, 0) <= number:
                assert hub.sent[number].numel() == flat.numel(), "the ranks disagree on the bytes of a broadcast"
                flat.copy_(hub.sent[number])
                hub.taken[self.rank] = number + 1
            return True

        return FakeWork(self, receive)

    def exchange(self, sends: Sequence[nccl.Message], receives: Sequence[nccl.Message]) -> FakeWork:
        self._check()
        hub, posted = self.hub, [(peer, flat.clone()) for flat, peer in sends]
        for peer, flat in posted:
            hub.messages[self.rank, peer].append(flat)
        left = list(receives)

        def done() -> bool:
            nonlocal left
            for flat, peer in left:
                if waiting := hub.messages[peer, self.rank]:
                    assert waiting[0].numel() == flat.numel(), "two ranks disagree on the bytes of a message"
                    flat.copy_(waiting.popleft())
                    left = [message for message in left if message[0] is not flat]
            return not left and not any(
                flat is sent for peer, sent in posted for flat in list(hub.messages[self.rank, peer])
            )

        return FakeWork(self, done)

    def wait(self, done: Callable[[], bool], seconds: float, what: str) -> None:
        end = time.monotonic() + seconds
        while True:
            self._check()
            if done():
                return
            if time.monotonic() > end:
                self.abort(f"{what} took longer than {seconds:g} s")
            time.sleep(POLL)

    def abort(self, reason: str) -> None:
        if self.alive:
            self.alive, self.reason = False, reason

    def _check(self) -> None:
        if not self.alive:
            raise nccl.NcclError(self.reason)


def installed(monkeypatch: Any) -> None:
    """For trainer and fake engines of this process."""
    monkeypatch.setattr(nccl, "NcclLibrary", FakeLibrary)
    monkeypatch.setattr(nccl, "Communicator", FakeCommunicator)
