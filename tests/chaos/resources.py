"""What a run takes of the machine: nothing is left after it, and nothing grows while it goes on."""

from __future__ import annotations

import gc
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import psutil

from tests.chaos.invariants import Violation

INTERVAL = 2.0
MEBIBYTE = 2**20
PAGE = os.sysconf("SC_PAGESIZE")
GROWTH = {"memory": 0.02, "descriptors": 0.1, "threads": 0.1}
"""What may be added, as a share: see `growth`."""
FEWEST = 50
TENTHS = 10
SETTLES = 5.0
"""Seconds after a run's end in which its last sockets and threads may go."""


def open_descriptors() -> set[str]:
    """What this process has open: sockets and files, by name and inode."""
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{entry}"))
        except OSError:  # the one that lists
            continue
    return found


def described(names: set[str]) -> list[str]:
    """Those sockets and pipes of this process with their addresses and states."""
    known = {conn.fd: f" {conn.laddr} {conn.raddr} {conn.status}" for conn in psutil.Process().net_connections("all")}
    found = {name: name for name in names}
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{entry}")
            if name in names:
                found[name] = f"{name}{known.get(int(entry), '')}"
    return sorted(found.values())


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
    ends = time.monotonic() + SETTLES  # a handler that has just answered still closes its socket
    while True:
        gc.collect()
        more = {name for name in open_descriptors() - descriptors if name.startswith(("socket:", "pipe:"))}
        alive = {thread.name for thread in threading.enumerate() if thread not in threads}
        if not (more or alive) or time.monotonic() > ends:
            break
        time.sleep(0.1)
    if more or alive or files:
        raise Violation(f"left when the run has ended: {described(more)}, threads {sorted(alive)}, files {files}")


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
        """Medians of each tenth of the time. Violation where something grows."""
        if len(self._rows) < FEWEST:
            return [f"too short to say what grows: {len(self._rows)} measurements, {INTERVAL:g} s apart"]
        tenths = {name: medians([row[name] for row in self._rows]) for name in GROWTH}
        lines = [f"{name} (medians of tenths): {' '.join(f'{it:.0f}' for it in of)}" for name, of in tenths.items()]
        growing = [name for name, of in tenths.items() if growth(of) > GROWTH[name]]
        if growing:
            raise Violation("\n  ".join([f"{' and '.join(growing)} grow:", *lines]))
        return lines


def medians(values: Sequence[float]) -> list[float]:
    """Of each tenth of the values, of which there are as many at least."""
    ends = [len(values) * number // TENTHS for number in range(TENTHS + 1)]
    return [statistics.median(values[begin:end]) for begin, end in pairwise(ends)]


def growth(tenths: Sequence[float]) -> float:
    """By what share the least of the last three tenths is above the most of the second to the fifth: of what grows all
    the time three tenths of the whole growth, of what goes up and down nothing. In the first one caches fill."""
    return min(tenths[7:]) / max(tenths[1:5]) - 1
