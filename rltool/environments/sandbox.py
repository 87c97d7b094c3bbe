"""A Python sandbox as a tool: each program in a process of its own, behind walls, with limits on time, CPU, memory,
processes, files and output.

Inside there is no network, no other process, and no file of the host but the system's libraries and this interpreter,
read-only. What is written goes into memory, up to a limit, and is gone with the program. The end of a program is the
end of everything that it has started; so is the end of its time, of its caller and of its run.
sandbox_child.py builds that from Linux namespaces; a host that does not allow it is an error, never a
sandbox with a wall less. bubblewrap would build the same mounts and processes; the limits of the group, the user of its
own and the filter are ours to do with it too, and hosts without it would need a second way that few people try.

It is the same kernel: for programs that are written to break one, put the whole run into a virtual machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rltool.environments.sandbox_child import Order, Report
from rltool.errors import UsageError
from rltool.processes.run_directory import runs_root

CHILD = Path(__file__).with_name("sandbox_child.py")
COMMAND = (sys.executable, "-I", str(CHILD))
SIGNALLED = 128
"""Exit codes above it are those of programs that a signal has ended, as a shell reports them."""
LATE_SECONDS = 5.0
"""Beyond its time, for the supervisor of a program to report; then it is ended, and everything with it."""
END_SECONDS = 5.0
"""For a killed supervisor to be gone. It alone has our pipes."""


@dataclass(frozen=True)
class Limits:
    """seconds: on the clock, start of the interpreter included; processes: at a time, threads are some too;
    cpu_seconds: of each of them; memory_bytes: of all of them together; file_bytes: of each file, disk_bytes: of all
    files together (they lie in memory); output_characters: of stdout and stderr together."""

    seconds: float = 10.0
    cpu_seconds: int = 5
    processes: int = 32
    memory_bytes: int = 512 * 1024 * 1024
    file_bytes: int = 16 * 1024 * 1024
    disk_bytes: int = 64 * 1024 * 1024
    output_characters: int = 4096


@dataclass(frozen=True)
class Ran:
    """exit_code: None where it was ended; ended: for which limit: "time", "memory", "processes". cut: whether it wrote
    more than is in `output`. walls: how they were built."""

    output: str
    exit_code: int | None
    ended: str | None
    cut: bool
    walls: tuple[str, ...]


def _hidden() -> list[str]:
    """Directories of this host that no program sees."""
    return [os.path.realpath(path) for path in (os.path.expanduser("~"), runs_root(), os.curdir)]


_ENDED = {
    "time": "it took too long",
    "memory": "its processes took too much memory",
    "processes": "it started too many processes",
}


async def run_program(code: str, limits: Limits | None = None, *, network: bool = False) -> Ran:
    """Run a Python program to its end, or to the end of its time; what it started ends with it. Cancelling this ends
    it at once.

    network: it may use the host's; all other walls stand. UsageError where this host does not allow one of them.
    """
    limits = limits or Limits()
    most = 4 * limits.output_characters  # at most 4 bytes a character
    order = Order(
        deadline=time.monotonic() + limits.seconds,
        cpu_seconds=limits.cpu_seconds,
        memory_bytes=limits.memory_bytes,
        file_bytes=limits.file_bytes,
        disk_bytes=limits.disk_bytes,
        processes=limits.processes,
        output_bytes=most,
        network=network,
        parent=os.getpid(),
        hidden=await asyncio.to_thread(_hidden),  # a home may be on another host
    )
    process = await asyncio.create_subprocess_exec(
        *COMMAND, cwd="/", start_new_session=True,
        env={
            "PATH": os.defpath, "HOME": "/tmp", "TMPDIR": "/tmp", "PYTHONIOENCODING": "utf-8",
            # As many threads as the host has cores would be over the limit.
            "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
        },
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(limits.seconds + LATE_SECONDS):
            said, complaint = await process.communicate(
                json.dumps(order).encode() + b"\n" + code.encode("utf-8", "surrogateescape")
            )
        if process.returncode == -signal.SIGKILL:  # by a host that is out of memory, for example
            return Ran("", None, "memory", False, ())
    except TimeoutError:
        return Ran("", None, "time", False, ())
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await process.wait()
    first, _, output = said.partition(b"\n")
    try:
        return _ran(json.loads(first), output, limits)
    except ValueError:
        raise RuntimeError(f"the Python sandbox failed: {complaint.decode('utf-8', 'replace')[-1000:]}") from None


def _ran(report: Report, output: bytes, limits: Limits) -> Ran:
    if "refused" in report:
        raise UsageError(
            f"the Python sandbox cannot be built on this host: {report['refused']}. It needs Linux namespaces: allow "
            "unprivileged user namespaces (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone, "
            "kernel.apparmor_restrict_unprivileged_userns=0; in a container, a seccomp profile that allows unshare and "
            "mount), or run as a root that has CAP_SYS_ADMIN. `rltool doctor` tries it"
        )
    text = output.decode("utf-8", "replace")
    most = limits.output_characters
    cut = report["cut"] or len(text) > most
    return Ran(text[:most], report.get("exit_code"), report.get("ended"), cut, tuple(report["walls"]))


def walls_of_this_host() -> tuple[str, ...]:
    """How they are built here: a program is run behind them. UsageError where this host does not allow one, or ends
    what builds them."""
    ran = asyncio.run(run_program("pass", Limits(seconds=60.0)))
    if ran.exit_code != 0:
        raise UsageError(f"the Python sandbox could not run an empty program on this host: {text_of(ran)}")
    return ran.walls


async def python(code: str) -> str:
    """Run a Python program and return what it prints. Each call starts anew, without network."""
    return text_of(await run_program(code))


async def python_with_network(code: str) -> str:
    """Run a Python program and return what it prints. Each call starts anew."""
    return text_of(await run_program(code, network=True))


def text_of(ran: Ran) -> str:
    """What the model reads of it."""
    parts = [ran.output.rstrip("\n")] if ran.output else []
    if ran.cut:
        parts.append("(output cut)")
    if ran.ended:
        parts.append(f"(ended: {_ENDED[ran.ended]})")
    elif ran.exit_code is not None and ran.exit_code > SIGNALLED:
        parts.append(f"(ended by signal {ran.exit_code - SIGNALLED}: too much CPU time or memory?)")
    elif ran.exit_code:
        parts.append(f"(exit code {ran.exit_code})")
    return "\n".join(parts) or "(no output)"
