"""The stream of named tensors: metadata first, then buckets of bounded size, each one flat run of bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from rltool.engines.types import Bucket, TensorMeta
from rltool.engines.wire import bucket_bytes
from rltool.errors import RltoolError


class WeightStreamError(RltoolError):
    """The tensors that came do not match the metadata that was announced."""


def flatten(tensors: Iterable[Tensor], total: int, device: torch.device | str) -> Tensor:
    """The bytes of the tensors back to back: [total] uint8 on `device`."""
    flat = torch.empty(total, dtype=torch.uint8, device=device)
    at = 0
    for tensor in tensors:
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        flat[at : at + raw.numel()] = raw
        at += raw.numel()
    if at != total:
        raise WeightStreamError(f"a bucket of {total} bytes got {at}")
    return flat


def fill_buckets(
    stream: Iterable[tuple[TensorMeta, Tensor | None]], buckets: Sequence[Bucket], device: torch.device | str = "cpu"
) -> Iterator[tuple[Bucket, Tensor | None]]:
    """Pair each bucket with its bytes ([bytes] uint8), one bucket in memory at a time; None on ranks that do not send.

    stream: (metadata, tensor) in the announced order, tensor None on all but the sending rank. It is drained to its end
    on every rank, because producing it is a collective. Raises WeightStreamError for a tensor of another name, dtype or
    shape than announced, or for too few or too many.
    """
    source = iter(stream)
    for bucket in buckets:
        tensors: list[Tensor] = []
        for expected in bucket:
            meta, tensor = next(source, (None, None))
            if meta != expected:
                raise WeightStreamError(f"expected {expected}, the stream gave {meta or 'nothing more'}")
            if tensor is not None:
                if tuple(tensor.shape) != expected.shape or str(tensor.dtype) != f"torch.{expected.dtype}":
                    raise WeightStreamError(f"expected {expected}, the tensor is {tensor.dtype} {tuple(tensor.shape)}")
                tensors.append(tensor)
        yield bucket, flatten(tensors, bucket_bytes(bucket), device) if tensors else None
    if (extra := next(source, None)) is not None:
        raise WeightStreamError(f"the stream goes on after the last announced tensor, with {extra[0]}")
