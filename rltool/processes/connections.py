"""How many connections a server of ours keeps, and how long one may take to ask for something.

A client shows its key in the head of a request: one that sends half a head could else hold a descriptor for ever, and
the process would be left with none for its files.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import Sized
from typing import Protocol

IDLE_SECONDS = 75.0
"""For a connection between two requests, and for the head of the first one."""
BACKLOG = 1024
"""Connections that wait to be accepted: asyncio's 100 are fewer than agents that begin together."""
BODY_SECONDS = 60.0
"""For the body of a request whose head is there."""


class Connections(Protocol):
    """What is used of aiohttp.web.Server: it makes the protocol of a connection, and knows those that are open."""

    @property
    def connections(self) -> Sized: ...

    def __call__(self) -> asyncio.BaseProtocol: ...


class _Refused(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


def most_connections() -> int:
    """Half of the descriptors that this process may have: each request may need another one, to an engine or a file."""
    return max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


def allow_more() -> None:
    """Raise this process's limit of descriptors as far as it may: the usual 1,024 would be 512 connections."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS: no limit is not a number that it takes
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def listen(server: Connections, host: str, port: int, *, shared: bool = False) -> asyncio.Server:
    """Accept connections for `server`; those beyond `most_connections` are closed at once. shared: with
    other processes that listen there so, among which the kernel deals out connections. To be closed by the caller."""

    def protocol() -> asyncio.BaseProtocol:
        return server() if len(server.connections) < most_connections() else _Refused()

    return await asyncio.get_running_loop().create_server(
        protocol, host, port, reuse_port=shared or None, backlog=BACKLOG
    )
