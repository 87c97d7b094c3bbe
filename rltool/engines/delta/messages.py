"""A version of the weights as messages over a transfer group: their form, and how an engine takes them.

A message is a header, with its kind and length, and then its bytes; each of the two is one broadcast
of flat uint8. A version is a message for each bucket, in the announced order, and then its manifest
(rltool.engines.delta.chain), which has the sha256 of all of them.

- For an engine that holds the version before, a bucket is a PATCH: a file of what changed in it
  (rltool.engines.delta.patch), without bytes where nothing did.
- For every other engine it is WHOLE: the bucket's bytes.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum

import torch
from torch import Tensor

from rltool.engines.delta.chain import BadManifest, File, Manifest
from rltool.engines.delta.memory import MemoryCopy
from rltool.engines.delta.patch import BadPatch, apply_patch_file
from rltool.engines.delta.rebuild import CannotRebuild, Rebuilt
from rltool.engines.transfer.wire import bucket_bytes, split_flat
from rltool.engines.types import Bucket

_HEADER = struct.Struct("<qq")
MANIFEST_LIMIT = 64 * 1024 * 1024
PATCH_OVERHEAD = 512
"""Bytes of a patch file's own header, for each tensor and once, beside the tensors' names."""


class Kind(IntEnum):
    """What a message has. Zeros are none of them."""

    WHOLE = 1
    PATCH = 2
    MANIFEST = 3


Receive = Callable[[int], Tensor]
"""Size -> the bytes of the next broadcast, [size] uint8 on the CPU; of size 0 there is none."""


def header(kind: Kind, size: int) -> Tensor:
    """[16] uint8, before a message of `size` bytes."""
    return torch.frombuffer(bytearray(_HEADER.pack(kind, size)), dtype=torch.uint8)


def flat_of(data: bytes | None) -> Tensor:
    """A copy of `data`, [bytes] uint8."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def bytes_of(flat: Tensor) -> memoryview:
    """The memory of [bytes] uint8 on the CPU."""
    return flat.numpy().data


def take(copy: MemoryCopy, receive: Receive, buckets: Sequence[Bucket], version: str) -> Rebuilt:
    """Make `copy` hold `version`, from the messages that come.

    Patches are kept until the manifest is there, and change nothing before all of them are checked; whole buckets
    replace the copy as they come. Raises CannotRebuild: the copy then holds what it held, or nothing.
    """
    started = time.monotonic()
    patches: dict[int, Tensor] = {}
    wholes: dict[int, File] = {}
    for shard, bucket in enumerate(buckets):
        kind, flat = _message(receive, bucket)
        if kind is Kind.PATCH:
            patches[shard] = flat
            continue
        wholes[shard] = File.of(bytes_of(flat))
        copy.held = None
        copy.store(shard, dict(split_flat(flat, bucket)))
    manifest = _manifest(receive, version, len(buckets))
    if wholes:
        if manifest.anchor is None or manifest.anchor.files != wholes:
            raise CannotRebuild(f"weights {version} are not what was sent: the sha256 of a bucket differs")
        copy.replaced(manifest, {})
    else:
        changed = {shard: flat for shard, flat in patches.items() if flat.numel()}
        _check(manifest, copy, changed)
        copy.held = None
        _apply(copy, changed)
    copy.complete(manifest)
    copy.held = manifest.held
    size = sum(file.bytes for file in wholes.values()) + sum(flat.numel() for flat in patches.values())
    return Rebuilt(manifest.held, size, time.monotonic() - started, bool(wholes))


def _message(receive: Receive, bucket: Bucket) -> tuple[Kind, Tensor]:
    kind, size = _header(receive)
    longest = bucket_bytes(bucket) + PATCH_OVERHEAD * (1 + len(bucket)) + 8 * sum(len(meta.name) for meta in bucket)
    if not ((kind is Kind.WHOLE and size == bucket_bytes(bucket)) or (kind is Kind.PATCH and 0 <= size <= longest)):
        raise CannotRebuild(f"a message of kind {kind} and {size} bytes came for a bucket of {bucket_bytes(bucket)}")
    return kind, receive(size)


def _manifest(receive: Receive, version: str, shards: int) -> Manifest:
    kind, size = _header(receive)
    if kind is not Kind.MANIFEST or not 0 < size <= MANIFEST_LIMIT:
        raise CannotRebuild(f"a message of kind {kind} and {size} bytes came in place of the manifest")
    try:
        manifest = Manifest.from_json(bytes(bytes_of(receive(size))))
    except BadManifest as error:
        raise CannotRebuild(str(error)) from error
    if (manifest.version, manifest.shards) != (version, shards):
        raise CannotRebuild(
            f"weights {manifest.version} of {manifest.shards} buckets came, and {version} of {shards} were announced"
        )
    return manifest


def _header(receive: Receive) -> tuple[Kind | int, int]:
    kind, size = _HEADER.unpack(bytes_of(receive(_HEADER.size)))
    return (Kind(kind) if kind in list(Kind) else kind), size


def _check(manifest: Manifest, copy: MemoryCopy, changed: Mapping[int, Tensor]) -> None:
    patch = manifest.patch
    if patch is None or patch.base != copy.held:
        wanted = patch.base if patch else None
        raise CannotRebuild(f"the patches to weights {manifest.version} are for {wanted}, and it holds {copy.held}")
    if patch.files != {shard: File.of(bytes_of(flat)) for shard, flat in changed.items()}:
        raise CannotRebuild(f"weights {manifest.version} are not what was sent: the sha256 of a patch differs")


def _apply(copy: MemoryCopy, changed: Mapping[int, Tensor]) -> None:
    for shard, flat in changed.items():
        tensors = copy.load(shard)
        try:
            apply_patch_file(tensors, bytes(bytes_of(flat)))
        except BadPatch as error:
            raise CannotRebuild(f"a patch does not fit what is held: {error}") from error
        copy.store(shard, tensors)
