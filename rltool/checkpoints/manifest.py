"""The manifest of a checkpoint directory: what it is, size and sha256 of every file. Written last. Pure files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from rltool.config.parallel import ParallelLayout
from rltool.errors import UsageError

FILE = "manifest.json"
FORMAT = "rltool-torch-dist"
VERSION = 1
_CHUNK = 1 << 20
_THREADS = 4
"""More gain little: a core hashes 0.5 to 2 GB/s, and few disks read faster than four of them."""

T = TypeVar("T")


class CheckpointDamaged(UsageError):
    """Files of a checkpoint are missing, or are not those that were saved. Nothing of it was loaded."""


@dataclass(frozen=True)
class Manifest:
    """kind: "weights" (written by convert-ckpt) or "training" (with optimizer and run state).

    files: path relative to the directory -> {"bytes": size, "sha256": hex}, all files but the manifest
    layout: ranks that saved it; it loads under any other, but the random generators only under the same
    distributed_optimizer: how its optimizer state is cut; it loads into an optimizer of the same kind only
    config: of the run, secrets masked; for people, nothing is read from it
    metrics: of the step after which it was saved
    lora: where the weights are adapters alone: rank, alpha, targets, and of the model beside which they were trained
    its path and its weight files ("base_path", "base_files", as in `files`); empty: they are the whole model
    """

    kind: Literal["weights", "training"]
    architecture: str
    dtype: str
    step: int | None = None
    weight_version: str | None = None
    layout: ParallelLayout = field(default_factory=ParallelLayout)
    distributed_optimizer: bool = False
    versions: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    lora: dict[str, Any] = field(default_factory=dict)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_CHUNK):
            digest.update(block)
    return digest.hexdigest()


def describe_file(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


def describe_files(directory: Path, known: Mapping[str, dict[str, Any]] | None = None) -> dict[str, dict[str, Any]]:
    """Size and hash of every file below the directory, but the manifest. known: descriptions made already, by name."""
    described = dict(known or {})
    paths = {
        path.relative_to(directory).as_posix(): path
        for path in directory.rglob("*")
        if path.is_file() and path != directory / FILE
    }
    missing = [name for name in paths if name not in described]
    described.update(zip(missing, side_by_side(describe_file, [paths[name] for name in missing]), strict=True))
    return {name: described[name] for name in sorted(paths)}


def side_by_side(function: Callable[[Path], T], paths: Sequence[Path]) -> list[T]:
    """function of each, in threads: hashing and reading let others run meanwhile."""
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="hash") as pool:
        return list(pool.map(function, paths))


def to_text(manifest: Manifest) -> str:
    """The manifest as JSON. In the file the kind of optimizer stands among the sizes of the layout."""
    sizes = {**manifest.layout.to_json(), "distributed_optimizer": int(manifest.distributed_optimizer)}
    content = {"format": FORMAT, "version": VERSION, **asdict(manifest), "layout": sizes}
    del content["distributed_optimizer"]
    return json.dumps(content, indent=1) + "\n"


def is_checkpoint(directory: Path) -> bool:
    """Whether the directory claims to be a checkpoint of ours (has a manifest); its files are not checked."""
    return (Path(directory) / FILE).is_file()


def read(directory: Path) -> Manifest:
    """UsageError when there is no manifest, or one of another format; CheckpointDamaged when it cannot be read."""
    path = Path(directory) / FILE
    if not path.is_file():
        raise UsageError(
            f"{directory} has no {FILE}: it is no complete rltool checkpoint (one that was cut off while it was saved "
            "has none either)"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found = content.pop("format"), content.pop("version")
    except (ValueError, KeyError, AttributeError) as error:
        raise CheckpointDamaged(f"{path} cannot be read: {error!r}") from error
    if found != (FORMAT, VERSION):
        raise UsageError(f"{path} has format {found[0]!r} version {found[1]!r}; expected {FORMAT!r} version {VERSION}")
    try:
        sizes = content.pop("layout", {})
        distributed = bool(sizes.get("distributed_optimizer", 0))
        return Manifest(**content, layout=ParallelLayout.from_json(sizes), distributed_optimizer=distributed)
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointDamaged(f"{path} cannot be read: {error}") from error


def sizes_match(directory: Path, manifest: Manifest) -> bool:
    """The cheap check: every file is there with its size."""
    paths = {name: Path(directory) / name for name in manifest.files}
    return all(path.is_file() and path.stat().st_size == manifest.files[name]["bytes"] for name, path in paths.items())


def verify(directory: Path, manifest: Manifest, *, part: int = 0, parts: int = 1) -> None:
    """Raises CheckpointDamaged naming the first file that is missing, extra, or has another size or hash.

    Called before anything is loaded: torch_dist files are pickles inside, and only what was written here is unpickled.
    parts: over how many callers the hashing is sharded, of which this is number `part`; each does all the rest.
    """
    directory = Path(directory)
    for name, expected in manifest.files.items():
        path = directory / name
        if not path.is_file():
            raise CheckpointDamaged(f"{directory}: {name} is missing; use another checkpoint")
        size = path.stat().st_size
        if size != expected["bytes"]:
            raise CheckpointDamaged(
                f"{path} has {size} bytes, the manifest has {expected['bytes']}; use another checkpoint"
            )
    extra = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}
    extra -= {*manifest.files, FILE}
    if extra:
        raise CheckpointDamaged(f"{directory} holds files that the manifest does not name: {', '.join(sorted(extra))}")
    # By size, so that every caller gets about as many bytes.
    names = sorted(manifest.files, key=lambda name: (-manifest.files[name]["bytes"], name))[part::parts]
    for name, found in zip(names, side_by_side(sha256_of, [directory / name for name in names]), strict=True):
        if found != manifest.files[name]["sha256"]:
            raise CheckpointDamaged(
                f"{directory / name} is not the file that was saved (its sha256 differs); use another checkpoint"
            )
