"""What a run takes of the machine: nothing is left after it, and nothing grows while it goes on."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from tests.chaos.invariants import Violation

INTERVAL = 2.0
MEBIBYTE = 2**20
PAGE = os.sysconf("SC_PAGESIZE")
GROWTH = {"memory": 0.05, "descriptors": 0.25, "threads": 0.25}
"""Of the second half's peak over the first half's (its first tenth, in which caches fill, left out)."""
FEWEST = 20


def open_descriptors() -> set[str]:
    """What this process has open: sockets and files, by name and inode."""
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{entry}"))
        except OSError:  # the one that lists
            continue
    return found


@contextmanager
def leftovers() -> Iterator[Path]:
    """A temporary directory for everything, and Violation where the block leaves a socket, pipe, thread or file."""
    gc.collect()
    threads, descriptors = set(threading.enumerate()), open_descriptors()
    base = Path(tempfile.mkdtemp(prefix="chaos-"))
    try:
        with patch.object(tempfile, "tempdir", str(base)):
            yield base
            shutil.rmtree(base / "run", ignore_errors=True)
            files = sorted(path.name for path in base.iterdir())
    finally:
        shutil.rmtree(base, ignore_errors=True)
    gc.collect()
    more = {name for name in open_descriptors() - descriptors if name.startswith(("socket:", "pipe:"))}
    alive = {thread.name for thread in threading.enumerate() if thread not in threads}
    if more or alive or files:
        raise Violation(f"left when the run has ended: {sorted(more)}, threads {sorted(alive)}, files {files}")


class Resources:
    """Memory, descriptors and threads of this process, fakes included, by time."""

    def __init__(self) -> None:
        self._rows: list[dict[str, float]] = []
        self._next = 0.0

    def measure(self) -> None:
        """To be called often; looks every INTERVAL seconds."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + INTERVAL
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE / MEBIBYTE
        threads = float(threading.active_count())
        self._rows.append(
            {"memory": resident, "descriptors": float(len(os.listdir("/proc/self/fd"))), "threads": threads}
        )

    def lines(self) -> list[str]:
        """Peaks of the first and the second half. Violation where one has grown."""
        rows = self._rows[len(self._rows) // 10 :]
        if len(rows) < FEWEST:
            return [f"too short to say what grows: {len(self._rows)} measurements, {INTERVAL:g} s apart"]
        half = len(rows) // 2
        found = []
        for name, allowed in GROWTH.items():
            first, second = (max(row[name] for row in part) for part in (rows[:half], rows[half:]))
            found.append(f"{name}: at most {first:.0f} in the first half, {second:.0f} in the second")
            if second > first * (1 + allowed):
                raise Violation(f"{name} grows: {found[-1]}")
        return found
