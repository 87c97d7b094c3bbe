"""The Python sandbox: real processes behind real walls, as this user; as root, on each kind of host that this one can
be made: for root without user namespaces and without CAP_SYS_ADMIN, for an ordinary user, in a container."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
import venv
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from rltool.environments import sandbox
from rltool.environments.sandbox import Limits, Ran, python, python_with_network, run_program, text_of
from rltool.environments.sandbox_child import MACHINES
from rltool.environments.tools import make_tool
from rltool.errors import UsageError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")

MIB = 1024 * 1024
SMALL = Limits(seconds=30.0, cpu_seconds=20, memory_bytes=256 * MIB, file_bytes=4 * MIB, disk_bytes=16 * MIB)
SHORT = Limits(seconds=4.0, cpu_seconds=60, memory_bytes=256 * MIB, file_bytes=4 * MIB, disk_bytes=16 * MIB)
MARGIN = 20.0
"""Seconds, on a busy host: behind a limit of four, far below what the programs would take."""

INSIDE = (
    "lambda path: [name for name in __import__('os').listdir(path) if not any(root.startswith(__import__('os').path."
    "realpath(path) + '/' + name + '/') for root in (__import__('sys').prefix, __import__('sys').base_prefix))]"
)
"""Names in a directory, but for the way to the interpreter, which may lie anywhere, in /tmp too."""
LAUNCHER = """
import ctypes, os, sys
kind, call, flags, *command = sys.argv[1:]
child = command[-1]
sys.path.insert(0, os.path.dirname(child))
from sandbox_child import *

def refuse(call, flags):
    with_flags = [(0x20, 0, 0, 0), (0x15, 0, 3, call), (0x20, 0, 0, 16), (0x45, 0, 1, flags), (0x06, 0, 0, 0x50001)]
    calls = [*with_flags, (0x06, 0, 0, 0x7FFF0000)]
    filter_ = Filter(len(calls), (Instruction * len(calls))(*calls))
    if os.geteuid():
        prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_SECCOMP, 2, ctypes.addressof(filter_))

def be_ordinary():
    os.umask(0o022)
    check(libc.unshare(CLONE_NEWNS), "unshare")
    mount("", "/", flags=MS_REC | MS_PRIVATE)
    needed = {os.path.realpath(path) for path in (sys.base_prefix, sys.prefix, os.path.dirname(child))}
    closed = set()
    for path in needed:
        while path != "/":
            path = os.path.dirname(path)
            if not os.stat(path).st_mode & 1:
                closed.add(path)
    for path in closed:
        if not any(path.startswith(other + "/") for other in closed):
            below = {need: os.open(need, os.O_PATH) for need in needed if need.startswith(path + "/")}
            mount("readable", path, "tmpfs", 0, "mode=0755")
            for need, fd in below.items():
                os.makedirs(need, exist_ok=True)
                mount(f"/proc/self/fd/{fd}", need, flags=MS_BIND | MS_REC)
                os.close(fd)
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)

if kind == "masked":  # as container runtimes do; a new /proc would show what is beneath
    check(libc.unshare(CLONE_NEWNS), "unshare")
    mount("", "/", flags=MS_REC | MS_PRIVATE)
    mount("masked", "/proc/acpi" if os.path.isdir("/proc/acpi") else "/proc/fs", "tmpfs")
    mount("volume", "/usr/local/share", "tmpfs")  # which everyone may write
if kind == "hidepid":
    check(libc.unshare(CLONE_NEWNS), "unshare")
    mount("", "/", flags=MS_REC | MS_PRIVATE)
    mount("proc", "/proc", "proc", 0, "hidepid=2")
if kind in ("ordinary", "masked", "hidepid"):
    be_ordinary()
elif kind == "unprivileged":
    prctl(24, 21)  # PR_CAPBSET_DROP, CAP_SYS_ADMIN
if int(call):
    refuse(int(call), int(flags))
