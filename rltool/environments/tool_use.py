"""An environment of tools: the model calls them as often as it likes, and a reply without a call is its answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rltool.chat.conversation import Message, ToolCall
from rltool.config.import_path import load_callable
from rltool.environments.protocol import Given, Start, Step, Task
from rltool.environments.tools import ModelTool, Tool, Toolbox, make_tools
from rltool.errors import UsageError

Score = Callable[[str, Task], float]
"""f(answer, task): what the model's last reply is worth."""


class ToolUse:
    """tools: functions or their import paths, or tables {make = "package.module:f", ...} whose f(...) makes a tool or a
    Toolbox, which is open for as long as the episode (tools.make_tools). system: the first message, if any. score:
    function or import path, f(answer, task) -> float; None leaves the reward to [reward], which is given the text of
    all turns. An episode that ends without an answer has reward 0 where there is a score. tool_seconds: for each
    call."""

    def __init__(
        self,
        tools: Sequence[str | Callable[..., Any] | Mapping[str, Any]],
        *,
        system: str = "",
        score: str | Score | None = None,
        tool_seconds: float = 30.0,
    ) -> None:
        self._tools: dict[str, ModelTool] = {}
        self._boxes: list[Toolbox] = []
        for tool in map(make_tools, tools):
            if isinstance(tool, Tool):
                self._add(tool)
            else:
                self._boxes.append(tool)
        self._system, self._seconds = system, tool_seconds
        self._score: Score | None = (
            load_callable(score, setting="score", takes=("answer", "task")) if isinstance(score, str) else score
        )
        self.answer: str | None = None

    async def reset(self, task: Task) -> Start:
        self._task = task
        for box in self._boxes:
            for tool in await box.open():
                self._add(tool)
        system = (Message("system", self._system),) if self._system else ()
        return Start((*system, *task.messages), [tool.schema for tool in self._tools.values()])

    def _add(self, tool: ModelTool) -> None:
        if tool.name in self._tools:
            raise UsageError(f"two tools have one name: {tool.name}")
        self._tools[tool.name] = tool

    async def step(self, reply: Message) -> Step:
        if not reply.tool_calls:
            self.answer = reply.text
            return Step(done=True)
        return Step([await self._call(call) for call in reply.tool_calls])

    async def _call(self, call: ToolCall) -> Given:
        tool = self._tools.get(call.name)
        if tool is None:
            result = f"error: there is no tool {call.name!r}; there are: {', '.join(self._tools) or 'none'}"
        else:
            result = await tool.call(call.arguments, seconds=self._seconds)
        if isinstance(result, str):
            return Message("tool", result, tool_call_id=call.id)
        return {"role": "tool", "content": result, "tool_call_id": call.id}

    async def reward(self) -> float | None:
        if self._score is None:
            return None
        return await asyncio.to_thread(self._score, self.answer, self._task) if self.answer is not None else 0.0

    async def close(self) -> None:
        async with contextlib.AsyncExitStack() as stack:  # the others too where one fails
            for box in self._boxes:
                stack.push_async_callback(box.close)
