"""Connections to a server of ours."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack

from rltool.processes import connections


class Server(asyncio.Protocol):
    connections: tuple[()] = ()

    def __call__(self) -> asyncio.Protocol:
        return asyncio.Protocol()


def test_hundreds_of_clients_may_begin_while_the_server_is_at_work():
    async def busy() -> None:
        listening = await connections.listen(Server(), "127.0.0.1", 0)
        address = listening.sockets[0].getsockname()
        with ExitStack() as stack:
            for _ in range(300):  # none of which it has accepted: the loop stands still
                stack.enter_context(socket.create_connection(address, timeout=5))
        listening.close()

    asyncio.run(busy())