os.execv(command[0], command)
"""
UNSHARE, MOUNT = {"x86_64": (272, 165), "aarch64": (97, 40)}.get(os.uname().machine, (0, 0))
CLONE_NEWUSER = 0x10000000
EVERY_FLAG = 0xFFFFFFFF
HOSTS = {"this user": ("", 0, 0)}
if os.geteuid() == 0:
    HOSTS = {
        "root without user namespaces": ("", UNSHARE, CLONE_NEWUSER),
        "root without CAP_SYS_ADMIN": ("unprivileged", 0, 0),
        "ordinary user": ("ordinary", 0, 0),
        "ordinary user in a container": ("masked", 0, 0),
    }
WALLS = {
    "root without user namespaces": {"namespaces of root", "processes limited by the kernel"},
    "root without CAP_SYS_ADMIN": {"a user namespace", "processes counted"},
    "ordinary user": {"a user namespace", "processes limited by the kernel"},
    "ordinary user in a container": {"a user namespace", "an empty /proc", "processes limited by the kernel"},
}
"""Where the kernel is 5.14 or newer."""


@dataclass
class Host:
    """Runs programs on a host of one kind. mark: in the command line of all their processes, as `MARK` in a program."""

    name: str
    mark: str

    def run(self, code: str, limits: Limits = SMALL, *, network: bool = False) -> Ran:
        began = time.monotonic()
        try:
            code = code.replace("INSIDE(", f"({INSIDE})(").replace("MARK", self.mark)
            return asyncio.run(run_program(code, limits, network=network))
        finally:
            assert time.monotonic() - began < limits.seconds + MARGIN
            self.assert_nothing_left()

    def supervisor(self) -> psutil.Process:
        """The only child of this process with the mark: there may be engines of other tests beside it."""
        (found,) = [child for child in psutil.Process().children() if self.mark in " ".join(child.cmdline())]
        return found

    def left(self) -> list[str]:
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if self.mark in (line := Path(f"/proc/{pid}/cmdline").read_text()):
                    found.append(f"{pid}: {line[-100:]}")
        return found

    def assert_nothing_left(self) -> None:
        until = time.monotonic() + MARGIN
        while (left := self.left()) and time.monotonic() < until:
            time.sleep(0.05)
        assert not left


def command(mark: str, kind: str, call: int, flags: int, *, interpreter: str = sys.executable) -> tuple[str, ...]:
    program = (interpreter, "-I", "-X", mark, str(sandbox.CHILD))
    if not kind and not call:
        return program
    return (sys.executable, "-I", "-c", LAUNCHER, kind, str(call), str(flags), *program)


LONG = ("ordinary user",)
"""User namespaces, ordinary users and their own /proc are also those of the others."""


@pytest.fixture(
    scope="module", params=[pytest.param(kind, marks=[pytest.mark.long] * (kind in LONG)) for kind in HOSTS]
)
def kind_of_host(request) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandbox, "COMMAND", command("-", *HOSTS[request.param]))
        try:
            asyncio.run(run_program("pass"))
        except (UsageError, RuntimeError) as error:  # RuntimeError: LAUNCHER cannot make such a host here
            if os.environ.get("CI", "").lower() in ("true", "1"):
                pytest.fail(f"in continuous integration the sandbox is tested: {error}")
            pytest.skip(str(error))
    return request.param


@pytest.fixture
def host(kind_of_host, monkeypatch) -> Iterator[Host]:
    mark = uuid.uuid4().hex
    monkeypatch.setattr(sandbox, "COMMAND", command(mark, *HOSTS[kind_of_host]))
    host = Host(kind_of_host, mark)
    yield host
    host.assert_nothing_left()


# -- what programs are for


@pytest.mark.parametrize("kind_of_host", HOSTS, indirect=True)
def test_walls_are_those_of_such_a_host(host):
    found = set(host.run("pass").walls)
    assert found == WALLS.get(host.name, found) and found & {"a user namespace", "namespaces of root"}


def test_a_program_says_what_it_prints(host):
    assert text_of(host.run("print('ü', 1 + 1)")) == "ü 2"
    assert text_of(host.run("pass")) == "(no output)"


def test_it_starts_anew_with_an_empty_directory_and_without_our_environment(host, monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_RUN", "x")
    code = "import os; print(INSIDE('.'), 'SECRET_OF_THE_RUN' in os.environ, __name__); open('a', 'w').write('a')"
    for _ in range(2):
        assert text_of(host.run(code)) == "[] False __main__"


def test_errors_are_told_with_the_program_s_own_lines(host):
    ran = host.run("x = 1\n1 / 0")
    assert ran.exit_code == 1 and 'File "program.py", line 2' in ran.output and "sandbox_child" not in ran.output
    assert text_of(host.run("import sys; sys.exit(3)")) == "(exit code 3)"
    assert "SyntaxError" in host.run("x = ").output


def test_the_interpreter_is_there_with_its_packages_and_processes_of_its_own(host):
    code = """
