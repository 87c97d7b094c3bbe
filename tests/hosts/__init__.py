"""Hosts on one machine, with what Linux has: each a set of namespaces (network, mounts, processes, host name, monotonic
clock), joined by a bridge; faults on the wire between them.

    with Hosts(3) as (a, b, c):
        a.run(["rltool", "--version"])
        hosts.partition(a, b); hosts.loss(0.01); hosts.delay(0.02); hosts.block(b, 8101); hosts.heal(); hosts.kill(b)

Each host has addresses of its own (10.77.0.N and fd77::N), a loopback of its own, its own /tmp, /dev/shm and run
directory (`Hosts.here`, one path with other contents on each host), and knows the others by name. Paths below
`shared` are those of this machine, as a shared disk would be, and so are the installation, wherever it lies, and the
rest of the file system. Monotonic clocks differ by days, as those of real hosts. Wall clocks are the machine's, as
Linux has no namespace for them; `clocks` shifts what the C library tells programs (a library that is preloaded), not
what the kernel writes into files' times.

Namespaces have no names: they end with the processes in them, which the kernel ends with their owner, also where
that is killed. What is left of a killed one is a directory, which the next Hosts removes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.wire import Rules

REPOSITORY = Path(__file__).parents[2]
NAMES = "abcdefghijklmnop"
NEEDED = ("ip", "tc", "unshare", "nsenter", "mount")
PREFIX = "hosts-"
SECONDS = 20.0
_DAY = 86_400

_HOLD = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
os.write(1, b'up')
while os.read(0, 1): pass
"""
"""The first process of a host: with it all others end. It ends with its owner, whose end of the pipe is closed then. As
an init does it leaves no zombies: a rank of Ray takes its raylet for alive as long as there is one."""


_CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#define REAL(name) static __typeof__(name) *real; if (!real) real = dlsym(RTLD_NEXT, #name)
static long shift(void) { static long s; static int known; if (!known) { const char *t = getenv("HOST_CLOCK");
  s = t ? atol(t) : 0; known = 1; } return s; }
static struct timespec back(const struct timespec *t) { struct timespec b = *t;
  if (b.tv_sec > 1000000000) b.tv_sec -= shift(); return b; }
int clock_gettime(clockid_t id, struct timespec *t) { REAL(clock_gettime); int r = real(id, t);
  if (!r && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) t->tv_sec += shift(); return r; }
int gettimeofday(struct timeval *restrict t, void *restrict z) { REAL(gettimeofday); int r = real(t, z);
  if (!r && t) t->tv_sec += shift(); return r; }
time_t time(time_t *at) { REAL(time); time_t t = real(0) + shift(); if (at) *at = t; return t; }
int sem_timedwait(sem_t *restrict s, const struct timespec *restrict t) { REAL(sem_timedwait);
  struct timespec b = back(t); return real(s, &b); }
int pthread_mutex_timedlock(pthread_mutex_t *restrict m, const struct timespec *restrict t) {
  REAL(pthread_mutex_timedlock); struct timespec b = back(t); return real(m, &b); }
