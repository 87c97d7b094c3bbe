"""The wire between hosts while a fault is on it: frames are lost, late, or dropped by address or port.

Run in the network namespace that has the hosts' ports: one JSON line of rules on standard input, one line `ok` when
they hold. It needs neither netem nor a packet filter: frames are read from each port and
sent to the one of their address, whole (a frame of up to 64 KiB with its checksum left open, as veth hands it over).
Nothing outside the standard library.
"""

from __future__ import annotations

import heapq
import itertools
import json
import random
import selectors
import socket
import struct
import sys
import time
from dataclasses import dataclass, field
from typing import Any

ALL = 0x0003
PACKET_OUTGOING = 4
SOL_PACKET, PACKET_VNET_HDR = 263, 15
HEADER = 10
"""Bytes of virtio_net_hdr before each frame: how it is to be cut and its checksum completed."""
LARGEST = 1 << 17
BUFFER = 32 << 20


@dataclass(frozen=True)
class Rules:
    """loss: share of frames; delay: seconds each way; cut: pairs of hosts that do not reach each other; blocked:
    (from, to, port) whose packets vanish, from None: of every host. Hosts by name."""

    loss: float = 0.0
    delay: float = 0.0
    cut: frozenset[frozenset[str]] = frozenset()
    blocked: frozenset[tuple[str | None, str, int]] = frozenset()

    @classmethod
    def of_json(cls, text: str) -> Rules:
        raw: dict[str, Any] = json.loads(text)
        return cls(
            raw["loss"], raw["delay"], frozenset(map(frozenset, raw["cut"])), frozenset(map(tuple, raw["blocked"]))
        )

    def json(self) -> str:
        return json.dumps(
            {
                "loss": self.loss,
                "delay": self.delay,
                "cut": [sorted(p) for p in self.cut],
                "blocked": list(self.blocked),
            }
        )

    def passes(self, source: str, to: str, frame: bytes, chance: float) -> bool:
        """Whether a frame arrives. chance: in [0, 1), at random."""
        if frozenset((source, to)) in self.cut or chance < self.loss:
            return False
        if not self.blocked:
            return True
        port = destination_port(frame)
        return not any(port == p and to == t and f in (None, source) for f, t, p in self.blocked)


def destination_port(frame: bytes) -> int | None:
    """Of a TCP or UDP packet in an Ethernet frame; None of anything else."""
    kind = frame[12:14]
    if kind == b"\x08\x00":
        protocol, start = frame[23], 14 + 4 * (frame[14] & 15)
    elif kind == b"\x86\xdd":
        protocol, start = frame[20], 54
    else:
        return None
    return struct.unpack_from("!H", frame, start + 2)[0] if protocol in (6, 17) else None


@dataclass
class Port:
    """host: whose; network: of which; address: the host's Ethernet address there."""

    name: str
    host: str
    network: int
    address: bytes
    socket: socket.socket = field(init=False)

    def __post_init__(self) -> None:
        self.socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL))
        self.socket.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
        self.socket.bind((self.name, ALL))
        self.socket.setblocking(False)


class Wire:
    def __init__(self, ports: list[Port], seed: int) -> None:
        self._ports, self._random, self._rules = ports, random.Random(seed), Rules()
        self._late: list[tuple[float, int, Port, bytes]] = []
        self._order = itertools.count()

    def run(self) -> None:
        """Until standard input ends."""
        with selectors.DefaultSelector() as selector:
            selector.register(sys.stdin, selectors.EVENT_READ)
            for port in self._ports:
                selector.register(port.socket, selectors.EVENT_READ, port)
            print("ok", flush=True)
            while True:
                wait = max(0.0, self._late[0][0] - time.monotonic()) if self._late else None
                for key, _ in selector.select(wait):
                    if key.data is not None:
                        self._take(key.data)
                        continue
                    line = sys.stdin.readline()
                    if not line:
                        return
                    self._rules = Rules.of_json(line)
                    print("ok", flush=True)
                while self._late and self._late[0][0] <= time.monotonic():
                    _, _, port, packet = heapq.heappop(self._late)
                    _send(port, packet)

    def _take(self, port: Port) -> None:
        for _ in range(64):
            try:
                packet, where = port.socket.recvfrom(LARGEST)
            except OSError:  # nothing more, or a host that is gone
                return
            if where[2] == PACKET_OUTGOING:
                continue
            frame = packet[HEADER:]
            for to in self._ports:
                if to is port or to.network != port.network or not (frame[0] & 1 or frame[:6] == to.address):
                    continue
                if not self._rules.passes(port.host, to.host, frame, self._random.random()):
                    continue
                if self._rules.delay:
                    heapq.heappush(self._late, (time.monotonic() + self._rules.delay, next(self._order), to, packet))
                else:
                    _send(to, packet)


def _send(port: Port, packet: bytes) -> None:
    try:
        port.socket.send(packet)
    except OSError:  # full, or the host is gone: lost, as on a real wire
        return


if __name__ == "__main__":
    found = json.loads(sys.argv[1])
    Wire([Port(name, host, network, bytes.fromhex(address)) for name, host, network, address in found], 1).run()