import ctypes, getpass, os, sqlite3, ssl, subprocess, sys, tempfile
import multiprocessing, pydantic
def square(x): return x * x
print(subprocess.run([sys.executable, "-c", "print(6 * 7)"], capture_output=True, text=True).stdout.strip())
with multiprocessing.Pool(2) as pool: print(pool.map(square, range(4)))
with tempfile.NamedTemporaryFile() as file: print(os.path.dirname(file.name), getpass.getuser())
"""
    assert text_of(host.run(code)) == "42\n[0, 1, 4, 9]\n/tmp sandbox"


def test_an_interpreter_among_temporary_files_is_there_and_cannot_be_written(kind_of_host, monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        os.chmod(directory, 0o755)
        venv.create(directory, symlinks=True)
        python, kind = os.path.join(directory, "bin", "python"), HOSTS[kind_of_host]
        monkeypatch.setattr(sandbox, "COMMAND", command("-", *kind, interpreter=python))
        code = f"""
import os, subprocess, sys
print(subprocess.run([sys.executable, "-c", "print(6 * 7)"], capture_output=True, text=True).stdout.strip())
print(sys.prefix == {directory!r}, os.access(sys.prefix + "/bin", os.W_OK), os.access(sys.prefix + "/lib", os.W_OK))
"""
        assert text_of(asyncio.run(run_program(code, SMALL))) == "42\nTrue False False"


def test_output_is_bounded(host):
    ran = host.run("print('x' * 10_000_000)", Limits(output_characters=50))
    assert ran.cut and ran.output == "x" * 50 and ran.exit_code == 0 and "(output cut)" in text_of(ran)


# -- time

SETUP = """
import ctypes, os, signal, subprocess, sys, time
libc = ctypes.CDLL(None)
def for_ever():
    while True: time.sleep(0.05)
"""
ESCAPES = {
    "loops": "while True: pass",
    "asks not to die with its parent": "libc.prctl(1, 0); for_ever()",
    "closes its pipes": "libc.prctl(1, 0); os.closerange(0, 1000); for_ever()",
    "stops itself": "os.kill(os.getpid(), signal.SIGSTOP)",
    "kills all that it can": """
for pid in (1, -1):
    for number in set(range(1, 65)) - {32, 33}:
        try: os.kill(pid, number)
        except OSError: pass
for_ever()""",
    "is deaf to signals": """
for number in set(range(1, 32)) - {signal.SIGKILL, signal.SIGSTOP}: signal.signal(number, signal.SIG_IGN)
for_ever()""",
    "forks twice and waits": """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: libc.prctl(1, 0)
for_ever()""",
    "starts a session of another program": "subprocess.Popen(['sleep', '98765', 'MARK'], start_new_session=True)\n"
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(98765)', 'MARK'], start_new_session=True)\n"
    "for_ever()",
    "writes for ever": "while True: print('x' * 100_000, flush=True)",
    "forks for ever": """
