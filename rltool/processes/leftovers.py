"""What processes keep outside of the run directory, and leave there when they are killed: sockets, shared memory.

A temporary directory has a lock of the kernel. It is held by the process that the directory is for, and so by those
that it forks, and ends with the last of them, also by SIGKILL. Who finds the lock free may remove the directory.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from rltool.errors import RltoolError

_PREFIX = "rltool-"
_LOCK_FILE = "lock"
_FILES = "t"

SOCKET_BYTES = 107
"""The longest path of a UNIX socket (sun_path, unix(7)), its end mark aside."""

SHARED_MEMORY = Path("/dev/shm")
_SEGMENT = re.compile(r"(?:psm_|sem\.mp-)\w+")
"""Names that Python makes up for shared memory and semaphores of multiprocessing: no process looks for them that has
not been given the name. Others may be meant to outlive their makers."""


@dataclass(frozen=True)
class TemporaryDirectory:
    """path: for the files of a process, below a directory that other users can neither enter nor move. descriptor: the
    lock; a program that is to hold it inherits it (pass_fds)."""

    path: Path
    descriptor: int

    def release(self) -> None:
        """Leave it to those that have inherited the lock."""
        os.close(self.descriptor)

    def remove(self) -> None:
        """With all that is in it. What a process still writes there meanwhile is left to `remove_abandoned`."""
        _remove(self.path.parent)
        self.release()


@contextmanager
def temporary_directory(longest_name: int) -> Iterator[Path]:
    """For files of this process and its children, removed at the end of the block. longest_name: see below."""
    made = make_temporary_directory(longest_name)
    try:
        yield made.path
    finally:
        made.remove()


def make_temporary_directory(longest_name: int) -> TemporaryDirectory:
    """Empty and new. longest_name: characters below it of the longest path of a UNIX socket there. RltoolError where no
    place for temporary files is short enough, OSError where none can be written."""
    root = _root(longest_name)
    while True:
        made = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))  # 0700
        descriptor = os.open(made / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            (made / _FILES).mkdir(mode=0o700)
            return TemporaryDirectory(made / _FILES, descriptor)
        os.close(descriptor)  # it was taken for abandoned before it was locked


def remove_abandoned() -> None:
    """Temporary directories of this user whose processes have all ended. What cannot be removed now stays."""
    for root in _roots():
        for found in root.glob(f"{_PREFIX}*"):
            with suppress(OSError):
                _remove_if_abandoned(found)


def _remove_if_abandoned(found: Path) -> None:
    status = found.lstat()
    if status.st_uid != os.geteuid() or not found.is_dir() or found.is_symlink() or status.st_mode & 0o077:
        return  # another's: what it calls a lock may be anything
    descriptor = os.open(found / _LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(found)
    finally:
        os.close(descriptor)


def _remove(directory: Path) -> None:
    """The lock goes last: what is left without one would never be found again."""
    shutil.rmtree(directory / _FILES, ignore_errors=True)
    if not (directory / _FILES).exists():
        with suppress(OSError):
            (directory / _LOCK_FILE).unlink()
            directory.rmdir()


def _root(longest_name: int) -> Path:
    below = len(f"/{_PREFIX}12345678/{_FILES}/") + longest_name
    for root in _roots():
        if len(os.fsencode(root)) + below <= SOCKET_BYTES:
            return root
    raise RltoolError(
        f"no directory for sockets: a path of theirs has at most {SOCKET_BYTES} bytes, {below} of them below "
        f"{' or '.join(map(str, _roots()))}; set TMPDIR to a directory whose path is shorter"
    )


def _roots() -> list[Path]:
    usual = Path(tempfile.gettempdir())
    return list(dict.fromkeys([usual, Path("/tmp")]))


def mapped_segments(pids: Iterable[int]) -> set[Path]:
    """Shared memory of Python's multiprocessing that these processes have mapped, of those that can be looked at."""
    return {file for pid in pids for file in _mapped(pid)}


def remove_unmapped(segments: Iterable[Path]) -> None:
    """Those of them that no process has mapped any more, of those that can be looked at."""
    left = {segment for segment in segments if segment.exists()}
    if not left:
        return
    for segment in left - mapped_segments(psutil.pids()):
        with suppress(OSError):
            segment.unlink()


def _mapped(pid: int) -> set[Path]:
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return set()
    files = (Path(line.split(maxsplit=5)[-1]) for line in lines if f" {SHARED_MEMORY}/" in line)
    return {file for file in files if file.parent == SHARED_MEMORY and _SEGMENT.fullmatch(file.name)}
