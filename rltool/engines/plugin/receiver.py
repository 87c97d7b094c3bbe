"""The receiving end of weight transfer inside each vLLM worker: vLLM's weight-transfer backend "rltool".

It joins the trainer's gloo group or reads safetensors files (the contract is rltool.engines.wire), feeds the tensors to
the model's own load_weights, and accepts an update only if every tensor was taken and every layer is complete. Errors
raised here reach the trainer as the reply to its HTTP request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from rltool.engines import wire
from rltool.engines.plugin import reload
from rltool.engines.types import Bucket, TensorMeta

NAMED_IN_ERRORS = 5
"""How many of the missing layers an error lists."""


class WeightUpdateError(RuntimeError):
    """An update that cannot be applied; the text goes to the trainer."""


@dataclass
class InitInfo(WeightTransferInitInfo):
    """See rltool.engines.wire. All fields but `transport` belong to gloo."""

    transport: str
    address: str = ""
    port: int = 0
    rank_offset: int = 1
    world_size: int = 0
    group: str = ""
    timeout_seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.transport not in ("gloo", "disk"):
            raise ValueError(f"transport {self.transport!r} is neither gloo nor disk")
        if self.transport == "gloo":
            for name in ("address", "port", "group", "timeout_seconds"):
                if not getattr(self, name):
                    raise ValueError(f"init info of transport gloo lacks {name!r}")
            if not 1 <= self.rank_offset < self.world_size:
                raise ValueError(
                    f"rank_offset {self.rank_offset} does not lie within 1 and world_size {self.world_size}"
                )


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    path: str | None = None

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.dtypes) == len(self.shapes):
            raise ValueError(
                f"{len(self.names)} names, {len(self.dtypes)} dtypes and {len(self.shapes)} shapes were announced"
            )

    def bucket(self) -> Bucket:
        return tuple(TensorMeta(n, d, tuple(s)) for n, d, s in zip(self.names, self.dtypes, self.shapes, strict=True))


class WeightReceiver(WeightTransferEngine[InitInfo, UpdateInfo]):
    """One per worker. `changed` is true from the first tensor of an update until it is finished: the weights are then a
    mixture."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._transport: str | None = None
        self._group = None
        self._received: set[str] = set()
        self.changed = False

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join the trainer's group; the old one, of this trainer or of one that died, is left first."""
        self.shutdown()
        if init_info.transport == "gloo":
            parallel = self.parallel_config
            rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
            self._group = wire.open_group(
                init_info.address,
                init_info.port,
                rank,
                init_info.world_size,
                init_info.group,
                init_info.timeout_seconds,
            )
        self._transport = init_info.transport

    def start_weight_update(self) -> None:
        if self._transport is None:
            raise WeightUpdateError("no transfer was initialised: /init_weight_transfer_engine comes first")
        reload.begin_reload(self.model)
        self._received = set()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # Not the base class's: that one calls torch.accelerator.synchronize(), which raises where there is no
        # accelerator.
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        try:
            bucket = update_info.bucket()
            named = self._read_file(bucket, update_info.path) if self._transport == "disk" else self._receive(bucket)
            self._load(named)
        except BaseException:
            reload.abandon_reload(self.model)
            raise

    def finish_weight_update(self) -> None:
        try:
            missing = reload.missing_layers(self.model)
            if missing:
                more = f" and {len(missing) - NAMED_IN_ERRORS} more" if len(missing) > NAMED_IN_ERRORS else ""
                raise WeightUpdateError(f"the update is incomplete: {', '.join(missing[:NAMED_IN_ERRORS])}{more}")
            reload.finish_reload(self.model, self.model_config)
        except BaseException:
            reload.abandon_reload(self.model)
            raise
        self._received = set()
        self.changed = False

    def abandon(self) -> None:
        """End an update that will not be finished."""
        reload.abandon_reload(self.model)
        self._received = set()

    def shutdown(self) -> None:
        group, self._group, self._transport = self._group, None, None
        if group is not None:
            group.shutdown()

    def _receive(self, bucket: Bucket) -> list[tuple[str, torch.Tensor]]:
        if self._group is None:
            raise WeightUpdateError("no transfer group is open: /init_weight_transfer_engine comes first")
        flat = torch.empty(wire.bucket_bytes(bucket), dtype=torch.uint8)
        try:
            wire.broadcast(self._group, flat)
        except RuntimeError as error:
            self.shutdown()  # gloo's connections are of no use after a timeout or a lost peer
            raise WeightUpdateError(
                f"the broadcast of {flat.numel()} bytes from the trainer failed: {error}"
            ) from error
        return wire.split_flat(flat, bucket)

    def _read_file(self, bucket: Bucket, path: str | None) -> list[tuple[str, torch.Tensor]]:
        from safetensors.torch import load_file

        if path is None:
            raise WeightUpdateError("a bucket that travels over the disk was announced without its path")
        try:
            tensors = load_file(path)
        except Exception as error:  # the library raises its own type, OSError or whatever the header provokes
            raise WeightUpdateError(
                f"cannot read {path}: {error} (the engine must see the trainer's file system)"
            ) from error
        found = {name: wire.meta_of(name, tensor) for name, tensor in tensors.items()}
        wrong = [meta.name for meta in bucket if found.get(meta.name) != meta]
        wrong += sorted(found.keys() - {meta.name for meta in bucket})
        if wrong:
            raise WeightUpdateError(
                f"{path} does not hold what was announced: {wrong[0]} is missing, surplus or of another form"
            )
        return [(meta.name, tensors[meta.name]) for meta in bucket]

    def _load(self, named: list[tuple[str, torch.Tensor]]) -> None:
        """Hand over one tensor at a time, so that an error and a tensor that nobody takes have a name."""
        # A pipeline stage rightly ignores the tensors of the others.
        all_mine = self.parallel_config.pipeline_parallel_size == 1
        for name, tensor in named:
            if name in self._received:
                raise WeightUpdateError(f"{name} was sent twice in one update")
            self._received.add(name)
            self.changed = True
            try:
                taken = cast(Any, self.model).load_weights([(name, tensor)])
            except Exception as error:  # a model's loaders assert, or raise whatever they like
                what = str(error) or "its loader refused it, for its shape or dtype"
                raise WeightUpdateError(
                    f"{name} {tensor.dtype} {list(tensor.shape)}: {type(error).__name__}: {what}"
                ) from error
            if all_mine and not taken:
                raise WeightUpdateError(f"the model of this engine has no use for {name} {list(tensor.shape)}")
