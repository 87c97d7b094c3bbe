"""One trainer at a time in a run directory: a lock that dies with its holder and names it."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from rltool.errors import UsageError
from rltool.processes.run_directory import RunDirectory

LOCK_FILE = "train.lock"


class RunLock:
    """The right to write what training writes: the driver's state, metrics, checkpoints, rollouts.

    The engines and the router of the run do not take it: they live beside a trainer. It is the kernel's (flock): it
    ends with its process, also by SIGKILL, and its descriptor is closed in every program that the process starts. The
    file stays: with it deleted, two could hold a lock of one name.
    """

    def __init__(self, run: RunDirectory, *, argv: Sequence[str] | None = None) -> None:
        self._run = run
        self._argv = list(sys.argv if argv is None else argv)
        self._descriptor: int | None = None

    @property
    def file(self) -> Path:
        return self._run.state_dir / LOCK_FILE

    def __enter__(self) -> Self:
        """Takes it where the run exists already. One that is still to be made: `take` it then."""
        if self._run.state_dir.is_dir():
            self.take()
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def take(self) -> None:
        """Hold it until the block ends; again is nothing. UsageError names the holder, and nothing was changed."""
        if self._descriptor is not None:
            return
        descriptor = self._open()
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise UsageError(self._refusal()) from None
        except OSError as error:
            os.close(descriptor)
            raise UsageError(
                f"{self.file} cannot be locked ({error.strerror}), so nothing would keep a second trainer out of the "
                "run: put the runs on a file system that has locks (RLTOOL_RUNS)"
            ) from error
        self._descriptor = descriptor
        self._sign(descriptor)

    def _open(self) -> int:
        try:
            return os.open(self.file, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise UsageError(
                f"run {self._run.name} cannot be written: {self.file}: {error.strerror}; choose another run with "
                "--run, or another place for runs with RLTOOL_RUNS"
            ) from error

    def _sign(self, descriptor: int) -> None:
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "argv": self._argv}
        os.ftruncate(descriptor, 0)
        with suppress(OSError):  # a full disk; it is held without a name
            os.pwrite(descriptor, json.dumps(holder).encode(), 0)

    def _refusal(self) -> str:
        name = self._run.name
        return (
            f"run {name} is being written by {_describe(self.file)}: `rltool status --run {name}` shows it, "
            f"`rltool stop --run {name}` ends it (a trainer saves first), and another --run NAME leaves it alone"
        )


def _describe(file: Path) -> str:
    """The holder as it signed; unknown between lock and signature."""
    try:
        holder: dict[str, Any] = json.loads(file.read_text())
        argv = ["rltool", *holder["argv"][1:]]
        where = "" if holder["host"] == socket.gethostname() else f" on host {holder['host']}"
        return f"pid {holder['pid']}{where} ({shlex.join(argv)})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
