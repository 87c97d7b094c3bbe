"""Anthropic Messages: POST /v1/messages.

Source: https://platform.claude.com/docs/en/api/messages (and messages-streaming, errors).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from rltool.chat.conversation import Conversation, Message, SentPicture, ToolCall, joined
from rltool.gateway.apis import base
from rltool.gateway.apis.base import Answer, Asked, Event
from rltool.gateway.errors import BadRequest, RequestError
from rltool.gateway.sampling import ApiName, with_tools

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
SERVER_TOOLS = "only tools that the agent runs itself are served"


class AnthropicApi:
    """See rltool.gateway.apis.base.Api."""

    name: ApiName = "anthropic"

    def parse(self, body: Mapping[str, Any]) -> Asked:
        if base.count(body, "max_tokens") is None:
            raise BadRequest("max_tokens is required", field="max_tokens")
        return self.counted(body)

    def counted(self, body: Mapping[str, Any]) -> Asked:
        """As `parse`, for messages/count_tokens, which has no max_tokens."""
        sent = base.items(body.get("messages"), "messages")
        if not sent:
            raise BadRequest("messages is empty", field="messages")
        system = _system(body.get("system"))
        given = base.items(body.get("tools") or [], "tools")
        tools = [_tool(entry, f"tools[{i}]") for i, entry in enumerate(given)]
        # A deferred tool stands where a search has found it, so that what was recorded before stays.
        texts = {(name := tool["function"]["name"]): json.dumps(tool) if late else name for tool, late in tools}
        messages = [message for i, entry in enumerate(sent) for message in _messages(entry, f"messages[{i}]", texts)]
        if messages[0].role == "system":
            raise BadRequest("messages[0].role is user: `system` has what comes first", field="messages[0].role")
        shown = [tool for tool, late in tools if not late] if with_tools(body.get("tool_choice")) else []
        thinking = body.get("thinking")
        return Asked(
            model=base.model_name(body),
            prompt=Conversation((*system, *messages), tuple(shown)),
            stream=base.flag(body, "stream"),
            max_tokens=base.count(body, "max_tokens"),
            stop=base.stop_texts(body, "stop_sequences"),
            # An agent that has not asked for thinking takes the first block for the answer.
            reasoning=isinstance(thinking, dict)
            and thinking.get("type") in ("enabled", "adaptive")
            and thinking.get("display") != "omitted",
        )

    def body(self, answer: Answer) -> dict[str, Any]:
        return _message(answer, list(_blocks(answer)), _stop_reason(answer), answer.reply.sampled_tokens)

    def stream(self) -> AnthropicStream:
        return AnthropicStream()

    def ping(self) -> bytes:
        return b'event: ping\ndata: {"type": "ping"}\n\n'

    def error(self, error: RequestError) -> dict[str, Any]:
        kind, said = ERROR_TYPES.get(error.status, "api_error"), str(error)
        if error.code == "context_length_exceeded":  # the words that agents look for before they compact
            said = f"prompt is too long: {said}"
        return {"type": "error", "error": {"type": kind, "message": said}}

    def error_event(self, error: RequestError) -> Event:
        return "error", self.error(error)


class AnthropicStream:
    """See rltool.gateway.apis.base.EventStream. A tool's block comes when it is whole."""

    def __init__(self) -> None:
        self._sent, self._blocks, self._open = base.NOTHING, 0, ""

    def begin(self, answer: Answer) -> Iterator[Event]:
        yield "message_start", {"type": "message_start", "message": _message(answer, [], None, 0)}

    def more(self, answer: Answer) -> Iterator[Event]:
        said, sent = answer.reply.message, self._sent
        self._sent = said
        thought = base.new_text(said.reasoning, sent.reasoning)
        if thought and answer.asked.reasoning:
            yield from self._opened("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": thought})
        if text := base.new_text(said.text, sent.text):
            yield from self._text(text)
        for call in said.tool_calls[len(sent.tool_calls) :]:
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            yield from self._opened("tool_use", block, anew=True)
            yield self._delta({"type": "input_json_delta", "partial_json": call.arguments_json()})

    def end(self, answer: Answer) -> Iterator[Event]:
        yield from self.more(answer)
        if not answer.reply.message.text and not answer.reply.message.tool_calls:
            yield from self._text("")
        yield from self._closed()
        ended = {"stop_reason": _stop_reason(answer), "stop_sequence": _stopped_by(answer)}
        usage = {"output_tokens": answer.reply.sampled_tokens}
        yield "message_delta", {"type": "message_delta", "delta": ended, "usage": usage}
        yield "message_stop", {"type": "message_stop"}

    def _text(self, text: str) -> Iterator[Event]:
        yield from self._opened("text", {"type": "text", "text": ""})
        yield self._delta({"type": "text_delta", "text": text})

    def _opened(self, kind: str, block: dict[str, Any], *, anew: bool = False) -> Iterator[Event]:
        """The block that is open is of this kind."""
        if self._open == kind and not anew:
            return
        yield from self._closed()
        self._open = kind
        start = {"type": "content_block_start", "index": self._blocks, "content_block": block}
        yield "content_block_start", start

    def _closed(self) -> Iterator[Event]:
        if not self._open:
            return
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": ""})
        yield "content_block_stop", {"type": "content_block_stop", "index": self._blocks}
        self._open = ""
        self._blocks += 1

    def _delta(self, delta: dict[str, Any]) -> Event:
        return "content_block_delta", {"type": "content_block_delta", "index": self._blocks, "delta": delta}


