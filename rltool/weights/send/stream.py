"""The stream of named tensors: metadata first, then buckets of bounded size, each one flat run of bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from rltool.engines.transfer.wire import bucket_bytes
from rltool.engines.types import Bucket
from rltool.errors import RltoolError
from rltool.megatron.export_plan import Stream


class WeightStreamError(RltoolError):
    """The tensors that came do not match the metadata that was announced."""


def fill_buckets(
    stream: Stream, buckets: Sequence[Bucket], take: Callable[[int], Tensor]
) -> Iterator[tuple[Bucket, Tensor | None]]:
    """Pair each bucket with its bytes, its tensors back to back; None on ranks that do not send.

    take: size -> memory for a bucket, [size] uint8, asked for when its first tensor is there. The stream is drained to
    its end on every rank. Raises WeightStreamError for a tensor of another name, dtype or shape than announced, or for
    too few or too many. Copies to pinned memory may still be in progress: see BucketBuffers.filled.
    """
    source = iter(stream)
    for bucket in buckets:
        flat: Tensor | None = None
        at = 0
        for expected in bucket:
            meta, tensor = next(source, (None, None))
            if meta != expected:
                raise WeightStreamError(f"expected {expected}, the stream gave {meta or 'nothing more'}")
            if tensor is None:
                continue
            if tuple(tensor.shape) != expected.shape or str(tensor.dtype) != f"torch.{expected.dtype}":
                raise WeightStreamError(f"expected {expected}, the tensor is {tensor.dtype} {tuple(tensor.shape)}")
            if flat is None:
                flat = take(bucket_bytes(bucket))
            raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            flat[at : at + raw.numel()].copy_(raw, non_blocking=True)
            at += raw.numel()
            del tensor, raw  # they may keep the whole buffer of a gather, and the next one is gathered now
        if flat is not None and at != flat.numel():
            raise WeightStreamError(f"a bucket of {flat.numel()} bytes got {at}")
        yield bucket, flat
    if (extra := next(source, None)) is not None:
        raise WeightStreamError(f"the stream goes on after the last announced tensor, with {extra[0]}")


def named_tensors(stream: Stream) -> Iterator[tuple[str, Tensor]]:
    """On the rank that sends: name and tensor."""
    for meta, tensor in stream:
        assert tensor is not None, "the sending rank has all of them"
        yield meta.name, tensor
        del tensor
