"""A Python sandbox as a tool: each program in a process of its own, without network, with limits on CPU, memory, time,
files and output.

Network, other processes and shared memory are kept away by Linux namespaces. A host that allows none (some containers
do not) is an error, and not a silent sandbox without walls: `python_with_network` is for whoever accepts that. Files
are not kept away: a program reads what this user may read, and writes where this user may write. For hostile programs
put the whole run into a container or a virtual machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rltool.errors import UsageError

CHILD = Path(__file__).with_name("sandbox_child.py")
SIGNALLED = 128
"""Exit codes above it are those of programs that a signal has ended, as a shell reports them."""


@dataclass(frozen=True)
class Limits:
    """seconds: on the clock, start of the interpreter included; output_characters: of stdout and stderr together."""

    seconds: float = 10.0
    cpu_seconds: int = 5
    memory_bytes: int = 512 * 1024 * 1024
    file_bytes: int = 16 * 1024 * 1024
    output_characters: int = 4096


@dataclass(frozen=True)
class Ran:
    """exit_code: None where it was ended for its time; cut: whether it wrote more than is in `output`. isolated:
    whether it ran without network."""

    output: str
    exit_code: int | None
    cut: bool
    isolated: bool


async def run_program(code: str, limits: Limits | None = None, *, network: bool = False) -> Ran:
    """Run a Python program to its end, or to the end of its time; what it started ends with it.

    network: run it also where this host has no namespaces for it (there a process that leaves its session lives on).
    UsageError where there are none and `network` is false.
    """
    limits = limits or Limits()
    told = {
        "cpu_seconds": limits.cpu_seconds,
        "memory_bytes": limits.memory_bytes,
        "file_bytes": limits.file_bytes,
        "network": network,
    }
    read_end, write_end = os.pipe()
    with tempfile.TemporaryDirectory(prefix="sandbox-") as directory, os.fdopen(read_end, "rb") as status:
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", str(CHILD), json.dumps(told), str(write_end), cwd=directory,
                start_new_session=True, pass_fds=(write_end,),
                env={"PATH": os.defpath, "HOME": directory, "TMPDIR": directory, "PYTHONIOENCODING": "utf-8"},
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            )  # fmt: skip
        finally:
            os.close(write_end)
        try:
            output, cut, in_time = await _watched(process, code, limits)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        isolated = status.read(1)
    if isolated == b"-":
        raise UsageError(
            "the Python sandbox needs Linux namespaces (unshare), which this host does not allow: allow unprivileged "
            "user namespaces, or take rltool.environments.sandbox:python_with_network if programs may use the network"
        )
    return Ran(output, process.returncode if in_time else None, cut, isolated == b"1")


async def python(code: str) -> str:
    """Run a Python program and return what it prints. Each call starts anew, without network."""
    return told(await run_program(code))


async def python_with_network(code: str) -> str:
    """Run a Python program and return what it prints. Each call starts anew."""
    return told(await run_program(code, network=True))


def told(ran: Ran) -> str:
    """What the model reads of it."""
    parts = [ran.output.rstrip("\n")] if ran.output else []
    if ran.cut:
        parts.append("(output cut)")
    if ran.exit_code is None:
        parts.append("(ended: it took too long)")
    elif ran.exit_code > SIGNALLED:
        parts.append(f"(ended by signal {ran.exit_code - SIGNALLED}: too much CPU time or memory?)")
    elif ran.exit_code:
        parts.append(f"(exit code {ran.exit_code})")
    return "\n".join(parts) or "(no output)"


async def _watched(process: asyncio.subprocess.Process, code: str, limits: Limits) -> tuple[str, bool, bool]:
    """(output, whether there was more, whether it ended in time)."""
    assert process.stdin is not None and process.stdout is not None
    kept = bytearray()
    most = 4 * limits.output_characters  # bytes that so many characters have at most
    cut = False

    async def talk(stdin: asyncio.StreamWriter, stdout: asyncio.StreamReader) -> None:
        nonlocal cut
        with contextlib.suppress(ConnectionError):  # it has ended without reading
            stdin.write(code.encode("utf-8", "surrogateescape"))
            await stdin.drain()
        stdin.close()
        while data := await stdout.read(65536):
            kept.extend(data[: most - len(kept)])
            cut = cut or len(kept) >= most
        await process.wait()

    try:
        async with asyncio.timeout(limits.seconds):
            await talk(process.stdin, process.stdout)
        in_time = True
    except TimeoutError:
        in_time = False
    text = kept.decode("utf-8", "replace")
    return text[: limits.output_characters], cut or len(text) > limits.output_characters, in_time
