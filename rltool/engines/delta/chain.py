"""Which files of a store bring an engine from the weights that it holds to a version. Pure: no I/O, no torch.

The weights travel in shards (the buckets of a sync). A version has a directory RUN-ATTEMPT-N in the store with a
manifest, which is written last, and at least one of

- an anchor: every shard whole, in Hugging Face's layout, with the model's JSON files;
- a patch: what changed in each shard since the version's base. A shard without changes has no file.

`Manifest.state` names the bytes of the weights, not the files: it is the base's state hashed with the patch, or the
hash of the first anchor. A patch fits only a holder of its base in the base's state: so a version that
a restarted trainer made anew is never mixed with the old one's patches.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rltool.engines.weight_version import WeightVersion
from rltool.errors import RltoolError

FORMAT = 1
MANIFEST = "manifest.json"
HEAD = "head.json"
"""The key of the newest version, for followers that poll."""

Kind = Literal["anchor", "patch"]
_JSON_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*\.json")


class BadManifest(RltoolError):
    """Not a manifest of this format."""


@dataclass(frozen=True)
class File:
    """One file of a version: its size, and the sha256 of its bytes in hex."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, data: bytes | memoryview) -> File:
        return cls(len(data), hashlib.sha256(data).hexdigest())

    def matches(self, data: bytes | memoryview) -> bool:
        return File.of(data) == self


@dataclass(frozen=True)
class Held:
    """Weights that an engine has: the version's name and the state of its bytes."""

    version: str
    state: str


@dataclass(frozen=True)
class Patch:
    """files: shard -> file, of the shards that changed."""

    base: Held
    files: Mapping[int, File]


@dataclass(frozen=True)
class Anchor:
    """files: shard -> file, of every shard; model_files: name -> file, the model's JSON files."""

    files: Mapping[int, File]
    model_files: Mapping[str, File]


