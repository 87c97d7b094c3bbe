"""The supervisor of a sandbox: it builds the walls, runs the program behind them, counts, and ends it. Started by path,
alone: it imports no rltool, and its interpreter is the one that the program runs in.

On stdin comes one line of JSON, see `Order`, then the program. (Not in argv: the program can read the command line of
its PID 1.) On stdout goes one line of JSON, see `Report`, and then what the program wrote. Three processes, each the
parent of the next:

  supervisor  outside; it alone has our caller's pipes, so its end is the end of them. Dies with our caller.
  PID 1       of a process namespace: with it the kernel ends every process in there.
              Dies with the supervisor. The program has no right to trace it, and no signal from inside ends it.
  program     no capability and no way to get one, no name-space calls, a root that has the system's libraries and the
              interpreter, read-only, and two small directories in memory.

Limits of the group are of two kinds. The kernel's: processes (RLIMIT_NPROC, where it counts for the sandbox alone),
memory of each process (RLIMIT_DATA), files (the size of their tmpfs). And counting, everywhere: the supervisor reads
the processes' tasks and memory every hundredth of a second and ends the namespace when they are too many. Memory that
no process would show (memfd, System V, shared anonymous mappings) is refused by a seccomp filter; buffers of sockets
keep their default size and are counted by the number of sockets. No cgroups: few
hosts let one make them (containers mount them read-only, users have none delegated), and a killed supervisor would
leave its directory behind.
"""

import ctypes
import errno
import itertools
import json
import os
import resource
import select
import signal
import sys
import time
from typing import NamedTuple, NoReturn, NotRequired, TypedDict

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER = 0x20000, 0x4000000, 0x8000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
NAMESPACES = 0x7E020080
"""All bits by which clone() makes one."""
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
SECCOMP_MODE_FILTER = 2
SHARED_ANONYMOUS = 0x21
"""MAP_SHARED and MAP_ANONYMOUS."""

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/gnu/store")
CONFIGURATION = (
    "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives", "/etc/localtime", "/etc/timezone",
    "/etc/mime.types", "/etc/nsswitch.conf", "/etc/ssl/certs", "/etc/pki/tls/certs", "/etc/pki/ca-trust", "/etc/fonts",
)  # fmt: skip
OF_THE_NETWORK = ("/etc/resolv.conf", "/etc/hosts", "/etc/host.conf", "/etc/gai.conf", "/etc/services")
OF_THE_INTERPRETER = ("bin", "lib", "lib64", "pyvenv.cfg")
"""Without share: below ~/.local it holds keyrings and tokens."""
DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
"""Without /dev/zero: a shared mapping of it is memory that no process shows."""
HOST = "/.host"
MAX_FILES = 16384
"""Inodes are memory of the kernel that no tmpfs size counts."""

FIRST_USER = 0x7F000000
"""As root each program gets a user of its own, this number and 24 random bits: beyond what containers, systemd and
directories of users give out."""
NOBODY = 65534
OF_A_NAMESPACE = (5, 14)
"""Linux from here on counts RLIMIT_NPROC in each user namespace by itself; before, over all processes of the user."""

ADDRESSES = 8
"""Address space for each byte of memory: libraries and threads reserve much that they never take. It bounds the page
tables of a process, which nothing else counts."""

MEMORY = ("RssAnon", "VmSwap", "HugetlbPages")
"""Of /proc/PID/status. What is mapped of files is the host's, or lies in the tmpfs."""
SHARES = ("Pss:", "SwapPss:", "Private_Hugetlb:")
"""Of /proc/PID/smaps_rollup."""
SOCKET_BYTES = 212992
"""What a socket may hold (net.core.wmem_default of most kernels), which no process shows as its memory."""

INTERVAL = 0.01
"""Seconds between two counts, or four times what one takes: in 10 ms a process gets some tens of MiB."""
END_SECONDS = 2.0
"""For the kernel to take down what was killed; a process in the middle of I/O can hold it up."""


class Order(TypedDict):
    """deadline: of CLOCK_MONOTONIC. parent: the caller's pid. hidden: directories that are empty inside, wherever they
    lie. Bytes; `disk_bytes`: of all files together."""

    deadline: float
    cpu_seconds: int
    memory_bytes: int
    file_bytes: int
    disk_bytes: int
    processes: int
    output_bytes: int
    network: bool
    parent: int
    hidden: list[str]