while True:
    try: os.fork()
    except OSError: pass""",
}


def test_no_program_outlives_its_time_whatever_it_does(host):
    async def all_at_once() -> dict[str, Ran]:
        codes = [(SETUP + code).replace("MARK", host.mark) for code in ESCAPES.values()]
        return dict(zip(ESCAPES, await asyncio.gather(*(run_program(code, SHORT) for code in codes)), strict=True))

    began = time.monotonic()
    ran = asyncio.run(all_at_once())
    assert time.monotonic() - began < SHORT.seconds + MARGIN
    host.assert_nothing_left()
    counted = ran.pop("forks for ever")  # where the kernel sets no limit
    assert counted.ended in ("time", "processes")
    assert {name: (of.exit_code, of.ended, of.output[:1000]) for name, of in ran.items() if of.ended != "time"} == {}
    assert all("(ended: it took too long)" in text_of(of) for of in ran.values())


@pytest.mark.parametrize(
    "escape",
    [
        "if os.fork() == 0: os.setsid(); libc.prctl(1, 0); for_ever()",
        "while True:\n    if os.fork(): os._exit(0)",
        "if os.fork() == 0:\n    while True: print('x', flush=True)\nos._exit(0)",
    ],
)
def test_what_a_program_leaves_ends_with_it(host, escape):
    began = time.monotonic()
    ran = host.run(SETUP + "print('answer', flush=True)\n" + escape, Limits(seconds=60.0))
    assert ran.exit_code == 0 and ran.output.startswith("answer")
    assert time.monotonic() - began < 30.0


STUBBORN = SETUP + "libc.prctl(1, 0); print('MARK', flush=True); for_ever()"


def test_a_cancelled_call_comes_back_at_once(host):
    async def cancelled() -> None:
        task = asyncio.ensure_future(run_program(STUBBORN.replace("MARK", host.mark), Limits(seconds=600.0)))
        await asyncio.to_thread(_until, lambda: len(host.left()) >= 3)
        task.cancel()
        await asyncio.wait({task}, timeout=MARGIN)
        assert task.cancelled()

    asyncio.run(cancelled())


def test_the_time_of_a_tool_s_call_ends_it(host):
    said = asyncio.run(make_tool(python).call({"code": STUBBORN}, seconds=2.0))
    assert said == "error: no result within 2 s"


def test_a_program_ends_with_a_killed_caller(host):
    code = f"""
import asyncio
from rltool.environments import sandbox
sandbox.COMMAND = {sandbox.COMMAND!r}
asyncio.run(sandbox.run_program({STUBBORN.replace("MARK", host.mark)!r}, sandbox.Limits(seconds=600.0)))
"""
    caller = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    try:
        _until(lambda: len(host.left()) >= 4)  # the caller's own command line has the mark too
    finally:
        caller.kill()
        caller.wait()


def test_a_supervisor_that_hangs_is_waited_for_so_long(host, monkeypatch):
    monkeypatch.setattr(sandbox, "LATE_SECONDS", 1.0)

    async def hanging() -> Ran:
        task = asyncio.ensure_future(run_program(STUBBORN.replace("MARK", host.mark), Limits(seconds=4.0)))
        await asyncio.to_thread(_until, lambda: len(host.left()) >= 3)
        supervisor = host.supervisor()
        supervisor.suspend()
        return await asyncio.wait_for(task, MARGIN)

    assert asyncio.run(hanging()).ended == "time"


def test_a_supervisor_that_is_killed_takes_the_program_with_it(host):
    async def killed() -> Ran:
        task = asyncio.ensure_future(run_program(STUBBORN.replace("MARK", host.mark), Limits(seconds=600.0)))
        await asyncio.to_thread(_until, lambda: len(host.left()) >= 3)
        supervisor = host.supervisor()
        supervisor.kill()
        return await asyncio.wait_for(task, MARGIN)

    assert asyncio.run(killed()).ended == "memory"


# -- memory, processes, files


def test_memory_and_cpu_of_a_process_are_bounded(host):
    assert "MemoryError" in host.run("x = bytearray(10**9)").output
    ran = host.run("while True: pass", Limits(seconds=60.0, cpu_seconds=1))
    assert ran.exit_code == 128 + signal.SIGKILL and text_of(ran).startswith("(ended by signal")


GROUP = """
children = 0
data = bytearray(BEFORE * 2**20)
for place in range(0, len(data), 4096): data[place] = 1
for _ in range(CHILDREN):
    if os.fork() == 0:
        more = bytearray(EACH * 2**20)
        for place in range(0, len(more), 4096): more[place] = 1
        time.sleep(SECONDS)
        os._exit(0)
