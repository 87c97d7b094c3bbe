"""`rltool` commands as processes of their own, their output in a file."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path


class Command:
    """`rltool WORDS` in a process group of its own, its output in `out`. The methods are Popen's.

    Not forked from a process that has imported Ray, which would be three seconds faster: two of some sixty such
    commands on a busy host did not get past the token of the Ray that they had started.
    """

    def __init__(self, words: Sequence[str], *, env: Mapping[str, str], cwd: Path, out: Path) -> None:
        self.args = ["rltool", *words]
        with out.open("w") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rltool", *words], env=dict(env), cwd=cwd, stdin=subprocess.DEVNULL,
                stdout=file, stderr=subprocess.STDOUT, process_group=0,
            )  # fmt: skip
        atexit.register(self.kill)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self, timeout: float | None = None) -> int:
        code = self._process.wait(timeout)
        atexit.unregister(self.kill)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def completed(
    words: Sequence[str], *, env: Mapping[str, str], cwd: Path, out: Path, timeout: float
) -> tuple[int, str]:
    """Run it to its end: exit code, and stdout and stderr as they came."""
    command = Command(words, env=env, cwd=cwd, out=out)
    try:
        return command.wait(timeout), out.read_text()
    finally:
        command.kill()