class Report(TypedDict):
    """refused: why no program was run. exit_code: above 128 for a signal, as a shell has it. ended: the limit for which
    the program was ended: time, memory, processes. walls: how they were built, for `rltool doctor`."""

    refused: NotRequired[str]
    exit_code: NotRequired[int]
    ended: NotRequired[str]
    cut: bool
    walls: list[str]


class Machine(NamedTuple):
    """What differs between processors: numbers of system calls, and the mark of their kind (AUDIT_ARCH)."""

    kind: int
    pivot_root: int
    clone: int
    mmap: int
    socket: int
    setsockopt: int
    refused: tuple[int, ...]
    """memfd_create, shmget, semget, msgget: memory that no process shows. unshare, setns: other namespaces. add_key,
    request_key, keyctl: keys of the user. ptrace, process_vm_readv, process_vm_writev, open_by_handle_at,
    perf_event_open, bpf, userfaultfd: nothing that a program needs, and where kernels have had their holes."""


MACHINES = {
    "x86_64": Machine(
        0xC000003E, 155, 56, 9, 41, 54, (319, 29, 64, 68, 272, 308, 248, 249, 250, 101, 310, 311, 304, 298, 321, 323)
    ),
    "aarch64": Machine(
        0xC00000B7,
        41,
        220,
        222,
        198,
        208,
        (279, 194, 190, 186, 97, 268, 217, 218, 219, 117, 270, 271, 265, 241, 280, 282),
    ),
}
REFUSED_EVERYWHERE = (425, 426, 427, 428, 429, 430, 431, 432, 433, 438, 442, 447)
"""io_uring, which goes past the filter; what makes mounts; pidfd_getfd, memfd_secret."""
CLONE3 = 435
"""Its flags lie in memory, where a filter cannot look: libraries take clone() where there is none."""
AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16
BUFFER_SIZES = (7, 8, 32, 33)
"""SO_SNDBUF, SO_RCVBUF, SO_SNDBUFFORCE, SO_RCVBUFFORCE."""


class Fork(NamedTuple):
    """What PID 1 has to know. user: which the program becomes, as root; None: it stays who it is."""

    order: Order
    machine: Machine
    user: int | None
    started: int
    output: int


libc = ctypes.CDLL(None, use_errno=True)


class Instruction(ctypes.Structure):
    """struct sock_filter"""

    _fields_ = (("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("value", ctypes.c_uint32))


class Filter(ctypes.Structure):
    """struct sock_fprog"""

    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(Instruction)))


def check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def explained(error: OSError) -> str:
    return f"{error.strerror} ({error.filename})" if error.filename else error.strerror or str(error)


def prctl(option: int, value: int, more: int = 0) -> None:
    arguments = [ctypes.c_ulong(number) for number in (value, more, 0, 0)]
    what = "a seccomp filter (prctl)" if option == PR_SET_SECCOMP else f"prctl {option}"
    check(libc.prctl(option, *arguments), what)


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    words = [word.encode() if word else None for word in (source, target, kind)]
    check(libc.mount(*words, ctypes.c_ulong(flags), options.encode() or None), f"mount {target}")


# -- the supervisor


def main() -> None:
    first, _, program = sys.stdin.buffer.read().partition(b"\n")
    order: Order = json.loads(first)
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != order["parent"]:
            os._exit(1)  # it died before we asked to die with it
        report, output = supervise(order, program)
    except OSError as error:
        report, output = Report(refused=explained(error), cut=False, walls=[]), b""
    sys.stdout.buffer.write(json.dumps(report).encode() + b"\n" + output)
    sys.stdout.buffer.flush()
    os._exit(0)  # nothing of an interpreter's end is wanted


def supervise(order: Order, program: bytes) -> tuple[Report, bytes]:
    """OSError for a wall that this host does not allow."""
    machine = MACHINES.get(os.uname().machine)
    if machine is None:
        raise OSError(errno.ENOSYS, f"a filter of system calls for {os.uname().machine}")
    as_root = enter()
    started, started_write = os.pipe()
    output, output_write = os.pipe()
    init = os.fork()
    if init == 0:
        user = FIRST_USER + int.from_bytes(os.urandom(3)) if as_root else None
        be_init(Fork(order, machine, user, started_write, output_write))
        be_program(program)
    os.close(started_write)
    os.close(output_write)
    os.set_blocking(output, False)
    return watched(order, init, started, output)


