"""The tools of an MCP server, over stdio or streamable HTTP, with the official client (package `mcp`)."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rltool.environments.protocol import Content
from rltool.environments.tools import cut, function_schema
from rltool.errors import RltoolError, UsageError
from rltool.masking import masked
from rltool.processes.tasks import Background
from rltool.rollout.rewards.worker import describe

if TYPE_CHECKING:
    from mcp import Client

CLOSE_SECONDS = 10.0
"""For a server to take its leave; then the connection is dropped, and a process of ours ended."""


class McpServer:
    """A toolbox: one connection for each episode, so that a server's sessions are the episodes'.

    command: of a server that is started for each episode, over its stdin and stdout; env: added to the few
    variables that such a server gets; url: of one that runs already. key_file: bearer key for the URL. only: names of
    the tools that are offered, () for all. seconds: to connect, and for each request. images: whether the model sees
    those of results; else it reads that they were left out.
    """

    def __init__(
        self,
        *,
        command: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        url: str = "",
        key_file: str = "",
        only: Sequence[str] = (),
        seconds: float = 30.0,
        images: bool = False,
    ) -> None:
        """UsageError for neither or both of command and url, or without the package."""
        if bool(command) == bool(url):
            raise UsageError("an MCP server is named by `command`, a list of words, or by `url`: give one of them")
        if isinstance(command, str):
            raise UsageError(f"an MCP server's command is a list of words: {command.split()}")
        if (key_file and not url) or (env and not command):
            raise UsageError("an MCP server: key_file belongs to a url, env to a command")
        try:
            import mcp  # noqa: F401
        except ImportError:
            raise UsageError("tools of an MCP server need the package mcp: pip install rltool[mcp]") from None
        self._command, self._env, self._url, self._key_file = tuple(command), env, url, key_file
        self._only, self._seconds, self._images = frozenset(only), seconds, images
        self._name = masked(url) or " ".join(masked(command))
        self._closing = asyncio.Event()
        self._background = Background()
        self._holding: asyncio.Task[None] | None = None
        self._connected = False

    async def open(self) -> list[McpTool]:
        """RltoolError where the server cannot be reached in time, UsageError for a tool in `only` that it has not."""
        listed: asyncio.Future[list[McpTool]] = asyncio.get_running_loop().create_future()
        # A task of its own holds the connection: it must end in the task that it began in.
        self._holding = self._background.start(self._hold(listed), f"MCP server {self._name}")
        try:
            async with asyncio.timeout(self._seconds):
                return await listed
        except TimeoutError:
            raise RltoolError(f"the MCP server {self._name} did not list its tools in {self._seconds:g} s") from None

    async def close(self) -> None:
        if self._holding is None:
            return
        self._closing.set()
        if self._connected:
            await asyncio.wait([self._holding], timeout=CLOSE_SECONDS)
        await self._background.close()

    async def _hold(self, listed: asyncio.Future[list[McpTool]]) -> None:
        try:
            async with contextlib.AsyncExitStack() as stack:
                client = await self._connect(stack)
                tools = await self._list(client)
                if not listed.done():
                    listed.set_result(tools)
                self._connected = True
                await self._closing.wait()
        except Exception as error:
            if listed.done():  # later failures reach the calls
                return
            cause = _first(error)
            if not isinstance(cause, UsageError):
                cause = RltoolError(f"the MCP server {self._name} cannot be used: {describe(cause)}")
            listed.set_exception(cause)

    async def _connect(self, stack: contextlib.AsyncExitStack) -> Client:
        import httpx2
        from mcp import Client, StdioServerParameters
        from mcp.client.streamable_http import streamable_http_client

        server: Any
        if self._command:
            program, *arguments = self._command
            server = StdioServerParameters(command=program, args=arguments, env=dict(self._env) if self._env else None)
        elif self._key_file:
            key = (await asyncio.to_thread(Path(self._key_file).read_text)).strip()
            http = httpx2.AsyncClient(headers={"Authorization": f"Bearer {key}"}, timeout=self._seconds)
            server = streamable_http_client(self._url, http_client=await stack.enter_async_context(http))
        else:
            server = self._url
        return await stack.enter_async_context(Client(server, read_timeout_seconds=self._seconds))

    async def _list(self, client: Client) -> list[McpTool]:
        found: list[McpTool] = []
        cursor: str | None = None
        while True:
            page = await client.list_tools(cursor=cursor)
            found += [
                McpTool(tool.name, tool.description or "", tool.input_schema, client, self._name, self._images)
                for tool in page.tools
            ]
            cursor = page.next_cursor
            if cursor is None:
                break
        names = {tool.name for tool in found}
        if lacking := sorted(self._only - names):
            there = ", ".join(sorted(names)) or "none"
            raise UsageError(f"the MCP server {self._name} has no tool {lacking[0]!r}; it has: {there}")
        return [tool for tool in found if not self._only or tool.name in self._only]


@dataclass(frozen=True)
class McpTool:
    """parameters: a JSON schema. server: its name in errors. images: as in McpServer."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    client: Client
    server: str
    images: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        """See ModelTool."""
        return function_schema(self.name, self.description, self.parameters)

    async def call(self, arguments: Mapping[str, Any], *, seconds: float) -> Content:
        """See ModelTool. A server that has gone is an RltoolError: the model must not be blamed for it."""
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        try:
            async with asyncio.timeout(seconds):
                result = await self.client.call_tool(self.name, dict(arguments))
        except TimeoutError:
            return f"error: no result within {seconds:g} s"
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                raise RltoolError(f"the MCP server {self.server} has closed its connection") from error
            return cut(f"error: {error.message}")
        if self.images and not result.is_error and any(block.type == "image" for block in result.content):
            return [_part(block) for block in result.content]
        text = "\n".join(_text(block) for block in result.content)
        if not result.content and result.structured_content is not None:
            text = json.dumps(result.structured_content, ensure_ascii=False)
        return cut(f"error: {text}" if result.is_error and not text.lower().startswith("error") else text)


def _part(block: Any) -> dict[str, str]:
    if block.type == "image":
        return {"type": "image", "image": f"data:{block.mime_type};base64,{block.data}"}
    return {"type": "text", "text": cut(_text(block))}


def _text(block: Any) -> str:
    return block.text if block.type == "text" else f"({block.type} left out)"


def _first(error: BaseException) -> BaseException:
    """The one informative exception of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
