"""Tools of real MCP servers, over stdio and streamable HTTP, in `ToolUse`."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from rltool.chat.conversation import Message, ToolCall
from rltool.environments.mcp_server import McpServer
from rltool.environments.protocol import Task
from rltool.environments.tool_use import ToolUse
from rltool.errors import RltoolError, UsageError
from rltool.processes.ports import reserved_ports

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "tests.contract.mcp_tools", "stdio"]
MAKE = "rltool.environments.mcp_server:McpServer"


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with reserved_ports(1, host="127.0.0.1") as reserved:
        [port] = reserved.ports
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.contract.mcp_tools", "http", str(port)], cwd=ROOT, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


def task() -> Task:
    return Task(0, (Message("user", "go"),), None, {}, seed=1)


def calling(name: str, **arguments: Any) -> Message:
    return Message("assistant", "", tool_calls=(ToolCall("c1", name, arguments),))


def during(environment: ToolUse, what: Callable[[Any], Awaitable[Any]]) -> Any:
    """what(start) between reset and close."""

    async def run() -> Any:
        try:
            return await what(await environment.reset(task()))
        finally:
            await environment.close()

    return asyncio.run(run())


async def said(environment: ToolUse, *calls: Message) -> list[str]:
    return [message.text for call in calls for message in (await environment.step(call)).messages]


def of_command(**more: Any) -> dict[str, Any]:
    return {"make": MAKE, "command": COMMAND, "seconds": 120.0, **more}


def servers() -> list[psutil.Process]:
    """Those of `COMMAND` that run."""
    return [p for p in psutil.Process().children(recursive=True) if p.cmdline()[-2:] == COMMAND[-2:]]


def test_tools_of_a_url_are_listed_and_called(url):
    environment = ToolUse([{"make": MAKE, "url": url}], tool_seconds=60.0)

    async def what(start: Any) -> tuple[dict[str, Any], list[str]]:
        schemas = {tool["function"]["name"]: tool["function"] for tool in start.tools}
        calls = [calling("add", a=2, b=3), calling("fail"), calling("add", a="two"), calling("count"), calling("count")]
        return schemas, await said(environment, *calls)

    schemas, answers = during(environment, what)
    assert set(schemas) == {"add", "count", "wait", "fail", "draw", "leave"}
    assert schemas["add"]["description"] == "Add two numbers."
    properties = {"a": {"type": "integer"}, "b": {"type": "integer"}}
    assert schemas["add"]["parameters"] == {"type": "object", "properties": properties, "required": ["a", "b"]}
    added, failed, wrong, *counted = answers
    assert added == "5" and "there is no such page" in failed and failed.lower().startswith("error")
    assert wrong.lower().startswith("error") and counted == ["1", "2"]


def test_images_of_results_are_seen_where_that_is_wanted_and_else_named(url):
    async def what(start: Any, environment: ToolUse) -> list[Any]:
        return list((await environment.step(calling("draw"))).messages)

    found = []
    for images in (True, False):
        environment = ToolUse([{"make": MAKE, "url": url, "only": ["draw"], "images": images}], tool_seconds=60.0)
        found += during(environment, partial(what, environment=environment))
    parts = [{"type": "text", "text": "here"}, {"type": "image", "image": "data:image/png;base64,UE5H"}]
    assert found[0]["content"] == parts and found[0]["role"] == "tool"
    assert found[1].text == "here\n(image left out)"


def test_a_call_that_does_not_end_is_given_up(url):
    environment = ToolUse([{"make": MAKE, "url": url, "only": ["wait"]}], tool_seconds=0.2)
    assert during(environment, lambda start: said(environment, calling("wait"))) == ["error: no result within 0.2 s"]


def test_each_episode_has_a_process_of_its_own_and_one_that_goes_fails_it():
    environments = [ToolUse([of_command(only=["count", "leave"])], tool_seconds=60.0) for _ in range(2)]

    async def run() -> Any:
        try:
            starts = await asyncio.gather(*(environment.reset(task()) for environment in environments))
            answers = [await said(environment, calling("count")) for environment in environments]
            running = len(servers())
            with pytest.raises(RltoolError, match="has closed its connection"):
                await said(environments[0], calling("leave"))
            return [len(start.tools) for start in starts], answers, running
        finally:
            for environment in environments:
                await environment.close()

    assert asyncio.run(run()) == ([2, 2], [["1"], ["1"]], 2)
    assert not servers()


def test_reset_may_be_given_up_and_close_comes_from_another_task():
    async def run() -> None:
        environment = ToolUse([{"make": MAKE, "command": [sys.executable, "-c", "import time; time.sleep(60)"]}])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await environment.reset(task())
        await asyncio.create_task(environment.close())

    asyncio.run(run())
    assert not [p for p in psutil.Process().children(recursive=True) if "import time; time.sleep(60)" in p.cmdline()]


@pytest.mark.parametrize(
    ("entry", "error", "text"),
    [
        ({"make": MAKE, "command": ["no-such-server"]}, RltoolError, "MCP server no-such-server cannot be used"),
        ({"make": MAKE, "command": ["true"]}, RltoolError, "MCP server true cannot be used"),
        ({"make": MAKE, "url": "http://127.0.0.1:9/mcp"}, RltoolError, "127.0.0.1:9/mcp cannot be used"),
        (
            {"make": MAKE, "command": [sys.executable, "-c", "import time; time.sleep(60)"], "seconds": 0.5},
            RltoolError,
            "did not list its tools in 0.5 s|cannot be used: .*imed out",
        ),
    ],
)
def test_what_is_no_server_is_said(entry, error, text):
    environment = ToolUse([entry])
    with pytest.raises(error, match=text):
        during(environment, lambda start: said(environment))


def test_a_tool_that_the_server_has_not_is_named(url):
    environment = ToolUse([{"make": MAKE, "url": url, "only": ["subtract"]}])
    with pytest.raises(UsageError, match="has no tool 'subtract'; it has: add, count, draw, fail, leave, wait"):
        during(environment, lambda start: said(environment))


def test_settings_that_contradict_each_other_are_refused():
    url = "http://127.0.0.1:9"
    for wrong in ({}, {"command": ["a"], "url": url}, {"command": "a b"}, {"url": url, "env": {"A": "b"}}):
        with pytest.raises(UsageError, match="MCP server"):
            McpServer(**wrong)