int pthread_cond_timedwait(pthread_cond_t *restrict c, pthread_mutex_t *restrict m, const struct timespec *restrict t) {
  static __typeof__(pthread_cond_timedwait) *real;
  if (!real && !(real = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2")))
    real = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
  struct timespec b = back(t); return real(c, m, &b); }
"""
"""Wall time, and until when something waits by it, HOST_CLOCK seconds ahead. Monotonic times are below 1e9 s."""


def missing() -> str | None:
    """Why there can be no hosts here; None where there can."""
    if os.geteuid() != 0:
        return "namespaces need root"
    if absent := [name for name in NEEDED if shutil.which(name) is None]:
        return f"not installed: {', '.join(absent)} (iproute2, util-linux)"
    tried = subprocess.run(["unshare", "-n", "-m", "-p", "-u", "-T", "-f", "true"], capture_output=True, text=True)
    return None if tried.returncode == 0 else tried.stderr.strip()


def require() -> None:
    """For tests. In CI a host that cannot have them is a failure: a skipped test proves nothing."""
    why = missing()
    if why is not None:
        message = f"several hosts on one machine: {why}"
        if os.environ.get("CI", "").lower() in ("true", "1"):
            pytest.fail(message)
        pytest.skip(message)


def _ip(*words: str, inside: int | None = None, check: bool = True) -> str:
    enter = [] if inside is None else ["nsenter", "-t", str(inside), "-n"]
    done = subprocess.run([*enter, *words], capture_output=True, text=True)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


class _Holder:
    """A process that keeps a set of namespaces. pid: as this machine counts."""

    def __init__(self, *unshare: str) -> None:
        self._process = subprocess.Popen(
            ["unshare", *unshare, "--pid", "--fork", "--kill-child=SIGKILL", sys.executable, "-I", "-S", "-c", _HOLD],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        if self._process.stdout.read(2) != b"up":
            raise RuntimeError(f"unshare {' '.join(unshare)} ended with {self._process.wait()}")
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        self.pid = int(children.read_text().split()[0])

    def end(self) -> None:
        """With all processes inside."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._process.wait(SECONDS)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


@dataclass
class Host:
    """name: also its host name; address, address6: on its first interface, eth0."""

    name: str
    number: int
    root: Path
    here: Path
    _holder: _Holder = field(repr=False)
    clock: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Environment of its programs, where its wall clock is another."""
    alive: bool = True

    @property
    def address(self) -> str:
        return self.address_on(0)

    @property
    def address6(self) -> str:
        return f"fd77::{self.number}"

    def address_on(self, network: int) -> str:
        return f"10.{77 + network}.0.{self.number}"

    @property
    def pid(self) -> int:
        """Of its first process, for `nsenter --target PID --all`."""
        return self._holder.pid

    def outside(self, path: Path) -> Path:
        """Where this machine has what the host has at `path`, a path below its run directory or /tmp."""
        for inside, at in ((self.here, self.root / "here"), (Path("/tmp"), self.root / "tmp")):
            if path.is_relative_to(inside):
                return at / path.relative_to(inside)
        raise ValueError(f"{path} is not the host's own")

    def argv(self, argv: Sequence[str], cwd: Path | None = None) -> list[str]:
        enter = ["nsenter", "-t", str(self.pid), "--net", "--mount", "--uts", "--pid", "--time"]
        return [*enter, f"--wdns={cwd or self.here}", "--", *argv]

    def start(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path | None = None, out: Path
    ) -> subprocess.Popen[bytes]:
        """Begin it, in a process group of its own (`os.killpg` is its Ctrl-C); output goes to `out` of this machine."""
        with out.open("ab") as file:
            return subprocess.Popen(
                self.argv(argv, cwd), env=self._env(env), stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def run(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path | None = None,
        timeout: float = 120.0, code: int | None = 0,
    ) -> str:  # fmt: skip
        """To its end. Returns stdout and stderr together; AssertionError where it does not end with `code`."""
        with subprocess.Popen(
            self.argv(argv, cwd), env=self._env(env), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        ) as process:  # fmt: skip
            try:
                said, _ = process.communicate(timeout=timeout)
            except BaseException:  # nsenter hands no signal on
                os.killpg(process.pid, signal.SIGKILL)
                raise
        if code is not None and process.returncode != code:
            raise AssertionError(f"{self.name}: {' '.join(argv)} ended with {process.returncode}:\n{said[-8000:]}")
        return said

    def python(self, text: str, *words: str, **options: Any) -> str:
        return self.run([sys.executable, "-c", text, *words], **options)

    def reaches(self, other: Host, port: int, *, seconds: float = SECONDS) -> bool:
        """Whether `other` answers at the port, with a connection or with a refusal."""
        text = (
            "import socket, sys\ntry: socket.create_connection((sys.argv[1], int(sys.argv[2])), float(sys.argv[3]))\n"
            "except ConnectionRefusedError: pass"
        )
        done = subprocess.run(
            self.argv([sys.executable, "-I", "-S", "-c", text, other.address, str(port), str(seconds)]),
            capture_output=True,
        )
        return done.returncode == 0

    def _env(self, env: Mapping[str, str] | None) -> dict[str, str]:
        own = {"HOME": str(self.here), "TMPDIR": "/tmp", "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1"}
        # An interface of this machine, which a trainer in this process may have chosen.
        ours = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
        return {**ours, **own, **self.clock, **(env or {})}


class Hosts:
    """A context: the hosts, up and joined. Iterating gives them.

    shared: directories and files of this machine that each host sees at their own paths. networks: interfaces of each,
    eth0, eth1, ..., with addresses 10.77.0.N, 10.78.0.N, ... names: host -> what its /etc/hosts says (name -> address)
    where others have another address for that name. clocks: host -> seconds that its wall clock is ahead; needs a C
    compiler.
    """

    def __init__(
        self, count: int, *, shared: Sequence[Path] = (), networks: int = 1,
        names: Mapping[str, Mapping[str, str]] | None = None, clocks: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        self._clocks = clocks or {}
        self._count, self._networks, self._names = count, networks, names or {}
        self._shared = [*shared, REPOSITORY, Path(sys.prefix), Path(sys.base_prefix)]
        self._hosts: list[Host] = []
        self._hub: _Holder | None = None
        self._wire: subprocess.Popen[str] | None = None
        self._rules = Rules()
        self.root = Path()
        self.here = Path()

    def __enter__(self) -> Hosts:
        remove_abandoned()
        self.root = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir="/var/tmp"))
        self.here = self.root / "here"
        self.here.mkdir()
        try:
            if self._clocks:
                argv = ["cc", "-shared", "-fPIC", "-O1", "-x", "c", "-", "-o", str(self.root / "clock.so"), "-ldl"]
                subprocess.run(argv, input=_CLOCK, text=True, check=True)
            self._hub = _Holder("--net")
            for network in range(self._networks):
                bridge = f"br{network}"
                self._in_hub("ip", "link", "add", bridge, "type", "bridge", "stp_state", "0", "forward_delay", "0")
                self._in_hub("ip", "link", "set", bridge, "up")
            for number in range(1, self._count + 1):
                self._hosts.append(self._make(number))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def close(self) -> None:
        for host in self._hosts:
            host._holder.end()
        if self._wire is not None:
            self._wire.kill()
            self._wire.wait()
        if self._hub is not None:
            self._hub.end()
        shutil.rmtree(self.root, ignore_errors=True)

    # -- faults

    def loss(self, share: float) -> None:
        """Of all frames between hosts, at random with a fixed seed."""
        self._apply(replace(self._rules, loss=share))

    def delay(self, seconds: float) -> None:
        """Of each frame, in each direction."""
        self._apply(replace(self._rules, delay=seconds))

    def partition(self, one: Host, *others: Host) -> None:
        """Nothing passes between `one` and the others, in either direction, and nobody is told."""
        pairs = {frozenset((one.name, other.name)) for other in others}
        self._apply(replace(self._rules, cut=self._rules.cut | pairs))

    def block(self, to: Host, port: int, *, source: Host | None = None) -> None:
        """As a firewall that drops packets to a port."""
        rule = (source.name if source else None, to.name, port)
        self._apply(replace(self._rules, blocked=self._rules.blocked | {rule}))

    def heal(self) -> None:
        """No more faults, but for killed hosts and rates."""
        self._apply(Rules())

    def rate(self, bits: int, *hosts: Host) -> None:
        """Bits each second that each of them (all, if none is named) can send, and can be sent."""
        for host in hosts or self._hosts:
            for network in range(self._networks):
                for inside, name in ((host.pid, f"eth{network}"), (None, _port(host, network))):
                    pid = inside if inside is not None else self._hub_pid
                    _ip(
                        "tc", "qdisc", "replace", "dev", name, "root", "tbf", "rate", f"{bits}bit",
                        "burst", "256kb", "latency", "50ms", inside=pid,
                    )  # fmt: skip

    def kill(self, host: Host) -> None:
        """Power off: it falls silent, its peers get neither FIN nor RST, and its processes and its disk are gone."""
        for network in range(self._networks):
            self._in_hub("ip", "link", "set", _port(host, network), "down")
        host.alive = False
        host._holder.end()
        self._apply(self._rules)

    def boot(self, host: Host) -> None:
        """A killed one again: its name and its addresses, an empty disk, and nothing that runs."""
        rules = self._rules
        self._unplug()
        for network in range(self._networks):
            _ip("ip", "link", "delete", _port(host, network), inside=self._hub_pid, check=False)
        shutil.rmtree(host.root, ignore_errors=True)
        host._holder = self._make(host.number)._holder
        host.alive = True
        self._apply(rules)

    # -- the rest

    @property
    def _hub_pid(self) -> int:
        assert self._hub is not None
        return self._hub.pid

    def _in_hub(self, *words: str) -> str:
        return _ip(*words, inside=self._hub_pid)

    def _make(self, number: int) -> Host:
        name = NAMES[number - 1]
        root = self.root / name
        for part in ("here", "tmp"):
            (root / part).mkdir(parents=True)
        days = str(_DAY * 3 * number)
        holder = _Holder("--net", "--mount", "--uts", "--mount-proc", "--time", "--monotonic", days, "--boottime", days)
        shift = self._clocks.get(name)
        clock = {"LD_PRELOAD": str(self.root / "clock.so"), "HOST_CLOCK": str(shift)} if shift else {}
        host = Host(name, number, root, self.here, holder, clock)
        enter = ["nsenter", "-t", str(holder.pid), "--mount", "--uts"]
        (root / "hosts").write_text(self._etc_hosts(name))
        script = [
            "set -e", f"hostname {name}", "mount --make-rprivate /", f"mount --bind {root}/here {self.here}",
            f"mount --bind {root}/hosts /etc/hosts", "mount -t tmpfs -o mode=1777 tmpfs /dev/shm",
        ]  # fmt: skip
        below_tmp = []
        for k, path in enumerate(p.resolve() for p in self._shared):
            if path.is_relative_to("/tmp"):
                held, at = root / f"held{k}", root / "tmp" / path.relative_to("/tmp")
                for place in (held, at):
                    if path.is_dir():
                        place.mkdir(parents=True, exist_ok=True)
                    else:
                        place.parent.mkdir(parents=True, exist_ok=True)
                        place.touch()
                script.append(f"mount --bind {path} {held}")
                below_tmp.append(f"mount --bind {held} {path}")
        script += [f"chmod 1777 {root}/tmp", f"mount --bind {root}/tmp /tmp", *below_tmp]
        _ip(*enter, "sh", "-c", "\n".join(script))
        inside = holder.pid
        _ip("ip", "link", "set", "lo", "up", inside=inside)
        for network in range(self._networks):
            port, own = _port(host, network), f"eth{network}"
            _ip(
                "ip", "link", "add", port, "netns", str(self._hub_pid), "type", "veth",
                "peer", "name", own, "address", _ethernet(host, network), "netns", str(inside),
            )  # fmt: skip
            self._in_hub("ip", "link", "set", port, "master", f"br{network}", "up")
            _ip("ip", "address", "add", f"{host.address_on(network)}/24", "dev", own, inside=inside)
            if network == 0:
                _ip("ip", "-6", "address", "add", f"{host.address6}/64", "dev", own, "nodad", inside=inside)
            _ip("ip", "link", "set", own, "up", inside=inside)
        return host

    def _etc_hosts(self, name: str) -> str:
        own = [f"{address} {other}" for other, address in self._names.get(name, {}).items()]
        named = {line.split()[1] for line in own}
        others = [f"10.77.0.{n} {NAMES[n - 1]}" for n in range(1, self._count + 1) if NAMES[n - 1] not in named]
        return "\n".join(["127.0.0.1 localhost", "::1 localhost", *own, *others]) + "\n"

    def _apply(self, rules: Rules) -> None:
        """Rules that do nothing leave the hosts to the bridge: the wire of user space is slower than the kernel's."""
        self._rules = rules
        if rules == Rules():
            self._unplug()
            return
        if self._wire is None or self._wire.poll() is not None:
            self._plug()
        assert self._wire is not None and self._wire.stdin is not None
        self._wire.stdin.write(rules.json() + "\n")
        self._wire.stdin.flush()
        self._answered()

    def _plug(self) -> None:
        ports = []
        for host in self._hosts:
            if host.alive:
                for network in range(self._networks):
                    self._in_hub("ip", "link", "set", _port(host, network), "nomaster")
                    address = _ethernet(host, network).replace(":", "")
                    ports.append((_port(host, network), host.name, network, address))
        self._wire = subprocess.Popen(
            ["nsenter", "-t", str(self._hub_pid), "--net", "--", sys.executable, "-I", "-S",
             str(Path(__file__).with_name("wire.py")), json.dumps(ports)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._answered()

    def _unplug(self) -> None:
        if self._wire is None:
            return
        assert self._wire.stdin is not None and self._wire.stdout is not None
        self._wire.stdin.close()
        self._wire.wait(SECONDS)
        self._wire.stdout.close()
        self._wire = None
        for host in self._hosts:
            if host.alive:
                for network in range(self._networks):
                    self._in_hub("ip", "link", "set", _port(host, network), "master", f"br{network}")

    def _answered(self) -> None:
        assert self._wire is not None and self._wire.stdout is not None
        if self._wire.stdout.readline() != "ok\n":
            raise RuntimeError(f"the wire ended with {self._wire.wait(SECONDS)}")


def _port(host: Host, network: int) -> str:
    """The hub's end of a host's cable."""
    return f"p{host.name}{network}"


def _ethernet(host: Host, network: int) -> str:
    return f"02:77:00:00:{network:02x}:{host.number:02x}"


def remove_abandoned(where: Path = Path("/var/tmp")) -> list[Path]:
    """Directories whose owner has died: of its namespaces nothing is left by then."""
    gone = []
    for path in where.glob(f"{PREFIX}*"):
        found = re.fullmatch(rf"{PREFIX}(\d+)-.*", path.name)
        if found and not Path(f"/proc/{found[1]}").exists():
            shutil.rmtree(path, ignore_errors=True)
            gone.append(path)
    return gone
