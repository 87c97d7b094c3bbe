"""What an environment is: the other side of a conversation with the policy, one object for each sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias, get_args

from rltool.chat.conversation import Message, Role, SentPicture, joined
from rltool.errors import UsageError
from rltool.rollout.data import Prompt
from rltool.rollout.multimodal import kind_of, named, plain_messages, source_in
from rltool.rollout.sample import Sample

Content: TypeAlias = str | Sequence[Mapping[str, Any]]
"""Of a message: text, or its parts as rows have them, {"type": "text", "text": ...} and {"type": "image",
"image": ...}, where the image is a path, a data URL, base64 text or bytes."""
Given: TypeAlias = Message | Mapping[str, Any]
"""A message of an environment; one with pictures is a mapping as rows have it: `role`, `content` (Content), and of a
tool's answer `tool_call_id`."""

KEYS = ("role", "content", "tool_call_id", "name")
ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True)
class Task:
    """A row of the data set, for one sample. row: its number; messages: the row's, or its `prompt` as a user's message;
    seed: of this sample, for what is random in the environment. train_metadata: the sample's own; what is put
    there before the episode ends goes with the sample to training. multimodal_inputs: the row's images, video and
    audio by kind, of which the policy sees the images in messages alone."""

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

    messages: Sequence[Given]
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class Step:
    """What follows a reply: the messages that the model reads next (of role tool or user), or the end. reward: what
    the reply has earned by itself; the episode's reward is the sum of these and of `Environment.reward`."""

    messages: Sequence[Given] = field(default=())
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
    """prompt: the row that the sample is of. UsageError for messages that hold more than text and images."""
    inputs = sample.multimodal_inputs if prompt is None else prompt.multimodal_inputs
    rows = prompt.messages if prompt is not None and prompt.messages is not None else None
    messages = (Message("user", sample.prompt_text),) if rows is None else tuple(_of_row(rows, inputs.get("image", ())))
    return Task(
        sample.prompt_index, messages, sample.label, sample.metadata, sample.seed or 0, sample.train_metadata,
        {kind: list(values) for kind, values in inputs.items()},
    )  # fmt: skip


def _of_row(rows: Sequence[Mapping[str, Any]], images: Sequence[Any]) -> Iterator[Message]:
    """images: the row's, in the order of the places for them."""
    left = iter(images)
    for row in rows:
        if row["role"] not in ("system", "user", "assistant"):
            raise UsageError(
                f"a row's message of role {row['role']!r}: environments begin with messages of role system, user or "
                "assistant"
            )
        yield message_of({"role": row["role"], "content": row["content"]}, lambda _: next(left, None))


def message_of(given: Given, source: Callable[[Any], str | None]) -> Message:
    """source: of what a part has of a picture, None where it has nothing. UsageError for what is no message of text and
    images; raises what `source` does."""
    if isinstance(given, Message):
        found = tuple(SentPicture(one.at, source(one.source) or "") for one in given.pictures)
        return replace(given, pictures=found) if found else given
    keys = set(given) if isinstance(given, Mapping) else None
    role: Role | None = next((known for known in ROLES if keys and given.get("role") == known), None)
    if keys is None or role is None or keys - set(KEYS):
        raise UsageError(
            f"{given!r:.200} is no message of an environment: one has {', '.join(KEYS)}, and is of role "
            f"{', '.join(ROLES)}"
        )
    content = given.get("content")
    try:
        [plain] = plain_messages([{"content": list(content) if isinstance(content, tuple) else content}])
    except ValueError as error:
        raise UsageError(f"a message of role {role!r}: {error}") from error
    text, pictures = _joined(plain["content"], role, source)
    return Message(role, text, tool_call_id=given.get("tool_call_id"), name=given.get("name"), pictures=pictures)


def _joined(
    content: Any, role: str, source: Callable[[Any], str | None]
) -> tuple[str, tuple[SentPicture, ...]]:
    if isinstance(content, str):
        return content, ()
    if not isinstance(content, list):
        raise UsageError(
            f"a message of role {role!r} has content of type {type(content).__name__}: it is text, or a list of parts"
        )
    return joined(_part(part, role, source) for part in content)


def _part(part: Any, role: str, source: Callable[[Any], str | None]) -> str | SentPicture:
    kind = kind_of(part) if isinstance(part, Mapping) else None
    if kind is None:
        if not isinstance(part, Mapping) or part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
            shown = part.get("type") if isinstance(part, Mapping) else part
            raise UsageError(f"a message of role {role!r} has a part {shown!r:.60}: environments show text and images")
        return part["text"]
    if kind != "image":
        raise UsageError(f"a message of role {role!r} has {named([kind])}: environments show text and images")
    if role not in ("user", "tool"):
        raise UsageError(f"a message of role {role!r} has images: those of role user and tool may")
    if (found := source(source_in(part))) is None:
        raise UsageError(f"a message of role {role!r} has a part of type image without its picture")
    return SentPicture(0, found)