def enter() -> bool:
    """A process namespace for our children: as root by itself (True), else in a user namespace of our own."""
    if os.geteuid() == 0 and libc.unshare(CLONE_NEWPID) == 0:
        return True
    uid, gid = os.geteuid(), os.getegid()
    check(libc.unshare(CLONE_NEWUSER | CLONE_NEWPID), "user namespaces (unshare)")
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # other rights may have reset it
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return False


def watched(order: Order, init: int, started: int, output: int) -> tuple[Report, bytes]:
    """`started` has one line once the program starts, or does not, and ends with PID 1."""
    first, kept, ended, status = b"", bytearray(), "", None
    pause, counted = INTERVAL, 0.0
    while status is None:
        left = order["deadline"] - time.monotonic()
        if left <= 0:
            ended = "time"
            break
        ready, _, _ = select.select([fd for fd in (started, output) if fd >= 0], [], [], min(pause, left))
        if started in ready:
            if data := os.read(started, 4096):
                first += data
            else:
                status = reaped(init)
                break
        if output in ready and not take(output, kept, order["output_bytes"]):
            os.close(output)
            output = -1
        if first.startswith(b"+") and time.monotonic() >= counted:
            before = time.monotonic()
            ended = exceeded(init, order)
            if ended:
                break
            pause = max(INTERVAL, 4 * (time.monotonic() - before))
            counted = time.monotonic() + pause
    if status is None:
        os.kill(init, signal.SIGKILL)
        status = reaped(init)
    if output >= 0:
        take(output, kept, order["output_bytes"])
    if not first.startswith(b"+") and not ended:
        raise OSError(errno.EPERM, first[1:].decode("utf-8", "replace") or "its first process was ended")
    report = Report(cut=len(kept) > order["output_bytes"], walls=first[1:].decode().split(",")[:-1])
    if ended:
        report["ended"] = ended
    elif status is not None:
        code = os.waitstatus_to_exitcode(status)
        report["exit_code"] = code if code >= 0 else 128 - code
    return report, bytes(kept[: order["output_bytes"]])


def take(output: int, kept: bytearray, most: int) -> bool:
    """What is there to read; what exceeds `most` is thrown away, but for one byte. False at its end."""
    for _ in range(16):  # a program that writes for ever must not keep us from counting
        try:
            data = os.read(output, 65536)
        except BlockingIOError:
            return True
        if not data:
            return False
        kept.extend(data[: most + 1 - len(kept)])
    return True


def reaped(init: int) -> int | None:
    """The status of PID 1, which ends after all others of its namespace; None where that takes too long."""
    until = time.monotonic() + END_SECONDS
    while time.monotonic() < until:
        pid, status = os.waitpid(init, os.WNOHANG)
        if pid:
            return status
        time.sleep(0.001)
    return None


