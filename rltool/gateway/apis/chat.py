"""OpenAI Chat Completions: POST /v1/chat/completions.

Source: https://platform.openai.com/docs/api-reference/chat. Reasoning is `reasoning_content`, as in vLLM and SGLang.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rltool.chat.conversation import Conversation, Message, Reply, SentPicture, ToolCall, joined
from rltool.gateway.apis import base
from rltool.gateway.apis.base import Answer, Asked, Event
from rltool.gateway.errors import BadRequest, RequestError
from rltool.gateway.sampling import ApiName, with_tools

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class ChatApi:
    """See rltool.gateway.apis.base.Api."""

    name: ApiName = "chat"

    def parse(self, body: Mapping[str, Any]) -> Asked:
        sent = base.items(body.get("messages"), "messages")
        if not sent:
            raise BadRequest("messages is empty", field="messages")
        messages = tuple(_message(entry, f"messages[{i}]") for i, entry in enumerate(sent))
        tools = base.items(body.get("tools") or [], "tools") if with_tools(body.get("tool_choice")) else []
        options = base.record(body.get("stream_options") or {}, "stream_options")
        return Asked(
            model=base.model_name(body),
            prompt=Conversation(messages, tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools))),
            stream=base.flag(body, "stream"),
            max_tokens=base.count(body, "max_completion_tokens", "max_tokens"),
            include_usage=base.flag(options, "include_usage"),
            stop=base.stop_texts(body, "stop"),
            logprobs=base.flag(body, "logprobs"),
        )

    def body(self, answer: Answer) -> dict[str, Any]:
        said = answer.reply.message
        content = None if said.tool_calls and not said.text else said.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if said.reasoning:
            message["reasoning_content"] = said.reasoning
        if said.tool_calls:
            message["tool_calls"] = [_call(call) for call in said.tool_calls]
        choice = {"index": 0, "message": message, "logprobs": _logprobs(answer)}
        choice["finish_reason"] = finish_reason(answer.reply)
        return _envelope(answer, "chat.completion", [choice]) | {"usage": usage(answer.reply)}

    def stream(self) -> ChatStream:
        return ChatStream()

    def ping(self) -> bytes:
        return base.PING_COMMENT

    def error(self, error: RequestError) -> dict[str, Any]:
        return base.openai_error(error)

    def error_event(self, error: RequestError) -> Event:
        return None, base.openai_error(error)


class ChatStream:
    """See rltool.gateway.apis.base.EventStream. A tool call comes when it is whole."""

    def __init__(self) -> None:
        self._sent, self._logprobs = base.NOTHING, 0

    def begin(self, answer: Answer) -> Iterator[Event]:
        yield self._chunk(answer, {"role": "assistant", "content": ""})

    def more(self, answer: Answer) -> Iterator[Event]:
        said, sent = answer.reply.message, self._sent
        self._sent = said
        if reasoning := base.new_text(said.reasoning, sent.reasoning):
            yield self._chunk(answer, {"reasoning_content": reasoning})
        if text := base.new_text(said.text, sent.text):
            yield self._chunk(answer, {"content": text})
        for index, call in list(enumerate(said.tool_calls))[len(sent.tool_calls) :]:
            started = _call(call) | {"function": {"name": call.name, "arguments": ""}}
            yield self._chunk(answer, {"tool_calls": [{"index": index, **started}]})
            arguments = {"arguments": call.arguments_json()}
            yield self._chunk(answer, {"tool_calls": [{"index": index, "function": arguments}]})

    def end(self, answer: Answer) -> Iterator[Event]:
        yield from self.more(answer)
        yield self._chunk(answer, {}, finish_reason(answer.reply))
        if answer.asked.include_usage:
            yield None, _envelope(answer, "chat.completion.chunk", []) | {"usage": usage(answer.reply)}
        yield None, "[DONE]"

    def _chunk(self, answer: Answer, delta: dict[str, Any], finish: str | None = None) -> Event:
        """With the log-probabilities that no chunk has had."""
        logprobs, self._logprobs = _logprobs(answer, self._logprobs), len(answer.reply.logprobs)
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return None, _envelope(answer, "chat.completion.chunk", [choice])


def finish_reason(reply: Reply) -> str:
    return "tool_calls" if reply.message.tool_calls and reply.finish_reason == "stop" else reply.finish_reason


def _logprobs(answer: Answer, start: int = 0) -> dict[str, Any] | None:
    """Of tokens from `start` on."""
    if not answer.asked.logprobs:
        return None
    tokens = [
        {"token": said, "logprob": value, "bytes": list(said.encode("utf-8", "surrogatepass")), "top_logprobs": []}
        for said, value in answer.reply.logprobs[start:]
    ]
    return {"content": tokens, "refusal": None}


def usage(reply: Reply) -> dict[str, Any]:
    prompt, sampled = reply.prompt_tokens, reply.sampled_tokens
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def parse_arguments(value: Any, field: str) -> dict[str, Any]:
    """A tool call's arguments as the agent sends them back: JSON, in a text."""
    try:
        found = json.loads(base.text(value, field) or "{}")
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"{field} is not JSON: {error}", field=field) from error
    return base.record(found, field)


