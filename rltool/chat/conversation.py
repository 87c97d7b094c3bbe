"""An agent's request, of any API: messages and tools. Pure values.

Each translator (apis/) makes one of these from its request; the chat template gets it by `template_messages`.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True)
class ToolCall:
    """The model's wish to call a function. arguments: a JSON object; id: what the tool's answer refers to."""

    id: str
    name: str
    arguments: Mapping[str, Any]

    def arguments_json(self) -> str:
        return json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True)
class SentPicture:
    """at: behind so many characters of its message; source: a data URL or a path, or, once a gateway has read it, the
    digest of its file (sha256, in hex)."""

    at: int
    source: str


def joined(parts: Iterable[str | SentPicture]) -> tuple[str, tuple[SentPicture, ...]]:
    """(text, pictures) of a message."""
    said, pictures = "", list[SentPicture]()
    for part in parts:
        if isinstance(part, str):
            said += part
        else:
            pictures.append(SentPicture(len(said), part.source))
    return said, tuple(pictures)


@dataclass(frozen=True)
class Message:
    """reasoning and tool_calls: of assistants only; tool_call_id: of a tool's answer; stop: the text that ended a reply
    of the model's, of which `text` has all before it; pictures: of users and tools only, in order."""

    role: Role
    text: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    stop: str = ""
    pictures: tuple[SentPicture, ...] = ()

    @property
    def pieces(self) -> list[str]:
        """The text before, between and behind its pictures."""
        ends = [picture.at for picture in self.pictures]
        return [self.text[start:end] for start, end in zip([0, *ends], [*ends, None], strict=True)]

    def with_pieces(self, pieces: Sequence[str]) -> Message:
        """The same with other text around its pictures."""
        places = zip(self.pictures, accumulate(map(len, pieces)), strict=False)
        return replace(self, text="".join(pieces), pictures=tuple(replace(one, at=at) for one, at in places))

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value not in (None, "", ()) or key == "text"}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Message:
        """The inverse of `to_json`."""
        calls = tuple(ToolCall(**call) for call in data.get("tool_calls", ()))
        pictures = tuple(SentPicture(**picture) for picture in data.get("pictures", ()))
        return cls(**{**data, "tool_calls": calls, "pictures": pictures})


@dataclass(frozen=True)
class Conversation:
    """tools: OpenAI's form, {"type": "function", "function": {"name", "description", "parameters"}}, which chat
    templates take."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()

    @property
    def pictures(self) -> list[SentPicture]:
        return [picture for message in self.messages for picture in message.pictures]

    @cached_property
    def characters(self) -> int:
        return sum(len(message.text) + len(message.reasoning) for message in self.messages)

    @cached_property
    def tools_key(self) -> str:
        """Equal where the tools are equal, which the chat template writes before everything else; "" without any."""
        return hashlib.sha256(json.dumps(self.tools, sort_keys=True).encode()).hexdigest() if self.tools else ""


@dataclass(frozen=True)
class RawPrompt:
    """OpenAI Completions: a text, or token ids, that no chat template is applied to."""

    prompt: str | tuple[int, ...]

    @property
    def characters(self) -> int:
        return len(self.prompt) if isinstance(self.prompt, str) else 0


@dataclass(frozen=True)
class Reply:
    """One answer of the model, parsed. finish_reason: "stop" or "length". raw: the text of all its tokens but the
    final stop token and what follows a stop text. logprobs: each token's text and log-probability, where they were
    asked for."""

    message: Message
    finish_reason: Literal["stop", "length"]
    prompt_tokens: int
    sampled_tokens: int
    raw: str
    logprobs: tuple[tuple[str, float], ...] = ()


Tools = Sequence[Mapping[str, Any]]


def same_message(recorded: Message, sent: Message, tools: Tools = ()) -> bool:
    """Whether an agent's message is the recorded one.

    The model's messages come back as the agent's framework keeps them: reasoning left out, white space around the text
    cut, the stop text put behind it, the ids of tool calls replaced, arguments written anew, with the defaults that the
    schema of the tool gives or without. Everything else is compared exactly, for the engine has read it.
    """
    if recorded.role != sent.role:
        return False
    if recorded.role != "assistant":
        return (recorded.text, recorded.name, recorded.pictures) == (sent.text, sent.name, sent.pictures)
    sent = _with_its_calls(sent) if recorded.tool_calls else sent
    return (
        sent.text.strip() in (recorded.text.strip(), (recorded.text + recorded.stop).strip())
        and sent.reasoning.strip() in ("", recorded.reasoning.strip())
        and len(sent.tool_calls) == len(recorded.tool_calls)
        and all(_same_call(*calls, tools) for calls in zip(recorded.tool_calls, sent.tool_calls, strict=True))
    )


def _same_call(recorded: ToolCall, sent: ToolCall, tools: Tools) -> bool:
    if recorded.name != sent.name:
        return False
    if recorded.arguments == sent.arguments:
        return True
    defaults = {
        name: schema["default"]
        for tool in tools
        if tool["function"]["name"] == sent.name
        for name, schema in tool["function"]["parameters"].get("properties", {}).items()
        if isinstance(schema, Mapping) and "default" in schema
    }
    return {**defaults, **recorded.arguments} == {**defaults, **sent.arguments}


RETOLD = "Calling tools:\n"
"""Behind it smolagents writes the calls of a reply as a Python list, and sends that as the assistant's text
(memory.py, ActionStep.to_messages, 1.26)."""


def _with_its_calls(sent: Message) -> Message:
    """The same message with the calls that its text retells as calls."""
    text, found, retold = sent.text.rpartition(RETOLD)
    if sent.tool_calls or not found:
        return sent
    try:
        calls = [
            ToolCall(str(call["id"]), call["function"]["name"], dict(call["function"]["arguments"]))
            for call in ast.literal_eval(retold.strip())
        ]
    except (ValueError, SyntaxError, LookupError, TypeError, RecursionError, MemoryError):
        return sent
    return replace(sent, text=text, tool_calls=tuple(calls))


def starts_with(sent: Sequence[Message], recorded: Sequence[Message], tools: Tools = ()) -> bool:
    """Whether the agent's messages begin with those recorded. tools: the agent's."""
    pairs = zip(recorded, sent, strict=False)
    return len(sent) >= len(recorded) and all(same_message(*pair, tools) for pair in pairs)


def template_messages(messages: Sequence[Message], *, arguments_as_text: bool = False) -> list[dict[str, Any]]:
    """As Hugging Face's chat templates take them: arguments as objects or as JSON, reasoning as `reasoning_content`."""
    return [_template_message(message, arguments_as_text) for message in messages]


def _template_message(message: Message, arguments_as_text: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message.role, "content": _content(message) if message.pictures else message.text}
    if message.reasoning:
        found["reasoning_content"] = message.reasoning
    if message.tool_calls:
        found["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
            for call in message.tool_calls
            for arguments in [call.arguments_json() if arguments_as_text else dict(call.arguments)]
        ]
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        found["name"] = message.name
    return found


def _content(message: Message) -> list[dict[str, Any]]:
    """A part of the type image for each picture, which templates write a placeholder for."""
    first, *pieces = message.pieces
    parts = [{"type": "text", "text": first}]
    for piece in pieces:
        parts += [{"type": "image"}, {"type": "text", "text": piece}]
    return [part for part in parts if part.get("text") != ""]
