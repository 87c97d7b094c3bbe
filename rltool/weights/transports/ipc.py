"""ipc: to engines on the trainer's own GPUs, each worker out of memory of the rank that is on its GPU.

A rank has one buffer for each engine, as large as the largest bucket, and exports it once. A bucket is copied into it,
the rollout manager notifies the engine, and when that has taken it the buffer is filled anew: the next bucket is
gathered meanwhile. NCCL is no way: it joins no two processes on one GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rltool.engines.transfer import ipc
from rltool.engines.transfer.wire import bucket_bytes
from rltool.engines.types import Bucket, EngineInfo, HttpRequest
from rltool.errors import EngineError
from rltool.weights.memory import NONE, Memory
from rltool.weights.transport import Receiver, Rendezvous, SenderOptions, SenderTransport, Transport, TransportError
from rltool.weights.transports import sglang, vllm
from rltool.weights.transports.sglang_tensors import serialized_bucket


class IpcSender(SenderTransport):
    """The channel's thread fills the buffer, and waits for `ready`."""

    def __init__(self, receiver: Receiver, options: SenderOptions) -> None:
        self.device = options.device
        self._receiver, self._options = receiver, options
        self._buffer: ipc.ExportedBuffer | None = None
        self._changed = threading.Condition()
        self._version: str | None = None  # that is being sent
        self._ended: str | None = None  # that was sent last
        self._own: Sequence[int] = ()  # numbers of its buckets of which something is sent from here
        self._filled = self._taken = 0  # how many of all its buckets so far
        self._given_up = ""

    def host(self) -> Rendezvous:
        options = self._options
        self._buffer = ipc.ExportedBuffer(options.largest_bucket, self.device)
        handles = {gpu: self._buffer.handle if gpu == options.gpu else "" for gpu in self._receiver.gpus}
        return Rendezvous("ipc", 1 + self._receiver.world_size, options.group, handles=handles)

    @property
    def memory(self) -> Memory:
        return NONE if self._buffer is None else Memory.on(self.device, self._options.largest_bucket)

    def join(self, seconds: float) -> None:
        """The engine opens the buffer by itself."""

    def begin(self, version: str, buckets: Sequence[Bucket]) -> None:
        with self._changed:
            self._version, self._ended = version, None
            self._own = [number for number, bucket in enumerate(buckets) if bucket]
            self._filled = self._taken = 0
            self._changed.notify_all()

    def send(self, bucket: Bucket, flat: Tensor) -> IpcSender:
        assert self._buffer is not None, "host comes first"
        self._buffer.flat[: flat.numel()].copy_(flat)
        if self.device.type == "cuda":  # another process reads it next
            torch.cuda.current_stream(self.device).synchronize()
        with self._changed:
            self._filled = 1 + next((number for number in self._own if number >= self._filled), self._filled)
            self._changed.notify_all()
        return self

    def wait(self, seconds: float) -> None:
        """Until the engine has taken the bucket."""
        self._wait_for(lambda: self._taken >= self._filled, seconds, "the engine did not take a bucket")

    def finish(self) -> None:
        """Every bucket was taken: the version is not to be found here when it is sent once more."""
        with self._changed:
            self._version, self._ended = None, self._version

    def ready(self, version: str, number: int, seconds: float) -> None:
        with self._changed:
            if self._version == version:
                self._taken = number
                self._changed.notify_all()

        def ready() -> bool:
            if number > max(self._own, default=-1):  # nothing more comes from here
                return version in (self._version, self._ended)
            return self._version == version and (self._filled > number or number not in self._own)

        self._wait_for(ready, seconds, "the trainer did not fill a bucket")

    def abort(self, reason: str) -> None:
        with self._changed:
            self._given_up = self._given_up or reason or "aborted"
            self._changed.notify_all()

    def close(self) -> None:
        self.abort("its transfer group has been left")
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            buffer.close()

    def _wait_for(self, done, seconds: float, what: str) -> None:
        with self._changed:
            in_time = self._changed.wait_for(lambda: self._given_up or done(), seconds)
            if self._given_up:
                raise TransportError(self._given_up)
        if not in_time:
            raise TransportError(f"{what} within {seconds:g} s")