for _ in range(CHILDREN): os.wait()
print('done')
"""


def group(*, before: int, children: int, each: int, seconds: int) -> str:
    values = {"BEFORE": before, "CHILDREN": children, "EACH": each, "SECONDS": seconds}
    code = SETUP + GROUP
    for name, value in values.items():
        code = code.replace(name, str(value))
    return code


def test_memory_of_all_processes_is_bounded_and_what_they_share_counts_once(host):
    ran = host.run(group(before=0, children=6, each=80, seconds=60), Limits(seconds=60.0, memory_bytes=256 * MIB))
    assert ran.ended == "memory" and text_of(ran) == "(ended: its processes took too much memory)"
    assert text_of(host.run(group(before=100, children=6, each=1, seconds=1))) == "done"


def test_what_sockets_hold_counts_as_memory(host):
    """It lies in the kernel, where no process shows it as its own."""
    code = """
import socket
pairs = []
for _ in range(5):
    if os.fork() == 0:
        for _ in range(30):
            pair = socket.socketpair()
            for end in pair:
                before = end.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
                for option in (socket.SO_SNDBUF, socket.SO_RCVBUF, 32, 33):
                    end.setsockopt(socket.SOL_SOCKET, option, 2**22)
                assert end.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == before
                end.setblocking(False)
                try:
                    while True: end.send(bytes(2**16))
                except BlockingIOError: pass
            pairs.append(pair)
        print(len(pairs), flush=True)
        time.sleep(SECONDS)
        os._exit(0)
for _ in range(5): os.wait()
"""
    few = Limits(seconds=60.0, cpu_seconds=60, memory_bytes=100 * MIB)
    assert host.run(SETUP + code.replace("SECONDS", "60"), replace(few, memory_bytes=48 * MIB)).ended == "memory"
    assert text_of(host.run(SETUP + code.replace("SECONDS", "1"), few)) == "30\n" * 4 + "30"


def test_a_program_does_not_read_what_it_was_ordered_with(host):
    code = "print(open('/proc/1/cmdline').read()) if os.path.exists('/proc/1/cmdline') else print('no /proc')"
    said = text_of(host.run("import os\n" + code))
    assert str(Path.home()) not in said.replace(sys.prefix, "") and "deadline" not in said


@pytest.mark.parametrize("kind", ["os.fork() == 0", "threading.Thread(target=for_ever, daemon=True).start()"])
def test_processes_and_threads_are_bounded(host, kind):
    code = f"""
import threading
for number in range(60):
    try:
        if {kind}: for_ever()
    except (OSError, RuntimeError):
        break
print(number, flush=True)
time.sleep(1)
os._exit(0)"""
    ran = host.run(SETUP + code, Limits())
    if ran.ended != "processes":  # refused by the kernel
        assert int(ran.output) == Limits.processes - 1


def test_files_are_bounded_together_wherever_they_are(host):
    code = """
