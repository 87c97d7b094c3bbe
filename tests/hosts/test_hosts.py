"""The test bed itself: what a host has for itself, what each fault does, and that nothing is left of it."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts import REPOSITORY, Host, Hosts, remove_abandoned, require
from tests.hosts.wire import Rules, destination_port

pytestmark = pytest.mark.timeout(120)

PORT = 5000
SECONDS = 20.0


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    require()
    given = tmp_path_factory.mktemp("given")
    (given / "file").write_text("as it is here")
    with Hosts(3, shared=[given], networks=2, names={"c": {"a": "10.78.0.1"}}) as running:
        running.given = given  # pyright: ignore[reportAttributeAccessIssue]
        yield running


@pytest.fixture
def healthy(hosts: Hosts) -> Iterator[Hosts]:
    yield hosts
    hosts.heal()


ECHO = """
import socket
with socket.create_server(("::", 5000), family=socket.AF_INET6, dualstack_ipv6=True) as server:
    while True:
        connection, _ = server.accept()
        while data := connection.recv(1 << 16):
            connection.sendall(data)
"""
ASK = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 5000), 15)
started = time.monotonic()
for k in range(int(sys.argv[2])):
    sent = bytes([k % 256]) * 30000
    connection.sendall(sent)
    back = b""
    while len(back) < len(sent):
        back += connection.recv(1 << 16)
    assert back == sent
print(time.monotonic() - started)
"""


@pytest.fixture(scope="module")
def echo(hosts: Hosts) -> None:
    """A server on b that sends back what comes."""
    _, b, _ = hosts
    b.start([sys.executable, "-c", ECHO], out=hosts.root / "echo.out")
    listens(b)


def listens(host: Host) -> None:
    """Waits until its echo server does."""
    while not host.run(["grep", ":1388 ", "/proc/net/tcp6"], code=None):
        time.sleep(0.05)


def test_a_host_has_its_own_name_disk_memory_processes_and_loopback(hosts: Hosts):
    a, b, c = hosts
    assert [host.run(["hostname"]).strip() for host in hosts] == ["a", "b", "c"]
    a.run(["sh", "-c", f"echo of a > {hosts.here}/x; echo tmp of a > /tmp/x; echo > /dev/shm/x"])
    assert b.run(["sh", "-c", f"ls {hosts.here}; ls /dev/shm; test ! -e /tmp/x"]) == ""
    assert a.outside(hosts.here / "x").read_text() == "of a\n" and a.outside(Path("/tmp/x")).read_text() == "tmp of a\n"
    given: Path = hosts.given  # pyright: ignore[reportAttributeAccessIssue]
    assert {host.run(["cat", str(given / "file")]) for host in hosts} == {"as it is here"}
    assert len(c.run(["sh", "-c", "ls /proc | grep -c '^[0-9]'"])) <= 3, "the machine's processes are not seen"
    clocks = [float(host.run(["cut", "-d", " ", "-f", "1", "/proc/uptime"])) for host in hosts]
    assert clocks[1] - clocks[0] > 86_400


def test_names_and_interfaces(hosts: Hosts, echo: None):
    a, b, c = hosts
    look = "import socket, sys; print(socket.gethostbyname(sys.argv[1]))"
    assert b.python(look, "a").strip() == a.address and c.python(look, "a").strip() == a.address_on(1) != a.address
    for way in (b.address, b.address_on(1), b.address6, "b"):
        a.python(ASK, way, "1")


def test_a_late_wire_and_a_lossy_one_carry_the_same_bytes(healthy: Hosts, echo: None):
    a, b, _ = healthy
    healthy.delay(0.02)
    assert float(a.python(ASK, "b", "5")) > 5 * 2 * 0.02
    healthy.heal()
    healthy.loss(0.05)
    a.python(ASK, b.address6, "100")
    sent = int(a.run(["sh", "-c", "grep ^Tcp: /proc/net/snmp | tail -1 | cut -d ' ' -f 13"]))
    assert sent > 0, "nothing was sent again"


def test_a_partition_and_a_firewall_are_silent_and_cut_only_what_they_name(healthy: Hosts, echo: None):
    a, b, c = healthy
    healthy.partition(a, b)
    assert not a.reaches(b, PORT, seconds=1.0) and not b.reaches(a, PORT, seconds=1.0)
    assert a.reaches(c, PORT) and c.reaches(b, PORT)
    healthy.heal()
    healthy.block(b, PORT, source=a)
    assert not a.reaches(b, PORT, seconds=1.0) and a.reaches(b, PORT + 1) and c.reaches(b, PORT)
    healthy.heal()
    assert a.reaches(b, PORT)


