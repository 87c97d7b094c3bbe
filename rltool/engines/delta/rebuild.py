"""Brings a copy of the weights, in checkpoint coordinates, from the version that it holds to another.

What is downloaded is verified against its manifest before anything of the copy changes, except for anchors, which
replace the copy shard by shard: they are as large as the model.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from rltool.engines.delta import chain
from rltool.engines.delta.chain import BadManifest, File, Held, Manifest, Route
from rltool.engines.delta.patch import BadPatch, apply_patch_file, read_whole_file
from rltool.engines.delta.store import KeyMissing, Store, StoreError
from rltool.errors import RltoolError

CHAIN_LIMIT = 10_000
"""Manifests that are read on the way from a version to its anchor, at most."""


class CannotRebuild(RltoolError):
    """The store does not lead from what is held to the version."""


class FileDamaged(RltoolError):
    """A file of the store is not the one that its manifest names."""


class Copy(Protocol):
    """A copy of the weights: shard -> HF name -> tensor. `held` is None while, and after, it is a mixture."""

    held: Held | None

    def replaced(self, manifest: Manifest, model_files: Mapping[str, bytes]) -> None:
        """An anchor follows: every shard will be stored."""
        ...

    def load(self, shard: int) -> dict[str, Tensor]:
        """The tensors of a shard, which the caller changes in place, and then stores."""
        ...

    def store(self, shard: int, tensors: dict[str, Tensor]) -> None: ...

    def complete(self, manifest: Manifest) -> None:
        """All shards of this version are stored."""
        ...


@dataclass(frozen=True)
class Rebuilt:
    """bytes: downloaded; anchor: whether that was more than patches."""

    held: Held
    bytes: int
    seconds: float
    anchor: bool


def bring(copy: Copy, store: Store, version: str, *, seconds: float) -> Rebuilt:
    """Make `copy` hold `version`, over the cheapest route whose files are all there and undamaged.

    seconds: after which it stops, between two files. Raises CannotRebuild, with what was wrong with each route;
    the copy then holds what it held, or nothing.
    """
    started = time.monotonic()
    source = _Source(store, started + seconds)
    failures: dict[str, None] = {}
    # Most often the chain need not be read further back than to what is held.
    for until in dict.fromkeys((copy.held, None)):
        manifests = _chain_of(source, version, until)
        if version not in manifests:
            failures[f"{chain.manifest_key(version)} is missing or damaged"] = None
        # A route that breaks off leaves some shards at `version`. The patches of the next one from what was held make
        # `version` of these too: they list new values, not differences.
        for route in chain.routes(version, copy.held, manifests):
            try:
                _take(copy, source, route, manifests[version])
            except (StoreError, FileDamaged, BadPatch) as error:
                failures[str(error)] = None
                continue
            return Rebuilt(manifests[version].held, source.bytes, time.monotonic() - started, route.anchor is not None)
    reasons = "; ".join(failures) or f"no anchor is left on its chain, and its patches do not start at {copy.held}"
    raise CannotRebuild(f"weights {version} cannot be had from the store: {reasons}")


def _take(copy: Copy, source: _Source, route: Route, target: Manifest) -> None:
    if copy.held == target.held:
        return
    patches = [
        (shard, source.verified(chain.shard_key(manifest, "patch", shard), file))
        for manifest in route.patches
        if manifest.patch is not None
        for shard, file in sorted(manifest.patch.files.items())
    ]
    model_files = dict(_model_files(source, route.anchor)) if route.anchor is not None else {}
    copy.held = None
    if route.anchor is not None:
        copy.replaced(route.anchor, model_files)
    for shard in range(target.shards):
        tensors = _anchor_shard(source, route.anchor, shard) if route.anchor is not None else copy.load(shard)
        for of, data in patches:
            if of == shard:
                apply_patch_file(tensors, data)
        copy.store(shard, tensors)
    copy.complete(target)
    copy.held = target.held


def _anchor_shard(source: _Source, manifest: Manifest, shard: int) -> dict[str, Tensor]:
    assert manifest.anchor is not None
    return read_whole_file(source.verified(chain.shard_key(manifest, "anchor", shard), manifest.anchor.files[shard]))


def _model_files(source: _Source, manifest: Manifest) -> Iterator[tuple[str, bytes]]:
    assert manifest.anchor is not None
    for name, file in manifest.anchor.model_files.items():
        yield name, source.verified(chain.model_file_key(manifest, name), file)


def _chain_of(source: _Source, version: str, until: Held | None) -> dict[str, Manifest]:
    """Manifests from `version` back, to the one whose base is `until`, or as far as there are any."""
    found: dict[str, Manifest] = {}
    at: str | None = version
    while at is not None and at not in found and len(found) < CHAIN_LIMIT:
        try:
            manifest = Manifest.from_json(source.get(chain.manifest_key(at)))
        except (KeyMissing, BadManifest):
            break
        if manifest.version != at:
            break
        found[at] = manifest
        base = chain.previous(manifest)
        at = base.version if base is not None and base != until else None
    return found


class _Source:
    """A store that is read until a deadline, and what has been read of it."""

    def __init__(self, store: Store, until: float) -> None:
        self._store, self._until = store, until
        self.bytes = 0

    def get(self, key: str) -> bytes:
        if time.monotonic() > self._until:
            raise CannotRebuild(f"the weights did not come in time: {self.bytes / 1e6:.0f} MB were read before {key}")
        data = self._store.get(key)
        self.bytes += len(data)
        return data

    def verified(self, key: str, file: File) -> bytes:
        data = self.get(key)
        if not file.matches(data):
            raise FileDamaged(f"{key} is damaged: {len(data)} bytes, where its manifest has {file.bytes} and a sha256")
        return data
