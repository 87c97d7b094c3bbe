"""Lets a vLLM server on the CPU fork its engine core and workers. Each is spared the import of vLLM: until a server is
ready it takes 10 s of CPU, not 24.

vLLM forks them on a GPU, and spawns them on the CPU (vllm/platforms/cpu.py) because libgomp does not survive a fork of
its threads. With OMP_NUM_THREADS=1, which rltool starts its CPU engines with, there are none.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress

FORK_VARIABLE = "RLTOOL_FORK_ENGINE_PROCESSES"


def fork_engine_processes(environment: Mapping[str, str] = os.environ) -> None:
    """Without the variable nothing changes. Idempotent."""
    if environment.get(FORK_VARIABLE) != "1":
        return
    try:
        from vllm.utils import system_utils
    except ImportError:  # another vLLM: it starts as it does
        return
    if getattr(system_utils, "_maybe_force_spawn", None) not in (None, _fork):
        system_utils._maybe_force_spawn = _fork
        os.register_at_fork(after_in_child=leave_servers_to_the_parent)


def _fork() -> None:
    """vLLM calls it when it is about to start a process: here it may override what the platform has set."""
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"


def leave_servers_to_the_parent() -> None:
    """Of sockets that are bound and not connected. If children had them as well, the port of an API server that dies
    would go on to take connections, which nobody answers. The descriptor stays, and is of /dev/null: Python objects
    that hold its number close it later."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # no socket, or connected to nobody and bound to nothing
            if number != nowhere and _serves(number):
                os.dup2(nowhere, number, inheritable=False)
    os.close(nowhere)


def _serves(number: int) -> bool:
    with socket.socket(fileno=os.dup(number)) as one:
        if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
            return False
        with suppress(OSError):
            one.getpeername()
            return False
        return one.getsockname()[1] != 0