def _envelope(answer: Answer, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{answer.id}",
        "object": kind,
        "created": answer.created,
        "model": answer.model,
        "choices": choices,
    }


def _call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments_json()},
    }


def _message(entry: Any, field: str) -> Message:
    sent = base.record(entry, field)
    role = ROLES.get(base.text(sent.get("role"), f"{field}.role"))
    if role is None:
        raise BadRequest(f"{field}.role is one of {', '.join(ROLES)}, not {sent['role']!r}", field=f"{field}.role")
    calls = base.items(sent.get("tool_calls") or [], f"{field}.tool_calls")
    if calls and role != "assistant":
        raise BadRequest(f"{field}: tool_calls are an assistant's", field=field)
    name, call_id = sent.get("name"), sent.get("tool_call_id")
    reasoning = sent.get("reasoning_content") or "" if role == "assistant" else ""
    text, pictures = _content(sent.get("content"), f"{field}.content", role)
    return Message(
        role=role,  # pyright: ignore[reportArgumentType]  # the values of ROLES
        text=text,
        reasoning=base.text(reasoning, f"{field}.reasoning_content"),
        tool_calls=tuple(_sent_call(call, f"{field}.tool_calls[{i}]") for i, call in enumerate(calls)),
        tool_call_id=base.text(call_id, f"{field}.tool_call_id") if call_id is not None else None,
        name=base.text(name, f"{field}.name") if name is not None else None,
        pictures=pictures,
    )


def _content(content: Any, field: str, role: str) -> tuple[str, tuple[SentPicture, ...]]:
    if content is None and role == "assistant":
        return "", ()
    if not isinstance(content, list):
        return base.text(content, field), ()
    return joined(_part(base.record(part, field), f"{field}[{i}]", role) for i, part in enumerate(content))


def _part(part: dict[str, Any], field: str, role: str) -> str | SentPicture:
    if part.get("type") == "image_url" and role in ("user", "tool"):
        sent = base.record(part.get("image_url"), f"{field}.image_url")
        return base.picture(sent.get("url"), f"{field}.image_url.url", sent.get("detail"))
    if part.get("type") != "text":
        raise base.no_media(str(part.get("type")), field)
    return base.text(part.get("text"), f"{field}.text")


def _sent_call(entry: Any, field: str) -> ToolCall:
    sent = base.record(entry, field)
    function = base.record(sent.get("function"), f"{field}.function")
    return ToolCall(
        id=base.text(sent.get("id"), f"{field}.id"),
        name=base.text(function.get("name"), f"{field}.function.name"),
        arguments=parse_arguments(function.get("arguments"), f"{field}.function.arguments"),
    )


def _tool(entry: Any, field: str) -> dict[str, Any]:
    sent = base.record(entry, field)
    if sent.get("type") != "function":
        raise BadRequest(
            f"{field}: only tools of type function are served, not {sent.get('type')!r}",
            field=field,
            code="invalid_tool",
        )
    function = base.record(sent.get("function"), f"{field}.function")
    return base.function_tool(
        function.get("name"), function.get("description"), function.get("parameters"), f"{field}.function"
    )
