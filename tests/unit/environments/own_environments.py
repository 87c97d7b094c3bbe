"""Environments and tools that the tests name by import path."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Annotated, Literal

from rltool.chat.conversation import Message
from rltool.environments.protocol import Given, Start, Step, Task


def add(a: int, b: Annotated[int, "what is added"] = 1, how: Literal["plain", "loud"] = "plain") -> str:
    """Add two numbers."""
    return f"{a + b}" + ("!" if how == "loud" else "")


class Counting:
    """Answers "again" `times` times, then ends; worth what was said in all."""

    made: list[Counting] = []

    def __init__(self, times: int = 1, *, fails_in: str = "", hangs_in: str = "") -> None:
        self._left, self._fails_in, self._hangs_in = times, fails_in, hangs_in
        self.said: list[Message] = []
        self.closed = 0
        Counting.made.append(self)

    async def _maybe_fail(self, where: str) -> None:
        if where == self._fails_in:
            raise KeyError(where)
        if where == self._hangs_in:
            await asyncio.Event().wait()

    async def reset(self, task: Task) -> Start:
        await self._maybe_fail("reset")
        self.task = task
        return Start(task.messages)

    async def step(self, reply: Message) -> Step:
        await self._maybe_fail("step")
        self.said.append(reply)
        self._left -= 1
        return Step(done=True) if self._left < 0 else Step([Message("user", "again")])

    async def reward(self) -> float | None:
        await self._maybe_fail("reward")
        return float(len(self.said))

    async def close(self) -> None:
        self.closed += 1
        await self._maybe_fail("close")


class Telling(Counting):
    """Tells training how many replies there were."""

    async def step(self, reply: Message) -> Step:
        step = await super().step(reply)
        self.task.train_metadata["replies"] = len(self.said)
        return step


class Paying(Counting):
    """Each step earns the number of the reply, the end a tenth."""

    async def step(self, reply: Message) -> Step:
        return replace(await super().step(reply), reward=float(len(self.said)))

    async def reward(self) -> float | None:
        return 0.1


class Showing(Counting):
    """Shows one message a turn, the first in `reset`."""

    def __init__(self, *shown: Given) -> None:
        super().__init__(len(shown) - 1)
        self._shown = list(shown)

    async def reset(self, task: Task) -> Start:
        self.task = task
        return Start([self._shown.pop(0)])

    async def step(self, reply: Message) -> Step:
        step = await super().step(reply)
        return step if step.done else Step([self._shown.pop(0)])


class Odd(Counting):
    async def step(self, reply: Message) -> Step:
        return Step(done=True, reward=float("nan"))


def not_an_environment() -> object:
    return object()