def _message(
    answer: Answer, content: list[dict[str, Any]], stop_reason: str | None, output_tokens: int
) -> dict[str, Any]:
    return {
        "id": f"msg_{answer.id}",
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "content": content,
        "stop_reason": stop_reason,
        "stop_sequence": _stopped_by(answer) if stop_reason else None,
        "usage": {"input_tokens": answer.reply.prompt_tokens, "output_tokens": output_tokens},
    }


def _blocks(answer: Answer) -> Iterator[dict[str, Any]]:
    message = answer.reply.message
    if message.reasoning and answer.asked.reasoning:
        yield {"type": "thinking", "thinking": message.reasoning, "signature": ""}
    if message.text or not message.tool_calls:
        yield {"type": "text", "text": message.text}
    for call in message.tool_calls:
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)}


def _stop_reason(answer: Answer) -> str:
    if answer.reply.finish_reason == "length":
        return "max_tokens"
    if answer.reply.message.tool_calls:
        return "tool_use"
    return "stop_sequence" if answer.reply.message.stop else "end_turn"


def _stopped_by(answer: Answer) -> str | None:
    return answer.reply.message.stop or None if _stop_reason(answer) == "stop_sequence" else None


def _system(system: Any) -> tuple[Message, ...]:
    if system is None or system == []:
        return ()
    return (Message("system", _texts(system, "system")),)


def _messages(entry: Any, field: str, tools: Mapping[str, str]) -> Iterator[Message]:
    """One message of Anthropic's is several where a user's holds tool results: each is a message of the tool's.
    tools: what a reference to each is to the model."""
    sent = base.record(entry, field)
    role, content = base.text(sent.get("role"), f"{field}.role"), sent.get("content")
    if role not in ("user", "assistant", "system"):
        raise BadRequest(f"{field}.role is user, assistant or system, not {role!r}", field=f"{field}.role")
    if role == "system":
        yield Message("system", _texts(content, f"{field}.content"))
        return
    blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
    named = [(base.record(block, f"{field}.content[{i}]"), f"{field}.content[{i}]") for i, block in enumerate(blocks)]
    yield from (_assistant(named),) if role == "assistant" else _user(named, tools)


def _user(blocks: list[tuple[dict[str, Any], str]], tools: Mapping[str, str]) -> Iterator[Message]:
    parts: list[str | SentPicture] = []
    for block, where in blocks:
        if block.get("type") == "tool_result":
            if parts:
                yield _said("user", parts)
                parts = []
            call_id = base.text(block.get("tool_use_id"), f"{where}.tool_use_id")
            content = block.get("content") or ""
            named = content if isinstance(content, list) else [{"type": "text", "text": content}]
            result = [_part(base.record(part, where), f"{where}.content[{i}]", tools) for i, part in enumerate(named)]
            yield replace(_said("tool", result), tool_call_id=call_id)
        else:
            parts.append(_part(block, where, {}))
    if parts or not blocks:
        yield _said("user", parts)


def _said(role: Literal["user", "tool"], parts: Sequence[str | SentPicture]) -> Message:
    text, pictures = joined(parts)
    return Message(role, text, pictures=pictures)


def _part(block: dict[str, Any], field: str, tools: Mapping[str, str]) -> str | SentPicture:
    if block.get("type") == "tool_reference" and (name := str(block.get("tool_name"))) in tools:
        return f"{tools[name]}\n"
    if block.get("type") != "image":
        return _text(block, field)
    source = base.record(block.get("source"), f"{field}.source")
    if source.get("type") != "base64":
        raise BadRequest(
            f"{field}.source: an image comes as base64, not as {source.get('type')!r}: nothing is fetched",
            field=f"{field}.source",
            code="unsupported_content",
        )
    return base.picture(f"data:;base64,{base.text(source.get('data'), f'{field}.source.data')}", field)


def _assistant(blocks: list[tuple[dict[str, Any], str]]) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for block, where in blocks:
        match block.get("type"):
            case "thinking":
                thoughts.append(base.text(block.get("thinking"), f"{where}.thinking"))
            case "tool_use":
                calls.append(
                    ToolCall(
                        id=base.text(block.get("id"), f"{where}.id"),
                        name=base.text(block.get("name"), f"{where}.name"),
                        arguments=base.record(block.get("input"), f"{where}.input"),
                    )
                )
            case _:
                texts.append(_text(block, where))
    return Message("assistant", "".join(texts), "".join(thoughts), tuple(calls))


def _texts(content: Any, field: str) -> str:
    if not isinstance(content, list):
        return base.text(content, field)
    return "".join(_text(base.record(block, field), f"{field}[{i}]") for i, block in enumerate(content))


def _text(block: dict[str, Any], field: str) -> str:
    if block.get("type") != "text":
        raise base.no_media(str(block.get("type")), field)
    return base.text(block.get("text"), f"{field}.text")


def _tool(entry: Any, field: str) -> tuple[dict[str, Any], bool]:
    """(the tool, whether the model is shown it once a search has found it)."""
    sent = base.record(entry, field)
    if sent.get("type", "custom") != "custom":
        raise BadRequest(f"{field}: {sent['type']!r}: {SERVER_TOOLS}", field=field, code="invalid_tool")
    if "input_schema" not in sent:
        raise BadRequest(f"{field}.input_schema is missing", field=field, code="invalid_tool")
    tool = base.function_tool(sent.get("name"), sent.get("description"), sent["input_schema"], field)
    return tool, base.flag(sent, "defer_loading")