import os
total = 0
try:
    for number in range(1000):
        with open(f"{'/tmp' if number % 2 else '/dev/shm'}/{number}", "wb", buffering=0) as file:
            total += file.write(b"x" * 2**20)
except OSError as error:
    print(error.strerror, total >> 20)
try:
    for number in range(10**6): open(f"/tmp/empty-{number}", "w").close()
except OSError as error:
    print(error.strerror, number < 20000)
"""
    assert text_of(host.run(code)) in [f"No space left on device {n}\nNo space left on device True" for n in (15, 16)]
    code = "file = open('a', 'wb', buffering=0)\nprint(file.write(b'x' * 2**23) >> 20, flush=True)\nfile.write(b'x')"
    ran = host.run(code)
    assert ran.output.startswith("4\n") and "File too large" in ran.output


@pytest.mark.parametrize(
    "call",
    [
        "os.memfd_create('x')",
        "__import__('mmap').mmap(-1, 2**20)",
        "failing(libc.shmget(0, 2**20, 0o1600))",
        "failing(libc.unshare(0x10000000))",
        "failing(libc.unshare(0x20000))",
        "failing(libc.ptrace(16, os.getppid(), 0, 0))",
        "open('/dev/zero')",
    ],
)
def test_memory_that_would_not_count_and_other_namespaces_are_refused(host, call):
    code = f"""
libc = ctypes.CDLL(None, use_errno=True)
def failing(result):
    if result < 0: raise OSError(ctypes.get_errno(), "refused")
try: {call}
except OSError as error: print("refused", error.errno)
"""
    assert text_of(host.run(SETUP + code)) in ("refused 1", "refused 2")


# -- network, sockets, processes, files of the host


def test_there_is_no_network_not_even_to_this_host(host):
    with socket.create_server(("127.0.0.1", 0)) as server:
        reach = f"import socket; socket.create_connection({server.getsockname()!r}, 5); print('reached')"
        assert "OSError" in host.run(reach).output
        assert text_of(host.run(reach, network=True)) == "reached"


@pytest.mark.parametrize("network", [False, True])
def test_sockets_of_the_host_cannot_be_reached_by_path_or_name(host, tmp_path, network):
    os.chmod(tmp_path, 0o755)
    named = f"\0{host.mark}"
    with contextlib.ExitStack() as servers:
        for address in (str(tmp_path / "s"), named):
            server = servers.enter_context(socket.socket(socket.AF_UNIX))
            server.bind(address)
            server.listen()
        code = f"""
import socket
for address in ({str(tmp_path / "s")!r}, {named!r}):
    try: socket.socket(socket.AF_UNIX).connect(address); print('reached')
    except OSError: pass
try: socket.socket(40, socket.SOCK_STREAM); print('vsock')
except OSError: pass
"""
        assert text_of(host.run(code, network=network)) == "(no output)"


def test_other_processes_cannot_be_seen(host):
    code = f"""
import os
print(os.getppid(), set(int(name) for name in os.listdir('/proc') if name.isdigit()) - {{1, 2}})
print(os.path.exists('/proc/{os.getpid()}/environ'))
for name in ('mem', 'environ', 'root/etc', 'cwd', 'fd/3'):
    try: open('/proc/1/' + name); os.listdir('/proc/1/' + name); print(name)
    except OSError: pass
for name in ('/proc/sys/kernel/core_pattern', '/proc/sysrq-trigger', '/proc/self/oom_score_adj'):
    try: open(name, 'w'); print(name)
    except OSError: pass
"""
    assert text_of(host.run(code)) == "1 set()\nFalse"


def test_files_of_the_host_are_not_there_and_nothing_else_can_be_written(host, tmp_path, monkeypatch):
    (tmp_path / "engines.key").write_text("secret")
    for path in (tmp_path, tmp_path / "engines.key"):
        os.chmod(path, 0o755)
    code = f"""
