"""What SGLang's /update_weights_from_tensor takes: a pickle for each of its ranks, of tensors that it opens by CUDA
IPC.

It is made without sglang, and of names alone that SGLang's own unpickler lets through. A tensor in memory of another
process is a call of torch's rebuild_cuda_tensor with 15 arguments: in place of the device's index SGLang takes a GPU's
UUID, in place of torch's own handle torch takes the 64 bytes of CUDA's. There is no reference counter and no event: the
trainer learns that a bucket was taken from the reply.

Sources: torch/multiprocessing/reductions.py (rebuild_cuda_tensor), torch/csrc/StorageSharing.cpp; of SGLang 0.5.17 to
0.5.23 srt/utils/patch_torch.py (the UUID), srt/utils/common.py (SafeUnpickler), srt/weight_sync/tensor_bucket.py.
"""

from __future__ import annotations

import base64
import pickle
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from rltool.engines.transfer.wire import bucket_bytes, dtype_of, tensor_bytes
from rltool.engines.types import Bucket

NOTHING = bytes(64)
"""For the name of a reference counter, and for an event's handle."""


@dataclass(frozen=True)
class _Shared:
    """A uint8 tensor of `size` bytes at the beginning of memory of `memory_bytes`, as it is pickled."""

    size: int
    gpu: str
    handle: bytes
    memory_bytes: int

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild_cuda_tensor, (
            torch.Tensor, (self.size,), (1,), 0,  # class, size, stride, offset
            torch.storage.TypedStorage, torch.uint8, self.gpu, self.handle, self.memory_bytes, 0,  # its storage
            False, NOTHING, 0, NOTHING, False,  # gradient, reference counter with its offset, event, waiting for that
        )  # fmt: skip


def serialized_bucket(bucket: Bucket, gpu: str, handle: str, memory_bytes: int) -> str:
    """Base64 of the pickle of one bucket for the rank on `gpu`. handle: base64 of the 64 bytes; memory_bytes: of the
    largest bucket, for SGLang keeps what it has opened by handle as long as one tensor in it lives."""
    metadata, start = [], 0
    for meta in bucket:
        end = start + tensor_bytes(meta)
        metadata.append(
            SimpleNamespace(
                name=meta.name, shape=meta.shape, dtype=dtype_of(meta.dtype), start_idx=start, end_idx=end,
                numel=end - start,
            )
        )  # fmt: skip
        start = end
    flat = _Shared(bucket_bytes(bucket), gpu, base64.b64decode(handle), memory_bytes)
    return base64.b64encode(pickle.dumps({"flattened_tensor": flat, "metadata": metadata})).decode()
