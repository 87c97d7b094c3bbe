"""`rltool` commands as processes, forked from one that has imported torch and transformers: each would take three
seconds for that. It has one thread, and does nothing else before the fork.

What starts as a user starts it, `python -m rltool` or `rltool`, is in test_quickstart.py and test_serve_engines.py.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

FORKED = multiprocessing.get_context("forkserver")
"""Of commands, and of the ranks of megatron_ranks.py."""
FORKED.set_forkserver_preload(["tests.e2e.preloaded"])


class Command:
    """`rltool WORDS` in a process group of its own, its output in `out`. The methods are Popen's."""

    def __init__(self, words: Sequence[str], *, env: Mapping[str, str], cwd: Path, out: Path) -> None:
        self.args = ["rltool", *words]
        self._process = FORKED.Process(target=_run, args=(list(words), dict(env), str(cwd), str(out)))
        out.touch()
        self._process.start()
        atexit.register(self.kill)  # before multiprocessing waits for it

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
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


def _run(words: list[str], env: dict[str, str], cwd: str, out: str) -> None:
    """In the forked process: what `python -m rltool WORDS` finds and does."""
    os.setpgid(0, 0)
    for path, flags, numbers in ((os.devnull, os.O_RDONLY, (0,)), (out, os.O_WRONLY | os.O_TRUNC, (1, 2))):
        opened = os.open(path, flags)
        for number in numbers:
            os.dup2(opened, number)
        os.close(opened)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.path.insert(0, cwd)
    assert "torch" in sys.modules and "ray" not in sys.modules, "see preloaded.py"
    import rltool.__main__

    sys.argv = [rltool.__main__.__file__, *words]
    try:
        rltool.__main__.main()
    finally:
        atexit._run_exitfuncs()  # which multiprocessing leaves out; the last one ends the process with main's code
