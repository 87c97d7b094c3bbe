"""gloo: through the hosts' memory and over TCP, to rltool's vLLM plugin and to SGLang.

One group per engine, not one for all: engines of different kinds rendezvous differently, and one that dies takes only
its own group with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  # public

from rltool.engines.transfer import wire
from rltool.engines.types import Bucket, EngineInfo, HttpRequest
from rltool.weights.transport import Receiver, Rendezvous, SenderOptions, SenderTransport, Transport, TransportError
from rltool.weights.transports import sglang, vllm
from rltool.weights.transports.rendezvous import host_rendezvous
from rltool.weights.transports.sglang_group import open_sglang_group


class _Sent:
    """A broadcast. The group's own timeout ends it, with an error that names the peer."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self, seconds: float) -> None:
        self._work.wait()


class _Nothing:
    def wait(self, seconds: float) -> None: ...


class GlooSender(SenderTransport):
    """See SenderTransport. A blocked gloo call ends with its timeout, or once the engine has left the group: torch has
    no way to abort it."""

    device = torch.device("cpu")

    def __init__(self, receiver: Receiver, options: SenderOptions) -> None:
        self.receiver, self.options = receiver, options
        self._store: TCPStore | None = None
        self._group: Any = None
        self._aborted: str | None = None

    def host(self) -> Rendezvous:
        options = self.options
        address, self._store = host_rendezvous(self.receiver.url, options.config, options.deadline)
        return Rendezvous("gloo", 1 + self.receiver.world_size, options.group, address, self._store.port)

    def join(self, seconds: float) -> None:
        assert self._store is not None, "host comes first"
        group = self.open(self._store, seconds)
        if self._aborted is not None:  # while it was blocked: the engine is to join another one
            raise TransportError(self._aborted)
        self._group = group

    def open(self, store: TCPStore, seconds: float) -> Any:
        raise NotImplementedError

    def begin(self, version: str, buckets: Sequence[Bucket]) -> None: ...

    def send(self, bucket: Bucket, flat: Tensor) -> _Sent | _Nothing:
        if self._aborted is not None:
            raise TransportError(self._aborted)
        return _Sent(self._group.broadcast(flat, 0))

    def finish(self) -> None: ...

    def abort(self, reason: str) -> None:
        # The group stays: its destructor waits for a broadcast in flight, and holds the GIL meanwhile.
        self._aborted = reason

    def close(self) -> None:
        """A dropped group or store is closed by its destructor."""
        self._group = self._store = None


class VllmGlooSender(GlooSender):
    """Into rltool's plugin: the contract is rltool.engines.transfer.wire."""

    def open(self, store: TCPStore, seconds: float) -> Any:
        world_size = 1 + self.receiver.world_size
        return wire.open_group(store.host, store.port, 0, world_size, self.options.group, seconds, store=store)

    def send(self, bucket: Bucket, flat: Tensor) -> _Sent | _Nothing:
        return super().send(bucket, flat) if flat.numel() else _Nothing()


class SglangGlooSender(GlooSender):
    def open(self, store: TCPStore, seconds: float) -> Any:
        return open_sglang_group(store, 1 + self.receiver.world_size, self.options.group, seconds)


class VllmGlooControl(vllm.VllmControl):
    def init(self, rendezvous: Rendezvous, *, rank_offset: int, timeout_seconds: float) -> list[HttpRequest]:
        return [
            vllm.init_request(
                transport="gloo",
                address=rendezvous.address,
                port=rendezvous.port,
                rank_offset=rank_offset,
                world_size=rendezvous.world_size,
                group=rendezvous.group,
                timeout_seconds=timeout_seconds,
            )
        ]

    def announce(
        self, buckets: Sequence[Bucket], rendezvous: Rendezvous, *, version: str
    ) -> list[tuple[HttpRequest, int]]:
        """Each bucket is received while its request is open."""
        return [(vllm.bucket_request(bucket), 1) for bucket in buckets]


class StagedVllmGlooControl(vllm.StagedControl, VllmGlooControl):
    """The buckets of a whole version lie in the host's memory until they are loaded."""


class SglangGlooControl(sglang.SglangControl):
    def init(self, rendezvous: Rendezvous, *, rank_offset: int, timeout_seconds: float) -> list[HttpRequest]:
        return [sglang.join_request(rendezvous, rank_offset, "gloo")]

    def announce(
        self, buckets: Sequence[Bucket], rendezvous: Rendezvous, *, version: str
    ) -> list[tuple[HttpRequest, int]]:
        return [(sglang.bucket_request(bucket, rendezvous.group), 1) for bucket in buckets]


def _vllm_obstacle(info: EngineInfo, trainer_device: str) -> str | None:
    if info.weight_backend is not None and info.weight_backend != "rltool":
        return (
            f"offers the weight backend {info.weight_backend!r}, but gloo needs rltool's own: start it with `rltool "
            "serve-engines --weight-backend rltool`"
        )
    return vllm.no_transfer(info)


def _sglang_obstacle(info: EngineInfo, trainer_device: str) -> str | None:
    return sglang.data_parallel(info)


VLLM = Transport(VllmGlooSender, VllmGlooControl(), _vllm_obstacle, staged=StagedVllmGlooControl())
SGLANG = Transport(SglangGlooSender, SglangGlooControl(), _sglang_obstacle)