class AdapterIpcSender(IpcSender):
    """Adapters are small: the buffer holds all buckets, back to back, and the engine takes them when they are there."""

    _filled_bytes = 0

    def host(self) -> Rendezvous:
        self._options = replace(self._options, largest_bucket=self._options.all_buckets)
        return super().host()

    def begin(self, version: str, buckets: Sequence[Bucket]) -> None:
        self._filled_bytes = 0

    def send(self, bucket: Bucket, flat: Tensor) -> AdapterIpcSender:
        assert self._buffer is not None, "host comes first"
        start, self._filled_bytes = self._filled_bytes, self._filled_bytes + flat.numel()
        self._buffer.flat[start : self._filled_bytes].copy_(flat)
        return self

    def wait(self, seconds: float) -> None:
        if self.device.type == "cuda":  # the bucket is filled anew, and another process reads the buffer
            torch.cuda.current_stream(self.device).synchronize()

    def finish(self) -> None: ...


def sender(receiver: Receiver, options: SenderOptions) -> IpcSender:
    """Of weights, or of adapters."""
    return (IpcSender if options.peft is None else AdapterIpcSender)(receiver, options)


class VllmIpcControl(vllm.VllmControl):
    acknowledged = True

    def init(self, rendezvous: Rendezvous, *, rank_offset: int, timeout_seconds: float) -> list[HttpRequest]:
        check_handles(rendezvous)
        return [vllm.init_request(transport="ipc", handles=rendezvous.handles)]

    def announce(
        self, buckets: Sequence[Bucket], rendezvous: Rendezvous, *, version: str
    ) -> list[tuple[HttpRequest, int]]:
        return [(vllm.bucket_request(bucket), 1) for bucket in buckets]


class VllmAdapterIpcControl(vllm.StagedControl, VllmIpcControl):
    """Adapters: all buckets lie in the trainer's memory until the request is answered."""

    after_send = True
    acknowledged = False


class SglangIpcControl(sglang.SglangControl):
    """Its workers open the buffer with each bucket, and close it when they have loaded that."""

    acknowledged = True

    def init(self, rendezvous: Rendezvous, *, rank_offset: int, timeout_seconds: float) -> list[HttpRequest]:
        check_handles(rendezvous)
        return []

    def announce(
        self, buckets: Sequence[Bucket], rendezvous: Rendezvous, *, version: str
    ) -> list[tuple[HttpRequest, int]]:
        size = max(map(bucket_bytes, buckets), default=0)
        return [(_from_tensor(bucket, rendezvous.handles, size), 1) for bucket in buckets]


def _from_tensor(bucket: Bucket, handles: dict[str, str], size: int) -> HttpRequest:
    """A rank of SGLang takes the payload at its own place. As with sglang.bucket_request, the version comes last."""
    sglang.check_alignment(bucket)
    body = {
        "serialized_named_tensors": [serialized_bucket(bucket, gpu, handle, size) for gpu, handle in handles.items()],
        "load_format": "flattened_bucket",
        "flush_cache": False,
    }
    return HttpRequest("POST", "/update_weights_from_tensor", body)


def check_handles(rendezvous: Rendezvous) -> None:
    """EngineError for an engine with a worker that no rank shares memory with."""
    workers, known = rendezvous.world_size - 1, len(rendezvous.handles)
    if known != workers:
        raise EngineError(f'has {workers} workers, and the GPUs of {known} are known: set weights.transport = "gloo"')
    without = [gpu for gpu, handle in rendezvous.handles.items() if not handle]
    if without:
        raise EngineError(
            f"no trainer rank shares memory on its GPU {', '.join(without)}: give the engine's group fewer GPUs (tp), "
            'raise trainer.world_size, or set weights.transport = "gloo"'
        )


def _obstacle(info: EngineInfo, trainer_device: str) -> str | None:
    if trainer_device != "cuda" or info.device == "cpu":
        return (
            'cannot be sent weights over ipc, for which trainer and engine need GPUs: leave weights.transport at "auto"'
        )
    return None


def _vllm_obstacle(info: EngineInfo, trainer_device: str) -> str | None:
    return vllm.without_plugin(info, "cannot open the trainer's memory: its backend is") or _obstacle(
        info, trainer_device
    )


def _sglang_obstacle(info: EngineInfo, trainer_device: str) -> str | None:
    return sglang.data_parallel(info) or _obstacle(info, trainer_device)


VLLM = Transport(
    sender, VllmIpcControl(), _vllm_obstacle, listens=False, senders="every", adapters=VllmAdapterIpcControl()
)
SGLANG = Transport(IpcSender, SglangIpcControl(), _sglang_obstacle, listens=False, senders="every")
