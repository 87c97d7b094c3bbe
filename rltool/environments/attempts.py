"""An environment of several attempts at one answer, with a checker's feedback in between: reasoning-gym's tasks, for
example."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rltool.chat.conversation import Message
from rltool.config.import_path import load_callable
from rltool.environments.protocol import Start, Step, Task
from rltool.errors import UsageError


class Attempts:
    """score: function or import path, f(answer, task) -> float: for example
    rltool.environments.scores:reasoning_gym_answer. attempts: how many; again: what the model reads after one whose
    score is below `enough`, with {score} and {left} as they are. system: the first message, if any.

    Each attempt earns what it adds to the best score so far, so the episode is worth its best attempt.
    """

    def __init__(
        self,
        score: str | Callable[[str, Task], float],
        *,
        attempts: int = 3,
        again: str = "That is not right. Try again; attempts left: {left}.",
        enough: float = 1.0,
        system: str = "",
    ) -> None:
        if attempts < 1:
            raise UsageError(f"attempts = {attempts}: at least one is needed")
        self._score: Callable[[str, Task], float] = (
            load_callable(score, setting="score", takes=("answer", "task")) if isinstance(score, str) else score
        )
        self._left, self._again, self._enough, self._system = attempts, again, enough, system
        self._best = 0.0

    async def reset(self, task: Task) -> Start:
        self._task = task
        return Start((*((Message("system", self._system),) if self._system else ()), *task.messages))

    async def step(self, reply: Message) -> Step:
        score = await asyncio.to_thread(self._score, reply.text, self._task)
        gained = max(score - self._best, 0.0)
        self._best += gained
        self._left -= 1
        if score >= self._enough or self._left == 0:
            return Step(done=True, reward=gained)
        return Step([Message("user", self._again.format(score=score, left=self._left))], reward=gained)

    async def reward(self) -> float:
        """All of it was earned by attempts."""
        return 0.0

    async def close(self) -> None:
        """It holds nothing."""
