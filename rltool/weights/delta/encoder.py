"""The trainer's end of deltas over transfer groups: what changed since the weights that were sent last, found once for
all engines.

It keeps those weights in host memory, as many bytes as one copy of the model has. A bucket is a shard of the manifest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from rltool.engines.delta import chain
from rltool.engines.delta.chain import Anchor, File, Held, Manifest, Patch
from rltool.engines.delta.messages import bytes_of
from rltool.engines.delta.patch import flat_patch
from rltool.engines.types import Bucket


@dataclass
class Part:
    """One bucket of a version. flat: [bytes] uint8 on the CPU, all of it; patch: a file of what changed since the base,
    None where nothing did, or where there is no base."""

    flat: Tensor
    patch: bytes | None

    @cached_property
    def whole(self) -> File:
        return File.of(bytes_of(self.flat))


class DeltaEncoder:
    """`begin`, `add` for each bucket, and `finish` come from one thread; what they have made is read from others.

    anchor_every: versions from one that goes whole to every engine to the next; kept: parts that exist at a time,
    the newest: readers are no further behind.
    """

    def __init__(self, *, anchor_every: int, kept: int) -> None:
        self._anchor_every, self._kept = anchor_every, kept
        self.forget()

    def forget(self) -> None:
        """The copy of the weights goes, and with it every base."""
        self._buckets: tuple[Bucket, ...] = ()
        self._copy: list[Tensor] = []
        self._held: Held | None = None
        """Of `_copy`; None while that is a mixture."""
        self._since_anchor = 0
        self._open = _Version("", None)

    @property
    def base(self) -> Held | None:
        """A holder of it can take patches of the version that was begun; None: every engine needs all of it."""
        return self._open.base

    def begin(self, version: str, buckets: Sequence[Bucket]) -> None:
        """A version follows, bucket by bucket. Without a base after one that was cut off, with other buckets than
        before, and when that is due. The version that was sent last may be sent again, and keeps its state."""
        buckets = tuple(buckets)
        known = self._held if buckets == self._buckets else None
        again = known is not None and known.version == version
        if known is None:
            self._buckets, self._copy = buckets, []
        due = self._since_anchor >= self._anchor_every and not again
        self._open, self._held = _Version(version, None if due else known), None

    def add(self, bucket: Bucket, flat: Tensor) -> None:
        """The next bucket. flat: [bytes] uint8 on the CPU, which is compared and copied, and left alone by its owner
        until all readers of the part are done."""
        made, shard = self._open, self._open.shards
        if shard == len(self._copy):
            self._copy.append(flat.clone())
            part = Part(flat, None)
        else:
            part = Part(flat, flat_patch(bucket, self._copy[shard], flat) if made.base else None)
            self._copy[shard].copy_(flat)
        if made.base is None:
            made.files[shard] = part.whole
        elif part.patch is not None:
            made.files[shard] = File.of(part.patch)
        made.parts[shard] = part
        made.parts.pop(shard - self._kept, None)
        made.most_patches = max(made.most_patches, sum(len(kept.patch or b"") for kept in made.parts.values()))
        made.shards += 1

    def part(self, shard: int) -> Part | None:
        """Of the version that was begun; None: it is not there any more."""
        return self._open.parts.get(shard)

    def finish(self) -> None:
        """All buckets were added; their parts stay until `release`."""
        made = self._open
        assert made.shards == len(self._buckets), "not all buckets were added"
        if made.base is not None and made.base.version == made.version and not made.files:
            self._held = made.base
        else:
            self._held = Held(made.version, chain.state_after(made.base, made.files))
            self._since_anchor = 1 if made.base is None else self._since_anchor + 1

    def manifest(self, wholes: Mapping[int, File] | None) -> Manifest:
        """Of the version that was finished. wholes: of an engine that was sent all of it; None: one that was sent
        patches."""
        made, held = self._open, self._held
        assert held is not None, "finish comes first"
        if wholes is not None:
            return Manifest(held.version, held.state, made.shards, anchor=Anchor(wholes, {}))
        assert made.base is not None, "there are no patches without a base"
        return Manifest(held.version, held.state, made.shards, patch=Patch(made.base, made.files))

    @property
    def patch_bytes(self) -> int | None:
        """Of all patches to the version that was begun; None: it has no base."""
        made = self._open
        return None if made.base is None else sum(file.bytes for file in made.files.values())

    @property
    def held_bytes(self) -> int:
        """At most, of the version that was begun: the copy of the weights, and the patches that are there at a time."""
        return sum(flat.numel() for flat in self._copy) + self._open.most_patches

    def release(self) -> None:
        """All readers are done."""
        self._open.parts = {}


@dataclass
class _Version:
    """The version that was begun last. files: of its patches, or without a base of its whole buckets; most_patches:
    bytes of those that were there at a time."""

    version: str
    base: Held | None
    shards: int = 0
    files: dict[int, File] = field(default_factory=dict)
    parts: dict[int, Part] = field(default_factory=dict)
    most_patches: int = 0
