"""What a sandbox's process does before it runs the model's program. Started by path, alone: it imports no rltool.

argv: limits as JSON, {"cpu_seconds", "memory_bytes", "file_bytes", "network"}, and a descriptor. That gets one byte:
"1" where the program runs in namespaces of its own, "0" where this host allows none and `network` is true; else nothing
is run, and the byte is "-". The program comes on stdin.
"""

import ctypes
import json
import os
import resource
import signal
import sys
import traceback

CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET, CLONE_NEWIPC = 0x10000000, 0x20000000, 0x40000000, 0x08000000
PR_SET_PDEATHSIG = 1
REFUSED = 70


def isolate(libc: ctypes.CDLL) -> bool:
    """Namespaces without network, processes or shared memory of others. False where the kernel allows none."""
    apart = CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC
    return libc.unshare(CLONE_NEWUSER | apart) == 0 or libc.unshare(apart) == 0


def limit(limits: dict[str, int]) -> None:
    for kind, most in (
        (resource.RLIMIT_CPU, limits["cpu_seconds"]),
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))


def main() -> None:
    limits, status = json.loads(sys.argv[1]), int(sys.argv[2])
    program = sys.stdin.buffer.read()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    apart = isolate(libc)
    os.write(status, b"1" if apart else b"0" if limits["network"] else b"-")
    os.close(status)
    if not apart and not limits["network"]:
        sys.exit(REFUSED)
    # A new process namespace begins with the next child: its first process, with which all others in it end.
    child = os.fork()
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        sys.exit(code if code >= 0 else 128 - code)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    limit(limits)
    sys.argv = ["program.py"]
    try:
        exec(compile(program, "program.py", "exec"), {"__name__": "__main__"})
    except Exception as error:
        trace = error.__traceback__
        traceback.print_exception(error.with_traceback(trace.tb_next if trace else None))
        sys.exit(1)


main()
