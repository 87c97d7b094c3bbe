"""Files that are either old or new, never half written, for any reader."""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rltool.errors import DiskFull, OutputFailed, RunFault

_FULL = (errno.ENOSPC, errno.EDQUOT)


def write_bytes_atomic(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Replace `path` by a complete new file with these permissions, on the disk when this returns; its directory must
    exist."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)  # or a power cut could take the rename back


def sync_directory(directory: Path) -> None:
    """On return the names in it are on the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def clock_ahead(directory: Path) -> float:
    """Seconds by which the clock that dates files of this directory is ahead of this host's: on a shared disk it is
    another host's. Dates the directory anew."""
    os.utime(directory)
    return directory.stat().st_mtime - time.time()


def write_text_atomic(path: Path, text: str, *, mode: int = 0o644) -> None:
    write_bytes_atomic(path, text.encode("utf-8"), mode=mode)


def write_json_atomic(path: Path, value: Any, *, mode: int = 0o644) -> None:
    write_text_atomic(path, json.dumps(value, indent=2) + "\n", mode=mode)


def replace_symlink(link: Path, target: str) -> None:
    """Point `link` at `target` (relative to the link's directory) without a moment in which it is missing."""
    temporary = link.with_name(f".{link.name}.{os.getpid()}.{secrets.token_hex(4)}")
    os.symlink(target, temporary)
    os.replace(temporary, link)


@contextmanager
def writing(what: str, path: Path) -> Iterator[None]:
    """OutputFailed for an OSError of the block, which writes `path`. what: for the error, such as "the samples"."""
    try:
        yield
    except OSError as error:
        raise OutputFailed(
            f"{what} cannot be written to {path}: {error.strerror or error}; make room there, and go on with `rltool "
            "train --resume`"
        ) from error


def full_disk(error: BaseException | None) -> str | None:
    """What the system says of a full disk or quota, where the error is that or came of it; None: it did not. Torch's
    file writer raises another error about positions, shutil's copies a list of texts."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return error.strerror
        if said := next((os.strerror(each) for each in _FULL if os.strerror(each) in str(error)), None):
            return said
        error = error.__cause__ or error.__context__
    return None


@contextmanager
def starting(what: str, directory: Path) -> Iterator[None]:
    """DiskFull, with the bytes that are free, for an OSError of the block that comes of a full disk. directory: which
    it writes to; it may not be there yet."""
    try:
        yield
    except OSError as error:
        if (why := full_disk(error)) is None:
            raise
        there = next(each for each in (directory, *directory.absolute().parents) if each.exists())
        space = shutil.disk_usage(there)
        raise DiskFull(
            f"{what} cannot start: {directory} cannot be written ({why}), {space.free} of the {space.total} bytes of "
            "its disk are free; make room there, and start it again"
        ) from error


@contextmanager
def saving(what: str, path: Path) -> Iterator[None]:
    """DiskFull for an error of the block, which writes `path`, that comes of a full disk. what: begins the text."""
    try:
        yield
    except (DiskFull, RunFault):
        raise
    except Exception as error:
        if (why := full_disk(error)) is None:
            raise
        raise DiskFull(f"{what} was not written to {path}: {why}; make room there, and save again") from error
