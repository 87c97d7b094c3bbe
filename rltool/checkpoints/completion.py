"""How every torch_dist directory of ours ends: all files hashed, the manifest, everything durable,
the name. Pure files."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rltool import __version__
from rltool.checkpoints import directory as directories
from rltool.checkpoints import manifest as manifests
from rltool.checkpoints.manifest import Manifest

STATE = "torch_dist"
"""Subdirectory with the files of dist_checkpointing; beside it the manifest, extra.json, config and tokenizer."""
EXTRA = "extra.json"
"""What a run needs to resume beside tensors."""


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint. bytes: of all its files; seconds: from the copy of the state to the name; warning: what
    went wrong once it was complete, or ""."""

    directory: Path
    bytes: int
    seconds: float
    warning: str = ""


def finish(partial: Path, final: Path, manifest: Manifest, described: dict[str, Any] | None = None) -> None:
    """Hashes every file, writes the manifest, makes all of it durable and gives it its name.
    described: files hashed already."""
    # rltool's own is in the source: there is no metadata of a package that was not installed.
    versions = {"rltool": __version__, **{name: version(name) for name in ("megatron-core", "torch")}}
    complete = Manifest(
        **{**vars(manifest), "versions": versions, "files": manifests.describe_files(partial, described)}
    )
    directories.write_text(partial / manifests.FILE, manifests.to_text(complete))
    directories.commit(partial, final)
