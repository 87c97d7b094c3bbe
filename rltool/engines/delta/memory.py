"""A copy of the weights in host memory, for engines that load tensors bucket by bucket."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from rltool.engines.delta.chain import Held, Manifest
from rltool.engines.transfer.wire import bucket_bytes, meta_of, split_flat
from rltool.engines.types import Bucket


class MemoryCopy:
    """See rltool.engines.delta.rebuild.Copy. Takes as much memory as the model's checkpoint.

    pin: in page-locked memory, from which copies to a GPU are several times as fast.
    """

    def __init__(self, *, pin: bool = False) -> None:
        self.held: Held | None = None
        self._pin = pin
        self._shards: dict[int, tuple[Bucket, Tensor]] = {}

    def fresh(self) -> MemoryCopy:
        """Another one, which holds nothing."""
        return MemoryCopy(pin=self._pin)

    def buckets(self) -> Iterator[tuple[Bucket, Tensor]]:
        """Each shard with its bytes, [bytes] uint8: all weights, in the same order every time."""
        for _, held in sorted(self._shards.items()):
            yield held

    def replaced(self, manifest: Manifest, model_files: Mapping[str, bytes]) -> None:
        self._shards = {shard: held for shard, held in self._shards.items() if shard < manifest.shards}

    def load(self, shard: int) -> dict[str, Tensor]:
        bucket, flat = self._shards[shard]
        return dict(split_flat(flat, bucket))

    def store(self, shard: int, tensors: dict[str, Tensor]) -> None:
        # The widest first, so that each is aligned for its dtype: what is changed in place must be no copy.
        order = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
        bucket = tuple(meta_of(name, tensor) for name, tensor in order)
        held = self._shards.get(shard)
        if held is None or held[0] != bucket:
            held = bucket, torch.empty(bucket_bytes(bucket), dtype=torch.uint8, pin_memory=self._pin)
            self._shards[shard] = held
        for name, place in split_flat(held[1], bucket):
            if place.data_ptr() != tensors[name].data_ptr():  # else it was changed where it is
                place.copy_(tensors[name])

    def complete(self, manifest: Manifest) -> None:
        pass
