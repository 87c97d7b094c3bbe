"""What an environment is: the other side of a conversation with the policy, one object for each sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rltool.chat.conversation import Message
from rltool.errors import UsageError
from rltool.rollout.data import Prompt
from rltool.rollout.sample import Sample


@dataclass(frozen=True)
class Task:
    """A row of the data set, for one sample. row: its number; messages: the row's, or its `prompt` as a user's message;
    seed: of this sample, for what is random in the environment. train_metadata: the sample's own; what is put
    there before the episode ends goes with the sample to training. multimodal_inputs: the row's images, video and
    audio by kind, which the policy does not see."""

    row: int
    messages: tuple[Message, ...]
    label: str | None
    metadata: Mapping[str, Any]
    seed: int
    train_metadata: dict[str, Any] = field(default_factory=dict)
    multimodal_inputs: Mapping[str, Sequence[Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Start:
    """What the model reads first. tools: OpenAI's form, as `tools.Tool.schema` gives it."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class Step:
    """What follows a reply: the messages that the model reads next (of role tool or user), or the end. reward: what
    the reply has earned by itself; the episode's reward is the sum of these and of `Environment.reward`."""

    messages: Sequence[Message] = field(default=())
    done: bool = False
    reward: float = 0.0


class Environment(Protocol):
    """`rollout.environment` names a class; it is called with `rollout.environment_arguments` once for each sample, on
    the rollout manager's event loop, and must return at once.

    Every method has `deadlines.call` seconds. What it raises fails its sample, which is counted.
    """

    async def reset(self, task: Task) -> Start:
        """The beginning of the conversation. Called once."""
        ...

    async def step(self, reply: Message) -> Step:
        """After each turn of the model: `text`, `reasoning` and `tool_calls` of its reply. Also after one that was cut,
        which is the last."""
        ...

    async def reward(self) -> float | None:
        """What the episode is worth beside the rewards of its steps, asked for once, however it has ended. None leaves
        it to [reward]."""
        ...

    async def close(self) -> None:
        """Give up what it holds. Called once, also where something failed or the run stops."""
        ...


def task_of(sample: Sample, prompt: Prompt | None) -> Task:
    """prompt: the row that the sample is of. UsageError for messages that hold more than text."""
    rows = prompt.messages if prompt is not None and prompt.messages is not None else None
    messages = (Message("user", sample.prompt_text),) if rows is None else tuple(map(_message, rows))
    return Task(
        sample.prompt_index, messages, sample.label, sample.metadata, sample.seed or 0, sample.train_metadata,
        sample.multimodal_inputs,
    )  # fmt: skip


def _message(row: Mapping[str, Any]) -> Message:
    role, content = row["role"], row["content"]
    if role not in ("system", "user", "assistant") or not isinstance(content, str):
        raise UsageError(
            f"a row's message of role {role!r} with content of type {type(content).__name__}: environments begin with "
            "messages of role system, user or assistant whose content is text"
        )
    return Message(role, content)