@dataclass(frozen=True)
class Manifest:
    """What the store has of one version; shards: how many there are."""

    version: str
    state: str
    shards: int
    anchor: Anchor | None = None
    patch: Patch | None = None

    @property
    def held(self) -> Held:
        return Held(self.version, self.state)

    def to_json(self) -> bytes:
        return json.dumps({"format": FORMAT} | asdict(self), indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        """The inverse of `to_json`. Raises BadManifest, for a half-written one too."""
        try:
            fields = json.loads(data)
            if fields.pop("format") != FORMAT:
                raise ValueError("another format")
            anchor, patch = fields.pop("anchor"), fields.pop("patch")
            found = cls(
                **fields,
                anchor=anchor and Anchor(_shards(anchor["files"]), _model_files(anchor["model_files"])),
                patch=patch and Patch(Held(**patch["base"]), _shards(patch["files"])),
            )
            WeightVersion.parse(found.version)
            if type(found.shards) is not int:
                raise ValueError("a number of shards that is none")
            # Compared, never counted up to: the number is what the file has.
            for part in (found.anchor, found.patch):
                if part is not None and not all(0 <= shard < found.shards for shard in part.files):
                    raise ValueError("files of shards that do not exist")
            if found.anchor is not None and len(found.anchor.files) != found.shards:
                raise ValueError("an anchor without some of its shards")
            if found.patch is not None:
                WeightVersion.parse(found.patch.base.version)
        except (RltoolError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise BadManifest(f"this is no manifest of weights: {type(error).__name__}: {error}") from error
        return found


@dataclass(frozen=True)
class Route:
    """How to get to a version: from its anchor's weights, or from those that are held, through `patches` in order."""

    anchor: Manifest | None
    patches: tuple[Manifest, ...]

    @property
    def bytes(self) -> int:
        parts = [shard_files(manifest, "patch") for manifest in self.patches]
        if self.anchor is not None:
            parts.append(shard_files(self.anchor, "anchor"))
        return sum(file.bytes for files in parts for file in files.values())


def state_after(base: Held | None, files: Mapping[int, File]) -> str:
    """The name of the state that a patch makes of its base, or that a first anchor has."""
    lines = [base.state if base else "anchor", *(f"{shard} {file.sha256}" for shard, file in sorted(files.items()))]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def routes(target: str, held: Held | None, manifests: Mapping[str, Manifest]) -> list[Route]:
    """Every way to `target` over these manifests, by version, the one with the fewest bytes first."""
    found: list[Route] = []
    patches: tuple[Manifest, ...] = ()
    left = dict(manifests)
    at = left.pop(target, None)
    while at is not None:
        if at.held == held:
            found.append(Route(None, patches))
        if at.anchor is not None:
            found.append(Route(at, patches))
        base = previous(at)
        earlier = left.pop(base.version, None) if base else None
        if base is not None and (earlier is None or earlier.held != base):
            if base == held:  # what the store has lost, the engine still has
                found.append(Route(None, (at, *patches)))
            break
        patches = (at, *patches)
        at = earlier
    return sorted(found, key=lambda route: route.bytes)


def previous(manifest: Manifest) -> Held | None:
    """The weights that its patch is for."""
    return manifest.patch.base if manifest.patch else None


# -- keys of the store


def directory(version: str) -> str:
    """Of a weight version RUN:ATTEMPT:N: a colon is no good in a file name everywhere. Raises BadWeightVersion."""
    parsed = WeightVersion.parse(version)
    return f"{parsed.run}-{parsed.attempt}-{parsed.number}"


def version_of(key: str) -> WeightVersion | None:
    """The version whose file `key` is, None where it is none of ours."""
    try:
        return WeightVersion.parse(key.partition("/")[0].replace("-", ":"))
    except RltoolError:
        return None


def manifest_key(version: str) -> str:
    return f"{directory(version)}/{MANIFEST}"


def shard_key(manifest: Manifest, kind: Kind, shard: int) -> str:
    return f"{directory(manifest.version)}/{shard_name(kind, shard, manifest.shards)}"


def shard_name(kind: Kind, shard: int, shards: int) -> str:
    """The name of a shard's file (shard: from 0); an anchor's is what Hugging Face calls it."""
    if kind == "anchor":
        return f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
    return f"patch-{shard + 1:05d}-of-{shards:05d}.safetensors"


def shard_files(manifest: Manifest, kind: Kind) -> dict[str, File]:
    """Key -> file, of its anchor's or its patch's shards; none where it has no such part."""
    part = manifest.anchor if kind == "anchor" else manifest.patch
    return {shard_key(manifest, kind, shard): file for shard, file in part.files.items()} if part else {}


def model_file_key(manifest: Manifest, name: str) -> str:
    return f"{directory(manifest.version)}/{name}"


def expired(keys: Iterable[str], run: str, *, anchors: int = 2) -> list[str]:
    """The keys of this run's versions before its `anchors`-th newest anchor, manifests first.

    An engine may be reading the chain of the newest anchor, or, since before that was there, the one of the anchor
    before it.
    """
    mine = {key: version for key in keys if (version := version_of(key)) is not None and version.run == run}
    anchored = {version for key, version in mine.items() if key.rpartition("/")[2].startswith("model-00001-of-")}
    complete = {version for key, version in mine.items() if key.endswith(f"/{MANIFEST}")} & anchored
    newest = sorted(complete, key=_age)[-anchors:]
    if len(newest) < anchors:
        return []
    old = [key for key, version in mine.items() if _age(version) < _age(newest[0])]
    return sorted(old, key=lambda key: not key.endswith(f"/{MANIFEST}"))


def is_model_file(name: str) -> bool:
    """Whether a JSON file of the model may lie beside the shards under this name."""
    return _JSON_NAME.fullmatch(name) is not None and name != MANIFEST


def _age(version: WeightVersion) -> tuple[int, int]:
    return version.attempt, version.number


def _shards(files: Mapping[str, Any]) -> dict[int, File]:
    return {int(shard): File(**file) for shard, file in files.items()}


def _model_files(files: Mapping[str, Any]) -> dict[str, File]:
    for name in files:
        if not is_model_file(name):
            raise ValueError(f"a model's file called {name!r}")
    return {name: File(**file) for name, file in files.items()}
