"""Free TCP ports, held until the process that will listen on them is about to start."""

from __future__ import annotations

import random
import socket
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from rltool.errors import RltoolError, UsageError

FREE_RANGE = range(20_000, 32_000)
"""Below Linux's ephemeral range (32768 up): a server takes many seconds from its start to its bind, and an ephemeral
port could be taken by any outgoing connection meanwhile."""

_TRIES = 200


class PortReservation:
    """Listening sockets on `ports` of one host; release() closes them, or those of these ports. Nobody else can bind
    them until then."""

    def __init__(self, host: str, sockets: Sequence[socket.socket]) -> None:
        self.host = host
        self.ports: tuple[int, ...] = tuple(held.getsockname()[1] for held in sockets)
        self._sockets = dict(zip(self.ports, sockets, strict=True))

    def release(self, ports: Collection[int] | None = None) -> None:
        for port in self._sockets.keys() & (self.ports if ports is None else ports):
            self._sockets.pop(port).close()


def reserve_ports(count: int, *, host: str = "127.0.0.1", first: int = 0, flag: str = "--port") -> PortReservation:
    """Hold `count` ports: first, first + 1, ... or, with first = 0, any free ones of FREE_RANGE.

    Raises UsageError, naming the flag, if a wanted port is taken or cannot be bound on this host.
    """
    sockets: list[socket.socket] = []
    try:
        if first:
            for port in range(first, first + count):
                sockets.append(_bind_wanted(host, port, flag))  # noqa: PERF401  # those before a failure are closed below
        else:
            candidates = iter(random.sample(FREE_RANGE, _TRIES + count))
            while len(sockets) < count:
                sockets.append(_bind_any(host, candidates))
    except BaseException:
        for held in sockets:
            held.close()
        raise
    return PortReservation(host, sockets)


@contextmanager
def reserved_ports(count: int, **options) -> Iterator[PortReservation]:
    """reserve_ports that gives the ports back at the end of the block at the latest."""
    reservation = reserve_ports(count, **options)
    try:
        yield reservation
    finally:
        reservation.release()


def _bind_wanted(host: str, port: int, flag: str) -> socket.socket:
    if port > 65535:
        raise UsageError(f"{flag}: port {port} does not exist; the last one is 65535")
    try:
        return _bind(host, port)
    except OSError as error:
        raise UsageError(
            f"{flag}: port {port} on {host} cannot be used ({error.strerror}); choose another, or leave {flag} out for "
            "free ones"
        ) from error


def _bind_any(host: str, candidates: Iterator[int]) -> socket.socket:
    error: OSError | None = None
    for port in candidates:
        try:
            return _bind(host, port)
        except OSError as failed:
            error = failed
    raise RltoolError(
        f"found no free port on {host} among {_TRIES} of {FREE_RANGE.start}..{FREE_RANGE.stop - 1}: {error}"
    )


def _bind(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    held = socket.socket(family, kind, protocol)
    try:
        # As servers do, so that a port in TIME_WAIT counts as free. Linux then lets two sockets share a port as long as
        # none listens: therefore listen.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(address)
        held.listen(1)
    except BaseException:
        held.close()
        raise
    return held
