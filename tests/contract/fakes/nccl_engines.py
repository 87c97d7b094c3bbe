"""The engines' side of NCCL transfer, as their fakes have it: all workers of one engine, in a thread of its server."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from rltool.engines.transfer import nccl
from rltool.engines.transfer.wire import bucket_bytes, split_flat
from rltool.engines.types import Bucket

SECONDS = 10.0


class Workers:
    """One communicator rank each. They all receive the same, which is checked. before_each: called before each
    broadcast; what it raises is that broadcast's failure."""

    def __init__(
        self, unique_id: bytes, rank_offset: int, world_size: int, count: int, seconds: float = SECONDS
    ) -> None:
        self.before_each: Callable[[], None] = lambda: None
        self._seconds = seconds
        self.ranks = [
            nccl.Communicator(
                nccl.NcclLibrary(), unique_id, world_size, rank_offset + i, torch.device("cpu"), seconds=seconds
            )
            for i in range(count)
        ]
        for rank in self.ranks:
            rank.join(seconds)

    def receive(self, num_bytes: int) -> torch.Tensor:
        self.before_each()
        flats = [torch.empty(num_bytes, dtype=torch.uint8) for _ in self.ranks]
        works = [rank.broadcast(flat) for rank, flat in zip(self.ranks, flats, strict=True)]
        for work in works:
            work.wait(self._seconds)
        assert all(torch.equal(flat, flats[0]) for flat in flats)
        return flats[0]

    def receive_buckets(self, buckets: Iterable[Bucket]) -> Iterator[tuple[str, torch.Tensor]]:
        for bucket in buckets:
            size = bucket_bytes(bucket)
            yield from split_flat(self.receive(size) if size else torch.empty(0, dtype=torch.uint8), bucket)

    def shutdown(self) -> None:
        for rank in self.ranks:
            rank.abort("the engine left")


class StockVllmTransfer:
    """vLLM 0.32's own backend "nccl", packed: sessions, chunks, and what a failed update leaves behind.

    tensors: what the model computes with; refuse: a name that the model does not have.
    """

    INIT_FIELDS = frozenset(
        {"nccl_unique_id_b64", "rank_offset", "world_size", "packed", "packed_buffer_size_bytes", "packed_num_buffers"}
    )

    def __init__(self, workers: int) -> None:
        self._count = workers
        self.tensors: dict[str, torch.Tensor] = {}
        self.refuse: str | None = None
        self.active = False
        self._half_loaded: dict[str, torch.Tensor] = {}
        self.workers: Workers | None = None
        self._limit = 0

    def init(self, info: dict[str, Any]) -> None:
        unknown = info.keys() - self.INIT_FIELDS
        if unknown:
            raise ValueError(f"Invalid init_info for NCCLWeightTransferEngine: unexpected keyword argument {unknown}")
        unique_id = base64.b64decode(info["nccl_unique_id_b64"], validate=True)
        assert info["packed"] and len(unique_id) == 128
        self._limit = info["packed_buffer_size_bytes"]
        self.workers = Workers(unique_id, info["rank_offset"], info["world_size"], self._count)

    def start(self) -> None:
        if self.active:
            raise RuntimeError("start_weight_update called while a weight update is already active.")
        self.active = True

    def update(self, info: dict[str, Any]) -> None:
        if not self.active:
            raise RuntimeError("start_weight_update must be called before update_weights.")
        try:
            for names, flat in self._chunks(info):
                self._load(names, flat)
        except Exception:
            self.active = False
            raise

    def finish(self) -> None:
        if not self.active:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update.")
        self.active = False
        self.tensors |= self._half_loaded
        self._half_loaded = {}

    def shutdown(self) -> None:
        if self.active:
            raise RuntimeError("Cannot release a trainer connection during a weight update")
        workers, self.workers = self.workers, None
        if workers is not None:
            workers.shutdown()

    def _chunks(self, info: dict[str, Any]) -> Iterator[tuple[list[tuple[str, torch.dtype, list[int]]], torch.Tensor]]:
        """As packed_nccl_broadcast_consumer cuts them: a chunk ends with the tensor that makes it too large."""
        assert self.workers is not None, "NCCL weight transfer not initialized."
        waiting, size = [], 0
        for name, dtype_name, shape in zip(info["names"], info["dtype_names"], info["shapes"], strict=True):
            dtype = getattr(torch, dtype_name)
            waiting.append((name, dtype, shape))
            size += math.prod(shape) * dtype.itemsize
            if size > self._limit:
                yield waiting, self.workers.receive(size)
                waiting, size = [], 0
        if waiting:
            yield waiting, self.workers.receive(size)

    def _load(self, metas: list[tuple[str, torch.dtype, list[int]]], flat: torch.Tensor) -> None:
        start = 0
        for name, dtype, shape in metas:
            end = start + math.prod(shape) * dtype.itemsize
            tensor = flat[start:end].view(dtype).view(shape)
            start = end
            if name == self.refuse:
                self.refuse = None
                raise ValueError(f"There is no module or parameter named {name}")
            # A layer that a failed update has half loaded takes no tensor a second time.
            self._half_loaded.setdefault(name, tensor.clone())
