"""The trainer's end of a connection over NCCL, for every engine: rank 0 of one communicator with its workers."""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from rltool.engines.transfer import nccl
from rltool.engines.transfer.wire import bucket_bytes
from rltool.engines.types import Bucket, EngineInfo
from rltool.weights.transport import Receiver, Rendezvous, SenderOptions, SenderTransport, TransportError

COMPLETE_SECONDS = 5.0
"""For each bucket that an engine still waits for when its sync is aborted: a living engine takes it at once."""


class NcclSender(SenderTransport):
    """Subclasses define where the engine finds the unique id, and when its ranks join.

    A worker that waits for a broadcast which never comes cannot be interrupted from outside, and an engine with such a
    worker has to be restarted. So an aborted sync is completed first, with any bytes, and fails
    all the same: the engine lives, and the trainer does not let it finish that update.
    """

    announced_ahead = True

    def __init__(self, receiver: Receiver, options: SenderOptions) -> None:
        self.receiver, self.options = receiver, options
        self.device = options.device
        self._library: nccl.NcclLibrary | None = None
        self._unique_id = b""
        self._communicator: nccl.Communicator | None = None
        self._owed: deque[Bucket] = deque()
        self._in_flight: deque[nccl.Work] = deque()
        self._given_up = ""

    @property
    def world_size(self) -> int:
        return 1 + self.receiver.world_size

    def host(self) -> Rendezvous:
        self._library = self.open_library()
        self.check_version(self._library.version())
        self._unique_id = self._library.unique_id()
        return self.rendezvous(self._unique_id, self._library.version())

    def open_library(self) -> nccl.NcclLibrary:
        return nccl.NcclLibrary()

    def check_version(self, version: int) -> None:
        """NcclError where the trainer's NCCL cannot serve this engine."""

    def rendezvous(self, unique_id: bytes, version: int) -> Rendezvous:
        return Rendezvous(
            self.receiver.backend,
            self.world_size,
            self.options.group,
            unique_id=base64.b64encode(unique_id).decode(),
            bucket_bytes=self.options.config.bucket_bytes,
            nccl_version=version,
        )

    def join(self, seconds: float) -> None:
        self.connect(seconds, warm_up=True)

    def connect(self, seconds: float, *, warm_up: bool) -> nccl.Communicator:
        """Blocks until all ranks of the communicator are there."""
        assert self._library is not None, "host comes first"
        self._communicator = communicator = nccl.Communicator(
            self._library, self._unique_id, self.world_size, 0, self.device, seconds=self.options.deadline
        )
        if self._given_up and not self._is_awaited():
            communicator.abort(self._given_up)
        communicator.join(seconds, warm_up=warm_up)
        return communicator

    def begin(self, version: str, buckets: Sequence[Bucket]) -> None:
        self._owed = deque(buckets)

    def send(self, bucket: Bucket, flat: Tensor) -> Sent:
        self._go_on()
        if flat.numel():
            self._in_flight.append(self._live().broadcast(flat))
        self._owed.popleft()
        return Sent(self, anything=flat.numel() > 0)

    def sent(self, seconds: float) -> None:
        """Wait for the bucket that went out first of those in flight; no longer once the sync is aborted."""
        self._in_flight[0].wait(seconds, check=self._go_on)
        self._in_flight.popleft()

    def finish(self) -> None:
        """Every broadcast has been waited for."""

    def abort(self, reason: str) -> None:
        self._given_up = reason or "aborted"
        communicator = self._communicator
        if communicator is not None and not self._is_awaited():
            communicator.abort(self._given_up)

    def close(self) -> None:
        communicator, self._communicator = self._communicator, None
        if communicator is None:
            return
        if self._is_awaited() and communicator.alive:
            self._complete(communicator)
        self._owed.clear()
        self._in_flight.clear()
        communicator.abort(self._given_up or "the transfer group was left")

    def _is_awaited(self) -> bool:
        """Whether workers of an engine that lives wait for a broadcast."""
        return bool(self._owed or self._in_flight)

    def _complete(self, communicator: nccl.Communicator) -> None:
        """All of them, even where the engine is asked for one at a time: it is asked for the next one until the rollout
        manager hears of the failure."""
        sizes = [size for size in map(bucket_bytes, self._owed) if size]
        self._owed.clear()
        try:
            while self._in_flight:
                self._in_flight.popleft().wait(COMPLETE_SECONDS)
            anything = torch.empty(max(sizes, default=0), dtype=torch.uint8, device=self.device)
            for size in sizes:
                communicator.broadcast(anything[:size]).wait(COMPLETE_SECONDS)
        except (nccl.NcclError, torch.OutOfMemoryError):
            pass  # the engine does not wait for it, or has died: then it is as it was

    def _go_on(self) -> None:
        if self._given_up:
            raise TransportError(self._given_up)

    def _live(self) -> nccl.Communicator:
        if self._communicator is None:
            raise TransportError("its transfer group has been left")
        return self._communicator


class Sent:
    """See transport.Work. anything: the bucket has bytes."""

    def __init__(self, sender: NcclSender, *, anything: bool) -> None:
        self._sender, self._anything = sender, anything

    def wait(self, seconds: float) -> None:
        if self._anything:
            self._sender.sent(seconds)


def no_gpu(info: EngineInfo, trainer_device: str) -> str | None:
    """Which side lacks the GPU that NCCL needs; None: none does, as far as the engine reports."""
    if trainer_device != "cuda":
        return 'cannot be sent weights over nccl by a trainer on the CPU: set weights.transport = "gloo"'
    if info.device == "cpu":
        return 'runs on the CPU, where there is no NCCL: set weights.transport = "gloo", or leave it at "auto"'
    return None
