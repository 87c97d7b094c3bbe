"""Where a process that Ray started writes what it prints, and how much of it stays."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from pathlib import Path

LOG_BYTES = 32 * 1024 * 1024
"""A log that has grown to this is cut; as much of its end stays beside it, in NAME.log.1."""
LOOK_SECONDS = 1.0
_BLOCK = 1024 * 1024


def redirect_output(log_file: Path | None) -> None:
    """Send this process's stdout and stderr, and those of its libraries and children, to the run's log where the run
    directory is reachable; the log is kept from growing without end."""
    if log_file is None or not log_file.parent.is_dir():
        return
    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    log = BoundedLog(log_file, limit=LOG_BYTES)
    threading.Thread(target=_keep_bounded, args=(log,), name="log size", daemon=True).start()


class BoundedLog:
    """A log that others write, by descriptors opened for appending: a user's reward that prints, and what it starts.

    Such a file can be emptied under its writers, whose next line then is its first. So nothing stands between a process
    and its log, and what it printed before it died is there. Lines that come between the copying and the emptying are
    lost: a moment's of a flood.
    """

    def __init__(self, file: Path, *, limit: int) -> None:
        self.file, self._limit = file, limit
        self.earlier = file.with_name(f"{file.name}.1")
        self._cut = 0

    def look(self) -> None:
        """Cut the file if it is above its limit; its first line then has the former size, and where the end is."""
        try:
            size = self.file.stat().st_size
        except FileNotFoundError:  # the run was removed
            return
        if size <= self._limit:
            return
        kept = self._copy_end(size)
        self._cut += size
        note = f"[rltool: {self._cut} bytes were cut off here so far; the last {kept} are in {self.earlier.name}]\n"
        with self.file.open("r+b") as stream:  # in place: a writer's next line never comes before the note
            stream.write(note.encode())
            stream.truncate()

    def _copy_end(self, size: int) -> int:
        """Copies the last `limit` bytes. Returns how many."""
        left = self._limit
        descriptor = os.open(self.earlier, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with self.file.open("rb") as source, os.fdopen(descriptor, "wb") as target:
            source.seek(size - left)
            while left and (block := source.read(min(left, _BLOCK))):
                target.write(block)
                left -= len(block)
        return self._limit - left


def _keep_bounded(log: BoundedLog) -> None:
    stop = threading.Event()  # never set: the thread ends with its process
    while not stop.wait(LOOK_SECONDS):
        with contextlib.suppress(OSError):  # a full disk, on which nothing can be kept beside the log
            log.look()
