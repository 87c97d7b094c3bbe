"""Of `verifiers.v1` (0.4) what rltool calls, with an agent that asks once. test_verifiers.py plays the real one too."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import openai


@dataclass(frozen=True)
class TaskData:
    idx: int | None = None
    prompt: str = ""
    answer: str | None = None
    name: str = ""

    @property
    def prompt_text(self) -> str:
        return self.prompt

    @classmethod
    def model_validate(cls, data: dict[str, Any]) -> TaskData:
        return cls(**data)

    def model_dump(self, *, mode: str, exclude_defaults: bool) -> dict[str, Any]:
        assert mode == "json" and exclude_defaults
        return {name: value for name, value in vars(self).items() if value not in (None, "")}


@dataclass(frozen=True)
class Task:
    data: TaskData
    config: Any

    @classmethod
    def data_type(cls) -> type[TaskData]:
        return TaskData


class Taskset:
    config = SimpleNamespace(task="the task's configuration")

    def __iter__(self) -> Iterator[Task]:
        yield Task(TaskData(0, prompt="hello", answer="fine"), None)
        yield Task(TaskData(1, name="the user begins"), None)

    @classmethod
    def task_type(cls) -> type[Task]:
        return Task


@dataclass(frozen=True)
class EvalClientConfig:
    base_url: str
    api_key_var: str


@dataclass(frozen=True)
class ModelContext:
    model: str
    client: EvalClientConfig


@dataclass
class Part:
    """An episode, or the trace of its agent."""

    ok: bool = True
    reward: float = 0.0
    errors: list[Any] = field(default_factory=list)
    traces: list[Part] = field(default_factory=list)


class SingleAgentEnv:
    serving_now = 0

    def __init__(self) -> None:
        self.taskset = Taskset()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        SingleAgentEnv.serving_now += 1
        try:
            yield
        finally:
            SingleAgentEnv.serving_now -= 1

    def slots(self, task: Task) -> list[Task]:
        assert task.config == Taskset.config.task
        return [task]

    async def run_slot(self, slot: Task, context: ModelContext) -> Part:
        assert self.serving_now
        key = os.environ[context.client.api_key_var]
        try:
            async with openai.AsyncOpenAI(base_url=context.client.base_url, api_key=key, max_retries=0) as client:
                messages: list[Any] = [{"role": "user", "content": slot.data.prompt}]
                reply = await client.chat.completions.create(model=context.model, messages=messages)
        except openai.APIStatusError as error:
            trace = Part(ok=False, errors=[SimpleNamespace(type="ProviderError", message=str(error))])
            return Part(ok=False, traces=[trace])
        said = reply.choices[0].message.content
        return Part(traces=[Part(reward=0.5 * (said == slot.data.answer))])


class BestOfN(SingleAgentEnv):
    """verifiers' environments that play in their own way."""

    __module__ = __name__ + ".envs.best_of_n"


@dataclass
class AgentConfig:
    retries: Any


def resolve_env_config(settings: dict[str, Any]) -> Any:
    def retries(given: dict[str, Any]) -> Any:
        return SimpleNamespace(max_retries=given.get("retries", 0), rules=given.get("rules", []))

    agent = settings.get("agent", {})
    if "color" in agent:
        raise ValueError("agent.color: Extra inputs are not permitted")
    return SimpleNamespace(
        id=settings.get("id", ""), retries=retries(settings), agent=AgentConfig(retries(agent)),
        **({"judge": AgentConfig(retries({}))} if settings.get("id") == "judged" else {}),
    )  # fmt: skip


def load_environment(config: Any) -> SingleAgentEnv:
    return BestOfN() if config.id == "best-of-n" else SingleAgentEnv()
