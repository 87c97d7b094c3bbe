"""gloo-delta, nccl-delta: what changed alone, over the transfer group with rltool's vLLM plugin.

The buckets, as patches or whole, travel as messages (rltool.engines.delta.messages) while the engine generates; it is
paused to load them. An engine is sent patches as long as its connection lives and misses no version: whatever else
happens to it, it is connected anew, and then sent all weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rltool.engines.delta.chain import File, Held
from rltool.engines.delta.messages import Kind, flat_of, header
from rltool.engines.types import Bucket, EngineInfo, HttpRequest, TensorMeta
from rltool.weights.memory import NONE, Memory
from rltool.weights.transport import Receiver, Rendezvous, SenderOptions, SenderTransport, Transport, TransportError
from rltool.weights.transports import vllm
from rltool.weights.transports.gloo import VllmGlooControl, VllmGlooSender
from rltool.weights.transports.nccl_sender import NcclSender, no_gpu
from rltool.weights.transports.nccl_vllm import PluginControl

REFUSAL = "cannot take patches over a transfer group (weights.delta): its backend is"


class _Sent:
    def wait(self, seconds: float) -> None: ...


class DeltaGroupSender(SenderTransport):
    """Sends what the encoder has made of each bucket, over the group of another sender."""

    device = torch.device("cpu")

    def __init__(self, group: SenderTransport, options: SenderOptions) -> None:
        assert options.encoder is not None, "WeightSender has one with weights.delta"
        self.encoder = self._encoder = options.encoder
        self._group, self._seconds = group, options.deadline
        self._held: Held | None = None
        """What the engine has taken over this connection."""
        self._version = ""
        self._shard = 0
        self._wholes: dict[int, File] | None = None
        self._largest = 0  # message of this version

    def host(self) -> Rendezvous:
        return self._group.host()

    def join(self, seconds: float) -> None:
        self._group.join(seconds)

    @property
    def memory(self) -> Memory:
        """The message on the trainer's GPU."""
        return NONE if self._group.device == self.device else Memory.on(self._group.device, self._largest)

    def begin(self, version: str, buckets: Sequence[Bucket]) -> None:
        base = self._encoder.base
        self._wholes = None if base is not None and base == self._held else {}
        self._version, self._shard, self._largest = version, 0, 0

    def send(self, bucket: Bucket, flat: Tensor) -> _Sent:
        part = self._encoder.part(self._shard)
        if part is None:
            raise TransportError("this connection was aborted, and the others have gone on")
        if self._wholes is None:
            self._send(Kind.PATCH, flat_of(part.patch))
        else:
            self._send(Kind.WHOLE, flat)
            self._wholes[self._shard] = part.whole
        self._shard += 1
        return _Sent()

    def finish(self) -> None:
        manifest = self._encoder.manifest(self._wholes)
        self._send(Kind.MANIFEST, flat_of(manifest.to_json()))
        self._held = manifest.held

    def abort(self, reason: str) -> None:
        self._group.abort(reason)

    def close(self) -> None:
        self._group.close()

    def _send(self, kind: Kind, flat: Tensor) -> None:
        self._largest = max(self._largest, flat.numel())
        for each in (header(kind, flat.numel()), flat):
            bucket = (TensorMeta("message", "uint8", (each.numel(),)),)
            self._group.begin(self._version, [bucket])
            self._group.send(bucket, each.to(self._group.device)).wait(self._seconds)


class GlooDeltaSender(DeltaGroupSender):
    def __init__(self, receiver: Receiver, options: SenderOptions) -> None:
        super().__init__(VllmGlooSender(receiver, options), options)


class NcclDeltaSender(DeltaGroupSender):
    def __init__(self, receiver: Receiver, options: SenderOptions) -> None:
        super().__init__(NcclSender(receiver, options), options)


class DeltaGroupControl(vllm.StagedControl):
    def prefetch(
        self, buckets: Sequence[Bucket], rendezvous: Rendezvous, *, version: str, seconds: float
    ) -> list[HttpRequest]:
        announced = vllm.buckets_info(buckets) | {"delta": True}
        body = {"version": version, "seconds": seconds, "announced": announced}
        return [HttpRequest("POST", "/rltool/prefetch", body)]


class GlooDeltaControl(DeltaGroupControl, VllmGlooControl):
    """The group is that of whole weights over gloo."""


class NcclDeltaControl(DeltaGroupControl, PluginControl):
    """The group is that of whole weights over NCCL."""


def _gloo_obstacle(info: EngineInfo, trainer_device: str) -> str | None:
    return vllm.without_plugin(info, REFUSAL)


def _nccl_obstacle(info: EngineInfo, trainer_device: str) -> str | None:
    return vllm.without_plugin(info, REFUSAL) or no_gpu(info, trainer_device)


GLOO = Transport(GlooDeltaSender, GlooDeltaControl(), _gloo_obstacle)
NCCL = Transport(NcclDeltaSender, NcclDeltaControl(), _nccl_obstacle)