def exceeded(init: int, order: Order) -> str:
    """The limit of the group that is passed, or "". What its processes share is counted for each of them at first, and
    as shares (which takes the kernel longer) where that is too much."""
    tasks, memory, seen = 0, 0, children(init)
    if seen is None:
        if os.waitid(os.P_PID, init, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            raise OSError(errno.ENOENT, "counting its processes (needs a /proc without hidepid, CONFIG_PROC_CHILDREN)")
        return ""
    for pid in seen:
        own = counts(pid)
        tasks += own.get("Threads", 0)
        memory += sum(own.get(name, 0) for name in MEMORY)
        if tasks > order["processes"]:
            return "processes"
        seen.extend(children(pid) or ())
    buffers = 0 if order["network"] else SOCKET_BYTES * sockets(init)
    if memory + buffers > order["memory_bytes"]:
        memory = sum(shares(pid) for pid in seen)
    return "memory" if memory + buffers > order["memory_bytes"] else ""


def children(pid: int) -> list[int] | None:
    """None where the process has ended."""
    try:
        found = []
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", "rb") as file:
                found += map(int, file.read().split())
        return found
    except (FileNotFoundError, ProcessLookupError):
        return None


def counts(pid: int) -> dict[str, int]:
    """Of /proc/PID/status: Threads, and memory in bytes. Empty where the process has ended."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            lines = file.read().decode("ascii", "replace").split("\n")
    except (FileNotFoundError, ProcessLookupError):
        return {}
    found = {}
    for line in lines:
        name, _, value = line.partition(":")
        if name == "Threads" or name in MEMORY:
            number = value.split()
            found[name] = int(number[0]) * (1024 if len(number) > 1 else 1)
    return found


def sockets(init: int) -> int:
    """How many there are in the network namespace of PID 1. 0 where it has ended."""
    try:
        with open(f"/proc/{init}/net/sockstat", "rb") as file:
            return int(file.readline().split()[2])  # "sockets: used 4"
    except (FileNotFoundError, ProcessLookupError, IndexError, ValueError):
        return 0
    except OSError as error:  # EINVAL: it is a zombie
        if error.errno == errno.EINVAL:
            return 0
        raise


def shares(pid: int) -> int:
    """Bytes: of what it shares with others, its share. All of it where the process does not let itself be read."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            text = file.read().decode("ascii", "replace")
    except (FileNotFoundError, ProcessLookupError):
        return 0
    except OSError:
        text = ""
    found = [line.split() for line in text.split("\n") if line.startswith(SHARES)]
    if not found:
        own = counts(pid)
        return sum(own.get(name, 0) for name in MEMORY)
    return 1024 * sum(int(words[1]) for words in found)


# -- PID 1


def be_init(fork: Fork) -> None:
    """Build the walls, fork the program, wait for it. Returns in the program's process alone."""
    code, started = 70, fork.started
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        poll = select.poll()
        poll.register(started, 0)
        if any(event & select.POLLERR for _, event in poll.poll(0)):
            os._exit(code)  # the supervisor, which had the other end, died before we asked to die with it
        os.setsid()
        os.umask(0o022)
        started, output = keep_only(started, fork.output)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a signal without a handler does nothing to PID 1
        apart = CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS | (0 if fork.order["network"] else CLONE_NEWNET)
        check(libc.unshare(apart), "namespaces (unshare)")
        walls = build(fork)
        prctl(PR_SET_DUMPABLE, 0)  # or a program of the same user might trace it
        child = os.fork()
        if child == 0:
            walls += confine(fork)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            os.write(started, b"+" + "".join(f"{wall}," for wall in walls).encode())
            os.close(started)
            return
        os.close(output)
        while True:
            pid, status = os.wait()
            if pid == child:
                code = os.waitstatus_to_exitcode(status)
                os._exit(code if code >= 0 else 128 - code)
    except BaseException as error:
        os.write(started, b"-" + (explained(error) if isinstance(error, OSError) else repr(error)).encode())
        os._exit(code)


def keep_only(*wanted: int) -> list[int]:
    """These descriptors, as 3 and up, and /dev/null for 0 to 2: above all, none of our caller's pipes."""
    null = os.open("/dev/null", os.O_RDWR)
    for place in range(3):
        os.dup2(null, place)
    moved = [os.dup2(fd, 100 + place) for place, fd in enumerate(wanted)]
    kept = [os.dup2(fd, 3 + place, inheritable=False) for place, fd in enumerate(moved)]
    os.closerange(3 + len(kept), 1 << 16)
    return kept


def build(fork: Fork) -> list[str]:
    """A root of its own. Returns what is to be known of it."""
    order = fork.order
    files = CONFIGURATION + DEVICES + (OF_THE_NETWORK if order["network"] else ())
    sources = [(os.path.realpath(path), path) for path in files if os.path.exists(path)]
    links = {path: os.readlink(path) for path in SYSTEM if os.path.islink(path)}
    system = [path for path in SYSTEM if path not in links and os.path.isdir(path)]
    hidden = [path for path in order["hidden"] if within(path, system) and path not in system and os.path.isdir(path)]
    for prefix in (sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix):
        for part in OF_THE_INTERPRETER:
            literal = os.path.join(prefix, part)
            source = os.path.realpath(literal)
            if os.path.exists(source):
                sources += [(source, path) for path in (literal, source) if outside(path, system, hidden)]
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # where the host runs out of memory, this is what it ends first

    mount("", "/", flags=MS_REC | MS_PRIVATE)
    mount("sandbox", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, f"size=1m,nr_inodes={MAX_FILES},mode=0755")
    os.mkdir(f"/tmp{HOST}")
    os.chdir("/tmp")
    check(libc.syscall(fork.machine.pivot_root, b".", HOST[1:].encode()), "pivot_root")
    os.chdir("/")
    for path in system:
        bind(path, path)
    for path, target in links.items():
        os.symlink(target, path)
    for path in hidden:
        mount("sandbox", path, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=0755")
    memory = "/run"
    for path in ("/root", "/home", "/var", "/proc", "/tmp", "/dev/shm", memory):
        os.makedirs(path, exist_ok=True)
    mount("sandbox", memory, "tmpfs", MS_NOSUID | MS_NODEV, f"size={order['disk_bytes']},nr_inodes={MAX_FILES}")
    for path in ("/tmp", "/dev/shm"):  # both of one tmpfs, so that its size is the limit of both
        part = memory + "/" + os.path.basename(path)
        os.mkdir(part)
        os.chmod(part, 0o1777)
        mount(part, path, flags=MS_BIND)
    check(libc.umount2(memory.encode(), MNT_DETACH), f"umount {memory}")
    for source, path in sources:  # behind /tmp, for an interpreter may lie there
        if not os.path.lexists(path):
            bind(source, path)
    for target, path in (("/tmp", "/var/tmp"), ("/run", "/var/run"), ("/proc/self/fd", "/dev/fd")):
        if not os.path.lexists(path):
            os.symlink(target, path)
    with open("/etc/passwd", "w") as file:
        for uid in (os.getuid(),) if fork.user is None else (fork.user, NOBODY):
            file.write(f"sandbox:x:{uid}:{uid}::/tmp:/bin/sh\n")
    walls = ["namespaces of root" if fork.user else "a user namespace"]
    try:
        # Read-only: to the kernel's root, which a container's may be, /proc/sys is open without any capability.
        mount("proc", "/proc", "proc", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC)
    except OSError:  # in a container that masks parts of its own, which a new one would show
        walls.append("an empty /proc")
    close(read_mounts(f"{HOST}/proc/self/mountinfo"))
    check(libc.umount2(HOST.encode(), MNT_DETACH), "umount of the host's files")
    os.rmdir(HOST)
    mount("", "/", flags=MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    os.chdir("/tmp")
    return walls


def outside(path: str, system: list[str], hidden: list[str]) -> bool:
    return not within(path, system) or within(path, hidden)


def within(path: str, roots: list[str]) -> bool:
    return any(path == root or path.startswith(root + "/") for root in roots)


def bind(source: str, path: str) -> None:
    """The host's `source`, as `path`."""
    source = HOST + source
    if os.path.isdir(source):
        os.makedirs(path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        open(path, "x").close()
    mount(source, path, flags=MS_BIND | MS_REC)


def read_mounts(table: str) -> list[tuple[str, list[str]]]:
    """(where, options) of each mount; paths of the table have spaces and the like as octal numbers."""
    with open(table, "rb") as file:
        lines = [line.split(b" ") for line in file.read().splitlines()]
    return [
        (os.fsdecode(words[4].decode("unicode_escape").encode("latin-1")), words[5].decode().split(","))
        for words in lines
    ]


def close(mounts: list[tuple[str, list[str]]]) -> None:
    """Read-only, but for the two directories in memory; what mounts were forbidden before they stay."""
    kept = {"nodev": MS_NODEV, "noexec": MS_NOEXEC}
    for path, options in mounts:
        if path in ("/", "/tmp", "/dev/shm") or within(path, [HOST, "/proc"]):
            continue
        flags = MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID
        for option in options:
            flags |= kept.get(option, 0)
        try:
            mount("", path, flags=flags)
        except OSError as error:
            if error.errno != errno.EACCES:  # what we cannot reach the program cannot either
                raise


# -- the program


def confine(fork: Fork) -> list[str]:
    """Take from this process what it may do. Returns what is to be known of it."""
    order = fork.order
    if fork.user is not None:
        alone = become(fork.user)
    else:
        alone = os.getuid() != 0 and kernel_version() >= OF_A_NAMESPACE  # the kernel's root has no such limit
    drop_capabilities()
    with open(os.__file__, "rb"):  # perhaps not to be read by another user
        pass
    limits = {
        resource.RLIMIT_CPU: order["cpu_seconds"],
        resource.RLIMIT_DATA: order["memory_bytes"],
        resource.RLIMIT_AS: ADDRESSES * order["memory_bytes"],
        resource.RLIMIT_FSIZE: order["file_bytes"],
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_CORE: 1,  # 0 would still start a handler that the host has for core dumps
    }
    if alone:  # without a user of its own PID 1 and the supervisor count too
        limits[resource.RLIMIT_NPROC] = order["processes"] + (0 if fork.user else 2)
    for kind, most in limits.items():
        allowed = resource.getrlimit(kind)[1]
        most = most if allowed == resource.RLIM_INFINITY else min(most, allowed)
        resource.setrlimit(kind, (most, most))
    prctl(PR_SET_DUMPABLE, 1)  # after a change of user it is not, and its own /proc/self would be closed to it
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    refuse_calls(fork.machine, with_network=order["network"])
    return ["processes limited by the kernel" if alone else "processes counted"]


def become(user: int) -> bool:
    """Another user, without groups. False where it is one of many processes that are nobody."""
    os.setgroups([])
    for number in (user, NOBODY):
        try:
            os.setresgid(number, number, number)
            os.setresuid(number, number, number)
        except OSError as error:
            if error.errno != errno.EINVAL or number == NOBODY:  # EINVAL: a user namespace has no such number
                raise OSError(error.errno, f"another user (setresuid): {error.strerror}") from error
        else:
            return number == user
    return False


def kernel_version() -> tuple[int, int]:
    major, minor = os.uname().release.split(".")[:2]
    return int(major), int("".join(itertools.takewhile(str.isdigit, minor)))


def drop_capabilities() -> None:
    """All of them; no_new_privs keeps them away."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    check(libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")


def refuse_calls(machine: Machine, *, with_network: bool) -> None:
    """A seccomp filter. It is there for the memory that counting does not see, namespaces, and sockets of other kinds:
    a network namespace is none for a virtual machine's vsock, and with the host's network, abstract UNIX sockets are
    the host's."""
    load, equal, at_least, any_bit, both, end = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
    number, kind, argument = 0, 4, lambda place: 16 + 8 * place
    allow, kill = 0x7FFF0000, 0x80000000

    def refused(with_error: int) -> tuple[int, int, int, int]:
        return (end, 0, 0, 0x50000 | with_error)

    calls = [(load, 0, 0, kind), (equal, 1, 0, machine.kind), (end, 0, 0, kill), (load, 0, 0, number)]
    calls += [(at_least, 0, 1, 0x40000000), refused(errno.ENOSYS)]  # the other numbers of x86-64 (x32)
    for call in machine.refused + REFUSED_EVERYWHERE:
        calls += [(equal, 0, 1, call), refused(errno.EPERM)]
    calls += [(equal, 0, 1, CLONE3), refused(errno.ENOSYS)]
    calls += [(equal, 0, 4, machine.clone), (load, 0, 0, argument(0))]
    calls += [(any_bit, 0, 1, NAMESPACES), refused(errno.EPERM), (end, 0, 0, allow)]
    calls += [(equal, 0, 5, machine.mmap), (load, 0, 0, argument(3)), (both, 0, 0, SHARED_ANONYMOUS)]
    calls += [(equal, 0, 1, SHARED_ANONYMOUS), refused(errno.EPERM), (end, 0, 0, allow)]
    families = (AF_INET, AF_INET6, AF_NETLINK, *(() if with_network else (AF_UNIX,)))
    calls += [(equal, 0, 2 + 2 * len(families), machine.socket), (load, 0, 0, argument(0))]
    for family in families:
        calls += [(equal, 0, 1, family), (end, 0, 0, allow)]
    calls += [refused(errno.EAFNOSUPPORT)]
    calls += [(equal, 0, 3 + len(BUFFER_SIZES), machine.setsockopt), (load, 0, 0, argument(1))]
    calls += [(equal, 0, 1 + len(BUFFER_SIZES), 1), (load, 0, 0, argument(2))]  # SOL_SOCKET
    for place, option in enumerate(BUFFER_SIZES):
        calls += [(equal, len(BUFFER_SIZES) - place, 0, option)]
    calls += [(end, 0, 0, allow), refused(0)]  # as if done: a kernel caps these sizes without an error too
    instructions = (Instruction * len(calls))(*calls)
    filter_ = Filter(len(calls), instructions)
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(filter_))


def be_program(program: bytes) -> NoReturn:
    sys.argv = ["program.py"]
    main = sys.modules["__main__"] = type(sys)("__main__")  # what pickles its functions looks for them there
    try:
        exec(compile(program, "program.py", "exec"), main.__dict__)
    except Exception as error:
        import traceback  # not at the start of every program

        trace = error.__traceback__
        traceback.print_exception(error.with_traceback(trace.tb_next if trace else None))
        sys.exit(1)
    sys.exit(0)


if __name__ == "__main__":
    main()