import os, site, sys
for path in ('/home', '/root', '/run', '/var/run/', '/var/tmp/', '/tmp', '/dev/shm', {str(Path.home())!r}):
    try: found = INSIDE(path)
    except OSError: found = []
    if found: print(path, found)
for path in ({str(tmp_path / "engines.key")!r}, {__file__!r}, {sandbox.__file__!r}, '/etc/shadow', '/sys'):
    if os.path.exists(path): print(path)
written = []
for directory, names, _ in os.walk('/'):
    if directory.count('/') > 3 or directory.startswith(('/proc', '/tmp', '/dev/shm')): names.clear()
    elif os.access(directory, os.W_OK): written.append(directory)
for directory in ('/', '/usr', '/etc', '/run', '/home', '/dev', '/proc', *site.getsitepackages(), sys.base_prefix):
    try: open(os.path.join(directory, 'x'), 'w'); written.append(directory)
    except OSError: pass
print(written)
"""
    assert text_of(host.run(code)) == "[]"


def test_home_and_runs_are_empty_where_they_lie_among_the_system_s_files(host, monkeypatch):
    monkeypatch.setenv("HOME", "/usr/share")
    monkeypatch.setenv("RLTOOL_RUNS", "/usr/include")
    assert text_of(host.run("import os; print(os.listdir('/usr/share'), os.listdir('/usr/include'))")) == "[] []"


def test_a_program_has_no_rights_and_gets_none(host):
    code = """
libc = ctypes.CDLL(None, use_errno=True)
held = (ctypes.c_uint32 * 6)()
print(libc.capget((ctypes.c_uint32 * 2)(0x20080522, 0), held), list(held), libc.prctl(39, 0, 0, 0, 0))
try: os.setuid(os.getuid() + 1)
except OSError as error: print(error.errno in (1, 22))
try: os.chroot('/tmp')
except OSError as error: print(error.errno)
"""
    assert text_of(host.run(SETUP + code)) == "0 [0, 0, 0, 0, 0, 0] 1\nTrue\n1"


# -- hosts that do not allow it; these need no namespaces, so they run everywhere


@pytest.mark.parametrize("tool", [python, python_with_network])
@pytest.mark.parametrize(
    ("call", "flags", "named"),
    [(UNSHARE, EVERY_FLAG, ".*unshare"), (MOUNT, EVERY_FLAG, "mount|.*unshare")],
    ids=["without namespaces", "without mounts"],
)
def test_a_host_that_does_not_allow_a_wall_is_an_error(monkeypatch, tool, call, flags, named):
    monkeypatch.setattr(sandbox, "COMMAND", command(uuid.uuid4().hex, "", call, flags))
    with pytest.raises(UsageError, match=rf"cannot be built on this host: ({named})"):  # not text for the model
        asyncio.run(make_tool(tool).call({"code": "print(1)"}, seconds=30.0))


if os.geteuid() == 0:  # else this host cannot be made to be one

    def test_a_host_that_hides_the_processes_to_count_is_an_error(monkeypatch):
        monkeypatch.setattr(sandbox, "COMMAND", command(uuid.uuid4().hex, "hidepid", 0, 0))
        with pytest.raises(UsageError, match="hidepid"):
            asyncio.run(run_program("import time; time.sleep(1)"))


def test_a_processor_without_a_filter_is_an_error(monkeypatch, tmp_path):
    child = tmp_path / "child.py"
    child.write_text(sandbox.CHILD.read_text().replace(f'"{os.uname().machine}": Machine', '"abacus": Machine'))
    assert os.uname().machine in MACHINES
    monkeypatch.setattr(sandbox, "COMMAND", (sys.executable, "-I", str(child)))
    with pytest.raises(UsageError, match=os.uname().machine):
        asyncio.run(run_program("print(1)"))


def _until(true: Callable[[], bool]) -> None:
    until = time.monotonic() + MARGIN
    while not true():
        assert time.monotonic() < until
        time.sleep(0.02)
