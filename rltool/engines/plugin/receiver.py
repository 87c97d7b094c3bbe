"""The receiving end of weight transfer inside each vLLM worker: vLLM's weight-transfer backend "rltool".

It joins the trainer's group or reads safetensors files (the contract is rltool.engines.transfer.wire, the ways in are
rltool.engines.plugin.channels), feeds the tensors to the model (rltool.engines.plugin.loading), and accepts an update
only if every tensor was taken and every layer is complete. Errors raised here reach the trainer as the reply to its
HTTP request.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from rltool.engines.plugin import reload
from rltool.engines.plugin.adapters import Placing
from rltool.engines.plugin.channels import (
    ChannelError,
    FlatChannel,
    GlooChannel,
    IpcChannel,
    NcclChannel,
    read_bucket_file,
    receive_bytes,
)
from rltool.engines.plugin.loading import Loader, WeightUpdateError
from rltool.engines.plugin.prefetch import NotFetched, Prefetcher, Prepare
from rltool.engines.plugin.sharded import ShardedChannel, open_shards
from rltool.engines.transfer import ipc
from rltool.engines.types import Bucket, TensorMeta

NEEDED = {
    "gloo": ("address", "port", "group", "timeout_seconds"),
    "gloo-sharded": ("stores", "group", "timeout_seconds"),
    "nccl": ("unique_id", "nccl_version", "timeout_seconds"),
    "nccl-sharded": ("stores", "unique_id", "nccl_version", "timeout_seconds"),
    "ipc": ("handles",),
    "ipc-sharded": ("stores", "timeout_seconds"),
    "disk": (),
    "disk-sharded": (),
    "delta": (),
}
"""Transport -> the fields of its init info that must be there; of those with RANKED a rank as well."""
RANKED = ("gloo", "gloo-sharded", "nccl", "nccl-sharded", "ipc-sharded")


@dataclass
class InitInfo(WeightTransferInitInfo):
    """See rltool.engines.transfer.wire."""

    transport: str
    address: str = ""
    port: int = 0
    rank_offset: int = 1
    world_size: int = 0
    group: str = ""
    timeout_seconds: float = 0.0
    unique_id: str = ""
    nccl_version: int = 0
    handles: dict[str, str] = field(default_factory=dict)
    stores: list[tuple[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.transport not in NEEDED:
            raise ValueError(f"transport {self.transport!r} is none of {', '.join(NEEDED)}")
        for name in NEEDED[self.transport]:
            if not getattr(self, name):
                raise ValueError(f"init info of transport {self.transport} lacks {name!r}")
        if self.transport in RANKED and not 1 <= self.rank_offset < self.world_size:
            raise ValueError(f"rank_offset {self.rank_offset} does not lie within 1 and world_size {self.world_size}")


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    path: str | None = None
    version: str | None = None
    bucket_sizes: list[int] | None = None
    delta: bool = False

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.dtypes) == len(self.shapes):
            raise ValueError(
                f"{len(self.names)} names, {len(self.dtypes)} dtypes and {len(self.shapes)} shapes were announced"
            )
        if self.bucket_sizes is not None and sum(self.bucket_sizes) != len(self.names):
            raise ValueError(f"buckets of {self.bucket_sizes} tensors were announced, with {len(self.names)} names")

    def buckets(self) -> list[Bucket]:
        """The announced tensors; all are one bucket where bucket_sizes does not cut them."""
        metas = tuple(TensorMeta(n, d, tuple(s)) for n, d, s in zip(self.names, self.dtypes, self.shapes, strict=True))
        if self.bucket_sizes is None:
            return [metas]
        buckets, start = [], 0
        for size in self.bucket_sizes:
            buckets.append(metas[start : start + size])
            start += size
        return buckets


class WeightReceiver(WeightTransferEngine[InitInfo, UpdateInfo]):
    """One per worker."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._transport: str | None = None
        self._channel: FlatChannel | None = None
        self._shards: ShardedChannel | None = None
        self.prefetcher = Prefetcher(pin=self.device.type != "cpu")
        self.placing: Placing | None = None
        """Of the adapter that was asked for last."""
        self._loader = Loader(reload, pipeline_stage=self.parallel_config.pipeline_parallel_size > 1)

    @property
    def changed(self) -> bool:
        """True from the first tensor of an update until it is finished: the weights are then a mixture."""
        return self._loader.changed

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join the trainer's group; the old one, of this trainer or of one that died, is left first."""
        self.shutdown()
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        if init_info.transport == "gloo":
            self._channel = GlooChannel(
                init_info.address,
                init_info.port,
                rank=rank,
                world_size=init_info.world_size,
                group=init_info.group,
                timeout_seconds=init_info.timeout_seconds,
            )
        elif init_info.transport == "nccl":
            self._channel = NcclChannel(
                base64.b64decode(init_info.unique_id, validate=True),
                trainer_version=init_info.nccl_version,
                rank=rank,
                world_size=init_info.world_size,
                device=self.device,
                timeout_seconds=init_info.timeout_seconds,
            )
        elif init_info.transport == "ipc":
            self._channel = IpcChannel(init_info.handles, ipc.gpu_uuid(self.device), self.device)
        elif init_info.transport.endswith("-sharded"):
            gpu, needs_of = partial(ipc.gpu_uuid, self.device), partial(self._loader.needs, self.model)
            self._shards = open_shards(init_info, rank, self.device, gpu, needs_of)
        self._transport = init_info.transport

    def prefetch(
        self, version: str, seconds: float, source: str | dict[str, Any], prepare: Prepare | None = None
    ) -> None:
        """Begin to get `version` beside generation: from the store of this address, or as the trainer announces it;
        `prepare` is done with it there. Raises NotFetched."""
        if isinstance(source, str):
            self.prefetcher.fetch(source, version, seconds, prepare)
            return
        info, channel = self.parse_update_info(source), self._channel
        buckets = info.buckets()
        if channel is None:
            raise NotFetched("no transfer group is open: /init_weight_transfer_engine comes first")
        if info.delta:
            self.prefetcher.take(partial(receive_bytes, channel), buckets, version, seconds)
            return

        def received() -> Iterator[tuple[Bucket, torch.Tensor]]:
            # An adapter is put in its place before the request is answered: the trainer's memory needs no copy.
            whole = channel.lying(buckets) if isinstance(channel, IpcChannel) else channel.receive(buckets)
            with closing(whole) as arriving:
                yield from arriving

        self.prefetcher.receive(received, version, seconds, prepare)

    def start_weight_update(self) -> None:
        if self._transport is None:
            raise WeightUpdateError("no transfer was initialised: /init_weight_transfer_engine comes first")
        self._loader.start(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # Not the base class's: that one calls torch.accelerator.synchronize(), which raises where there is no
        # accelerator.
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        try:
            if self._transport == "disk":
                self._load_file(update_info)
            elif update_info.version is not None:
                self._load_fetched(update_info.version)
            else:
                self._receive(update_info)
        except ChannelError as error:
            self._loader.abandon(self.model)
            if error.broken:
                self.shutdown()
            raise WeightUpdateError(str(error)) from error
        except NotFetched as error:
            self._loader.abandon(self.model)
            raise WeightUpdateError(str(error)) from error
        except BaseException:
            self._loader.abandon(self.model)
            raise

    def finish_weight_update(self) -> None:
        try:
            self._loader.finish(self.model, self.model_config)
            self.prefetcher.forget()
        except BaseException:
            self._loader.abandon(self.model)
            raise

    def abandon(self) -> None:
        """End an update that will not be finished."""
        self._loader.abandon(self.model)

    def shutdown(self) -> None:
        self.prefetcher.forget()
        if self.placing is not None:
            self.placing.give_up()
        channels = self._channel, self._shards
        self._channel = self._shards = self._transport = None
        for channel in channels:
            if channel is not None:
                channel.close()

    def _receive(self, update_info: UpdateInfo) -> None:
        if self._shards is not None:
            for bucket in update_info.buckets():
                boxes = self._shards.receive_boxes(bucket, update_info.path)
                self._loader.load_boxes(self.model, bucket, boxes)
            return
        if self._channel is None:
            raise WeightUpdateError("no transfer group is open: /init_weight_transfer_engine comes first")
        with closing(self._channel.receive(update_info.buckets())) as arriving:
            for bucket, flat in arriving:
                self._loader.load_flat(self.model, bucket, flat)

    def _load_fetched(self, version: str) -> None:
        for bucket, flat in self.prefetcher.buckets(version):
            self._loader.load_flat(self.model, bucket, flat.to(self.device, non_blocking=True))

    def _load_file(self, update_info: UpdateInfo) -> None:
        if update_info.path is None:
            raise WeightUpdateError("a bucket that travels over the disk was announced without its path")
        for bucket in update_info.buckets():
            self._loader.load_named(self.model, read_bucket_file(bucket, update_info.path))