def test_a_rate_limits_what_passes_and_a_wall_clock_is_an_hour_ahead_and_waits_no_longer():
    require()
    waits = (
        "import threading, time; print(time.time()); began = time.monotonic(); c = threading.Condition()\n"
        "with c: c.wait(0.1)\nassert time.monotonic() - began < 5"
    )
    with Hosts(2, clocks={"b": 3600}) as hosts:
        a, b = hosts
        ahead = float(b.python(waits)) - float(a.python(waits))
        assert 3600 - 20 < ahead < 3600 + 20 and abs(int(b.run(["date", "+%s"])) - time.time() - 3600) < 20
        b.start([sys.executable, "-c", ECHO], out=hosts.root / "echo.out")
        listens(b)
        hosts.rate(8_000_000)
        assert float(a.python(ASK, "b", "50")) > 0.5 * 50 * 30_000 / 1e6


def test_the_installation_is_on_each_host_also_where_it_lies_below_tmp(monkeypatch: pytest.MonkeyPatch):
    require()
    with tempfile.TemporaryDirectory(dir="/tmp") as below:
        checkout, environment = Path(below) / "checkout", Path(below) / "environment"
        checkout.mkdir()
        (checkout / "of_the_checkout.py").touch()
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
        monkeypatch.setattr("tests.hosts.REPOSITORY", checkout)
        monkeypatch.setattr(sys, "prefix", str(environment))
        with Hosts(1) as [a]:
            a.run([str(environment / "bin" / "python"), "-c", "import of_the_checkout"])


def test_a_killed_host_falls_silent_with_its_processes():
    require()
    with Hosts(3) as hosts:
        a, b, c = hosts
        sleeper = b.start(["sleep", "1000"], out=hosts.root / "out")
        b.run(["touch", "/tmp/x"])
        assert a.reaches(b, PORT)
        hosts.kill(b)
        assert sleeper.wait(SECONDS) and not a.reaches(b, PORT, seconds=1.0) and a.reaches(c, PORT)
        hosts.partition(a, c)
        hosts.boot(b)
        assert a.reaches(b, PORT) and b.reaches(c, PORT) and not a.reaches(c, PORT, seconds=1.0), "the fault stays"
        assert b.run(["hostname"]).strip() == "b" and b.run(["test", "!", "-e", "/tmp/x"]) == ""
        hosts.heal()
        assert a.reaches(c, PORT) and a.reaches(b, PORT)


def test_nothing_is_left_of_hosts_whose_owner_was_killed():
    require()
    owner = subprocess.Popen(
        [sys.executable, "-m", "tests.hosts", "2"],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None and owner.stdin is not None
    pids = [int(owner.stdout.readline().split()[4]) for _ in range(2)]
    owner.stdin.write("nonsense\npartition a b\n")
    owner.stdin.flush()
    assert owner.stdout.readline() == "error: no fault: nonsense\n" and owner.stdout.readline() == "ok\n"
    [left] = Path("/var/tmp").glob(f"hosts-{owner.pid}-*")
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    ends = time.monotonic() + SECONDS
    while time.monotonic() < ends and any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    remove_abandoned()  # or the hosts of another process's tests have
    assert not left.exists()


def test_rules_say_which_frames_pass():
    rules = Rules(0.25, 0.0, frozenset([frozenset("ab")]), frozenset([(None, "c", 80), ("b", "a", 22)]))
    assert Rules.of_json(rules.json()) == rules
    frame = bytes(12) + b"\x08\x00" + b"\x45" + bytes(8) + b"\x06" + bytes(10) + b"\x00\x09" + (80).to_bytes(2, "big")
    assert destination_port(frame) == 80 and destination_port(bytes(12) + b"\x08\x06" + bytes(40)) is None
    assert not rules.passes("b", "a", bytes(60), 0.9), "cut, either way"
    assert not rules.passes("a", "c", frame, 0.9) and rules.passes("c", "d", frame, 0.9)
    assert not rules.passes("c", "d", frame, 0.2), "lost"


def test_a_process_that_lost_its_parent_leaves_no_zombie():
    require()
    with Hosts(1) as [a]:
        a.run(["sh", "-c", "(sleep 0.1 &)"])
        ends = time.monotonic() + 10
        while "sleep" in (left := a.run(["ps", "ax", "-o", "stat,args"])):
            assert time.monotonic() < ends, left
            time.sleep(0.05)
