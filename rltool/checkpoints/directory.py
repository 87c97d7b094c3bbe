"""Directories that appear whole or not at all, and the collection of checkpoints of a run. Pure files."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rltool.checkpoints import manifest
from rltool.errors import RltoolError, UsageError

LATEST = "latest"
_STEP = re.compile(r"step_(\d+)")
_LEFTOVER = re.compile(r"\.step_\d+\.(partial|deleting)")
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
"""What flock answers on file systems that have none."""


def refuse_existing(directory: Path) -> None:
    if directory.exists() or directory.is_symlink():
        raise UsageError(f"{directory} exists already; choose another name or remove it (nothing is overwritten)")


def partial_of(final: Path) -> Path:
    """Where `final` is written before it gets its name."""
    return final.parent / f".{final.name}.partial"


def begin(final: Path) -> Path:
    """An empty directory beside `final` to write into; what a crash left there is removed. Raises UsageError if `final`
    exists.

    Its name starts with a dot and ends with ".partial": it is never taken for a checkpoint.
    """
    refuse_existing(final)
    partial = partial_of(final)
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


def set_latest(directory: Path) -> str:
    """Points `latest` beside this checkpoint at it, atomically. Returns "", or a warning: the checkpoint is complete
    before, and nothing of ours goes by the pointer, so no save fails for it."""
    pointer = directory.parent / LATEST
    fresh = directory.parent / f".{LATEST}.partial"
    try:
        write_text(fresh, directory.name + "\n")
        os.replace(fresh, pointer)
        _sync(directory.parent)
    except OSError as error:
        with suppress(OSError):
            fresh.unlink()
        return f"checkpoint {directory} is complete, but {pointer} could not be written: {error.strerror or error}"
    return ""


def list_checkpoints(directory: Path) -> list[Path]:
    """The complete checkpoints step_N below the directory, by ascending step.
    Leftovers of a crash are not among them."""
    if not Path(directory).is_dir():
        return []
    named = [(int(match[1]), path) for path in Path(directory).iterdir() if (match := _STEP.fullmatch(path.name))]
    return [path for _, path in sorted(named) if _is_complete(path)]


def latest_checkpoint(directory: Path) -> Path | None:
    """The complete checkpoint of the highest step, or None.

    Not where `latest` points: a crash between rename and pointer leaves that one checkpoint behind. The pointer is for
    people and scripts. To go back to an older checkpoint, move the newer ones away.
    """
    complete = list_checkpoints(directory)
    return complete[-1] if complete else None


def step_of(checkpoint: Path) -> int:
    """N of step_N."""
    match = _STEP.fullmatch(checkpoint.name)
    if match is None:
        raise ValueError(f"{checkpoint} is not named step_N")
    return int(match[1])


def pointed_at(directory: Path) -> Path | None:
    """Where `latest` points, be it there or not; None without a pointer."""
    pointer = Path(directory) / LATEST
    return Path(directory) / pointer.read_text(encoding="utf-8").strip() if pointer.is_file() else None


@contextmanager
def reading(directory: Path) -> Iterator[None]:
    """Keeps a checkpoint from being deleted by `remove_unread`, in any process, while the block runs.

    By a lock on its manifest; on a file system without locks it does nothing. FileNotFoundError where there is none, or
    none any more.
    """
    path = Path(directory) / manifest.FILE
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _lock(descriptor, fcntl.LOCK_SH)
        if not os.path.samestat(os.fstat(descriptor), path.stat()):  # it was deleted, and another one made, before that
            raise FileNotFoundError(errno.ENOENT, "it was replaced while it was opened", str(path))
        yield
    finally:
        os.close(descriptor)


@contextmanager
def alone(directory: Path) -> Iterator[None]:
    """Waits until no other process is inside this block for the directory, which is made; on other hosts too where file
    locks reach them. Leftovers of unfinished writes are removed."""
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _lock(descriptor, fcntl.LOCK_EX)
        for partial in directory.glob(".*.partial"):
            shutil.rmtree(partial, ignore_errors=True)
        yield
    finally:
        os.close(descriptor)


def remove_unread(directory: Path) -> bool:
    """Deletes a checkpoint unless it is being read (`reading`); then False.
    Also one that is damaged, or has lost its manifest."""
    try:
        descriptor = os.open(Path(directory) / manifest.FILE, os.O_RDONLY)
    except FileNotFoundError:
        remove(directory)
        return True
    try:
        _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove(directory)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def _lock(descriptor: int, kind: int) -> None:
    try:
        fcntl.flock(descriptor, kind)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


def remove(directory: Path) -> None:
    """Deletes it, if it is there. Under another name first: a crash meanwhile leaves nothing that could be taken for
    it."""
    doomed = directory.parent / f".{directory.name}.deleting"
    shutil.rmtree(doomed, ignore_errors=True)
    try:
        os.rename(directory, doomed)
    except FileNotFoundError:
        return
    _sync(directory.parent)
    shutil.rmtree(doomed, ignore_errors=True)


def sweep(directory: Path) -> list[Path]:
    """Removes what a crash in a save or a deletion left among the checkpoints of a run without another writer.
    Returns it."""
    if not Path(directory).is_dir():
        return []
    found = sorted(path for path in Path(directory).iterdir() if _LEFTOVER.fullmatch(path.name))
    for path in found:
        shutil.rmtree(path, ignore_errors=True)
    return found


def _is_complete(directory: Path) -> bool:
    try:
        return manifest.sizes_match(directory, manifest.read(directory))
    except RltoolError:
        return False
