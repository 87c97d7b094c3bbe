"""An MCP server with the official package: `python -m tests.contract.mcp_tools stdio`, or `http PORT`."""

from __future__ import annotations

import asyncio
import os
import sys

from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("tools")
calls = 0


@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
def count() -> str:
    """How often it was called, by all who talk to this server."""
    global calls
    calls += 1
    return str(calls)


@server.tool()
async def wait() -> str:
    """Never answers."""
    await asyncio.Event().wait()
    return "done"


@server.tool()
def fail() -> str:
    """Raises."""
    raise ToolError("there is no such page")


@server.tool()
def draw() -> list[str | Image]:
    """Shows a picture."""
    return ["here", Image(data=b"PNG", format="png")]


@server.tool()
def leave() -> str:
    """Ends the server."""
    os._exit(3)


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        server.run("stdio")
    else:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[2]))
