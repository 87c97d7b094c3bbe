"""The trainer's end of the delta transport: writes each version into a store, as a patch of the one before.

It keeps the weights that it wrote last in host memory, as many bytes as one copy of the model has, and compares bucket
by bucket while the next ones come. A bucket is a shard of the store's versions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from rltool.engines.delta import chain
from rltool.engines.delta.chain import Anchor, File, Held, Manifest, Patch
from rltool.engines.delta.patch import flat_patch, whole_file
from rltool.engines.delta.store import Store
from rltool.engines.transfer.wire import bucket_bytes, split_flat
from rltool.engines.types import Bucket
from rltool.engines.weight_version import WeightVersion
from rltool.models.quantized import described


@dataclass(frozen=True)
class Published:
    """patch_bytes, anchor_bytes: of the files of this version; None where it has no such files."""

    held: Held
    patch_bytes: int | None
    anchor_bytes: int | None

    @classmethod
    def of(cls, manifest: Manifest) -> Published:
        def size(part: Anchor | Patch | None) -> int | None:
            return None if part is None else sum(file.bytes for file in part.files.values())

        return cls(manifest.held, size(manifest.patch), size(manifest.anchor))


class DeltaWriter:
    """Not thread-safe. anchor_every: versions from one anchor to the next.

    model_files: a directory whose *.json go with every anchor, so that its directory is a checkpoint. quantization:
    of the ExportPlan, for config.json.
    """

    def __init__(
        self, store: Store, *, anchor_every: int, model_files: Path, quantization: Mapping[str, Any] | None = None
    ) -> None:
        self._store, self._anchor_every, self._model_files = store, anchor_every, model_files
        self._quantization = quantization
        self._buckets: tuple[Bucket, ...] = ()
        self._copy: list[Tensor] = []
        self._chain: list[Manifest] = []
        """From the last anchor to the version whose bytes are in `_copy`; empty while that is a mixture."""
        self._pending: _Pending | None = None
        self._largest = 0  # file of this version

    @property
    def published(self) -> str | None:
        """The version that was written last."""
        return self._chain[-1].version if self._chain else None

    @property
    def held_bytes(self) -> int:
        """At most, of the version that was begun: the copy of the weights, and a file that is written."""
        return sum(flat.numel() for flat in self._copy) + self._largest

    def begin(self, version: str, buckets: Iterable[Bucket]) -> None:
        """A version follows, bucket by bucket. Raises StoreError.

        It is an anchor alone after one that was cut off, and with other buckets than before. It gets an anchor beside
        its patch when that is due, or when the chain has lost a file. The version that was published last may be sent
        again: then only an anchor is written, where the chain lacks one.
        """
        buckets = tuple(buckets)
        base = self._chain if buckets == self._buckets else []
        again = bool(base) and base[-1].version == version
        due = not base or (len(base) >= self._anchor_every and not again)
        self._pending = _Pending(version, base, again, with_anchor=due or not self._intact(base))
        if not base:
            self._buckets, self._copy = buckets, []
        self._chain, self._largest = [], 0

    def add(self, bucket: Bucket, flat: Tensor) -> None:
        """The next bucket. flat: [bytes] uint8 on the CPU, which is copied. Raises StoreError."""
        pending = self._pending
        assert pending is not None, "begin comes first"
        shard = pending.shards
        if not pending.base:
            self._copy.append(flat.clone())
        elif not pending.again:
            data = flat_patch(bucket, self._copy[shard], flat)
            if data is not None:
                pending.patch[shard] = self._put(pending.version, "patch", shard, data)
            self._copy[shard].copy_(flat)
        if pending.with_anchor:
            pending.anchor[shard] = self._put_anchor(pending.version, shard)
        pending.shards += 1

    def finish(self) -> Published:
        """The manifest, which makes the version exist; then what is no longer needed is deleted. Raises StoreError."""
        pending, self._pending = self._pending, None
        assert pending is not None and pending.shards == len(self._buckets), "not all buckets were added"
        manifest = pending.manifest(self._put_model_files(pending.version) if pending.with_anchor else {})
        if manifest == (pending.base[-1] if pending.base else None):
            self._chain = pending.base
        else:
            self._complete(manifest, pending.base)
        return Published.of(manifest)

    def _intact(self, manifests: list[Manifest]) -> bool:
        """Whether all files from the anchor on are there, with the bytes that they should have."""
        expected = chain.shard_files(manifests[0], "anchor")
        for manifest in manifests[1:]:
            expected |= chain.shard_files(manifest, "patch")
        expected |= {chain.manifest_key(m.version): File.of(m.to_json()) for m in manifests}
        sizes = self._store.sizes(f"{WeightVersion.parse(manifests[-1].version).run}-")
        return all(sizes.get(key) == file.bytes for key, file in expected.items())

    def _complete(self, manifest: Manifest, base: list[Manifest]) -> None:
        self._store.put(chain.manifest_key(manifest.version), manifest.to_json())
        self._store.put(chain.HEAD, json.dumps(asdict(manifest.held)).encode())
        if manifest.anchor is None:
            self._chain = [*base, manifest]
            return
        self._chain = [manifest]
        run = WeightVersion.parse(manifest.version).run
        self._store.delete(chain.expired(self._store.sizes(f"{run}-"), run))

    def _put(self, version: str, kind: chain.Kind, shard: int, data: bytes) -> File:
        self._largest = max(self._largest, len(data))
        name = chain.shard_name(kind, shard, len(self._buckets))
        self._store.put(f"{chain.directory(version)}/{name}", data)
        return File.of(data)

    def _put_anchor(self, version: str, shard: int) -> File:
        tensors = dict(split_flat(self._copy[shard], self._buckets[shard]))
        return self._put(version, "anchor", shard, whole_file(tensors))

    def _put_model_files(self, version: str) -> Mapping[str, File]:
        files = {
            path.name: path.read_bytes()
            for path in sorted(self._model_files.glob("*.json"))
            if chain.is_model_file(path.name) and not path.name.endswith(".index.json")
        }
        if self._quantization is not None and "config.json" in files:
            config = described(json.loads(files["config.json"]), self._quantization)
            files["config.json"] = json.dumps(config, indent=2).encode()
        files["model.safetensors.index.json"] = self._index()
        for name, data in files.items():
            self._store.put(f"{chain.directory(version)}/{name}", data)
        return {name: File.of(data) for name, data in files.items()}

    def _index(self) -> bytes:
        weight_map = {
            meta.name: chain.shard_name("anchor", shard, len(self._buckets))
            for shard, bucket in enumerate(self._buckets)
            for meta in bucket
        }
        size = sum(map(bucket_bytes, self._buckets))
        return json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}, indent=1).encode()


@dataclass
class _Pending:
    """A version that is being written. base: the chain to the one before, empty if there is nothing to compare with;
    again: it ends with this version itself."""

    version: str
    base: list[Manifest]
    again: bool
    with_anchor: bool
    shards: int = 0
    patch: dict[int, File] = field(default_factory=dict)
    anchor: dict[int, File] = field(default_factory=dict)

    def manifest(self, model_files: Mapping[str, File]) -> Manifest:
        anchor = Anchor(self.anchor, model_files) if self.with_anchor else None
        if self.again:
            return replace(self.base[-1], anchor=anchor or self.base[-1].anchor)
        base = self.base[-1].held if self.base else None
        state = chain.state_after(base, self.patch if base else self.anchor)
        return Manifest(self.version, state, self.shards, anchor, Patch(base, self.patch) if base else None)
