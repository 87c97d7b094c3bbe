"""Directories that appear whole or not at all, and the collection of checkpoints of a run. Pure files."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from rltool.checkpoints import manifest
from rltool.errors import RltoolError, UsageError

LATEST = "latest"
_STEP = re.compile(r"step_(\d+)")


def refuse_existing(directory: Path) -> None:
    if directory.exists() or directory.is_symlink():
        raise UsageError(f"{directory} exists already; choose another name or remove it (nothing is overwritten)")


def begin(final: Path) -> Path:
    """An empty directory beside `final` to write into; what a crash left there is removed. Raises UsageError if `final` exists.

    Its name starts with a dot and ends with ".partial": it is never taken for a checkpoint.
    """
    refuse_existing(final)
    partial = final.parent / f".{final.name}.partial"
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    return partial


def commit(partial: Path, final: Path) -> None:
    """Makes what was written durable, then gives it its name. After a power cut it is there whole, or not at all."""
    for path in partial.rglob("*"):
        _sync(path)
    _sync(partial)
    try:
        os.rename(partial, final)
    except OSError as error:
        raise RltoolError(f"{partial} could not be renamed to {final}: {error}") from error
    _sync(final.parent)


def abandon(partial: Path) -> None:
    """Removes an unfinished directory, as far as that is possible: the error that led here matters more."""
    shutil.rmtree(partial, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Writes and syncs one file."""
    with path.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def set_latest(directory: Path) -> None:
    """Points `latest` beside this checkpoint at it, atomically."""
    pointer = directory.parent / LATEST
    fresh = directory.parent / f".{LATEST}.partial"
    write_text(fresh, directory.name + "\n")
    os.replace(fresh, pointer)
    _sync(directory.parent)


def list_checkpoints(directory: Path) -> list[Path]:
    """The complete checkpoints step_N below the directory, by ascending step. Leftovers of a crash are not among them."""
    if not Path(directory).is_dir():
        return []
    named = [(int(match[1]), path) for path in Path(directory).iterdir() if (match := _STEP.fullmatch(path.name))]
    return [path for _, path in sorted(named) if _is_complete(path)]


def latest_checkpoint(directory: Path) -> Path | None:
    """What `latest` points at if that is complete, else the complete checkpoint of the highest step, else None.

    A crash between rename and pointer leaves the pointer one checkpoint behind: still a complete one.
    """
    complete = list_checkpoints(directory)
    pointer = Path(directory) / LATEST
    if pointer.is_file():
        pointed = Path(directory) / pointer.read_text(encoding="utf-8").strip()
        if pointed in complete:
            return pointed
    return complete[-1] if complete else None


def _is_complete(directory: Path) -> bool:
    try:
        return manifest.sizes_match(directory, manifest.read(directory))
    except RltoolError:
        return False
