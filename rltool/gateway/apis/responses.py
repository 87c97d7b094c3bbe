"""OpenAI Responses: POST /v1/responses. Stateless: the agent sends its whole input with each request.

Source: https://platform.openai.com/docs/api-reference/responses (and responses-streaming). The stream's events stand in
responses_stream.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rltool.chat.conversation import Conversation, Message, Reply, SentPicture, ToolCall, joined
from rltool.gateway.apis import base, responses_stream
from rltool.gateway.apis.base import Answer, Asked, Event, ToolForm
from rltool.gateway.apis.chat import ROLES, parse_arguments
from rltool.gateway.errors import BadRequest, RequestError
from rltool.gateway.sampling import ApiName, with_tools

TEXT_PARTS = ("input_text", "output_text", "text")
INPUT = "input"
TEXT_ALONE = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
"""What a custom tool is called with, as a function."""


class ResponsesApi:
    """See rltool.gateway.apis.base.Api."""

    name: ApiName = "responses"

    def parse(self, body: Mapping[str, Any]) -> Asked:
        if "message.output_text.logprobs" in base.items(body.get("include") or [], "include"):
            raise BadRequest("include: log-probabilities are served by chat alone", field="include", code="unsupported")
        instructions = body.get("instructions")
        system = (Message("system", base.text(instructions, "instructions")),) if instructions else ()
        messages = (*system, *_input(body.get("input")))
        sent = base.items(body.get("tools") or [], "tools") if with_tools(body.get("tool_choice")) else []
        tools = [tool for i, entry in enumerate(sent) for tool in _tools(entry, f"tools[{i}]")]
        return Asked(
            model=base.model_name(body),
            prompt=Conversation(messages, tuple(shown for shown, _ in tools)),
            stream=base.flag(body, "stream"),
            max_tokens=base.count(body, "max_output_tokens"),
            forms={shown["function"]["name"]: form for shown, form in tools if form is not None},
        )

    def body(self, answer: Answer) -> dict[str, Any]:
        return whole(answer, output_items(answer))

    def stream(self) -> ResponsesStream:
        return ResponsesStream()

    def ping(self) -> bytes:
        return base.PING_COMMENT

    def error(self, error: RequestError) -> dict[str, Any]:
        return base.openai_error(error)

    def error_event(self, error: RequestError) -> Event:
        said = {"code": error.code, "message": str(error), "param": error.field, "sequence_number": 0}
        return "error", {"type": "error", **said}


class ResponsesStream:
    """See rltool.gateway.apis.base.EventStream. A tool call comes when it is whole; text behind one is a further
    message."""

    def __init__(self) -> None:
        self._sent, self._writer = base.NOTHING, responses_stream.ItemWriter()

    def begin(self, answer: Answer) -> Iterator[Event]:
        started = envelope(answer, "in_progress") | {"incomplete_details": None, "output": [], "usage": None}
        return self._writer.numbered(
            {"type": name, "response": started} for name in ("response.created", "response.in_progress")
        )

    def more(self, answer: Answer) -> Iterator[Event]:
        return self._writer.numbered(self._more(answer))

    def end(self, answer: Answer) -> Iterator[Event]:
        return self._writer.numbered(self._end(answer))

    def _more(self, answer: Answer) -> Iterator[dict[str, Any]]:
        said, sent, writer = answer.reply.message, self._sent, self._writer
        self._sent = said
        if thought := base.new_text(said.reasoning, sent.reasoning):
            yield from writer.text(reasoning_item(answer, ""), thought)
        if text := base.new_text(said.text, sent.text):
            yield from writer.text(message_item(answer, "", writer.items), text)
        for index, call in list(enumerate(said.tool_calls))[len(sent.tool_calls) :]:
            yield from writer.call(call_item(answer, index, call))

    def _end(self, answer: Answer) -> Iterator[dict[str, Any]]:
        yield from self._more(answer)
        writer = self._writer
        if not answer.reply.message.text and not answer.reply.message.tool_calls:
            yield from writer.text(message_item(answer, "", writer.items), "")
        yield from writer.close()
        found = whole(answer, writer.items)
        yield {"type": f"response.{found['status']}", "response": found}


def whole(answer: Answer, output: list[dict[str, Any]]) -> dict[str, Any]:
    cut = answer.reply.finish_reason == "length"
    return envelope(answer, "incomplete" if cut else "completed") | {
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": output,
        "usage": _usage(answer.reply),
    }


def envelope(answer: Answer, status: str) -> dict[str, Any]:
    return {
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": answer.created,
        "status": status,
        "model": answer.model,
        "error": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "store": False,
    }


def output_items(answer: Answer) -> list[dict[str, Any]]:
    said = answer.reply.message
    found: list[dict[str, Any]] = []
    if said.reasoning:
        found.append(reasoning_item(answer, said.reasoning))
    if said.text or not said.tool_calls:
        found.append(message_item(answer, said.text))
    return found + [call_item(answer, index, call) for index, call in enumerate(said.tool_calls)]


def reasoning_item(answer: Answer, text: str) -> dict[str, Any]:
    thought = {"type": "reasoning_text", "text": text}
    return {"id": f"rs_{answer.id}", "type": "reasoning", "summary": [], "content": [thought]}


def message_item(answer: Answer, text: str, before: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """before: the items of the reply in front of it."""
    number = sum(item["type"] == "message" for item in before)
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    own = f"msg_{answer.id}" + (f"_{number}" if number else "")
    return {"id": own, "type": "message", "role": "assistant", "status": "completed", "content": content}


def call_item(answer: Answer, index: int, call: ToolCall) -> dict[str, Any]:
    form = (answer.asked.forms or {}).get(call.name) or ToolForm(call.name)
    called: dict[str, Any] = {"call_id": call.id, "name": form.name, "status": "completed"}
    if form.namespace:
        called["namespace"] = form.namespace
    if form.custom:
        given = call.arguments.get(INPUT)
        # What the model called it with otherwise: the tool says what is wrong.
        own = given if isinstance(given, str) and len(call.arguments) == 1 else call.arguments_json()
        return {"id": f"ctc_{answer.id}_{index}", "type": "custom_tool_call", **called, "input": own}
    return {"id": f"fc_{answer.id}_{index}", "type": "function_call", **called, "arguments": call.arguments_json()}


def _usage(reply: Reply) -> dict[str, Any]:
    return {
        "input_tokens": reply.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": reply.sampled_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.prompt_tokens + reply.sampled_tokens,
    }


def _input(sent: Any) -> list[Message]:
    if isinstance(sent, str):
        return [Message("user", base.text(sent, "input"))]
    entries = base.items(sent, "input")
    if not entries:
        raise BadRequest("input is empty", field="input")
    messages: list[Message] = []
    for i, entry in enumerate(entries):
        message = _item(base.record(entry, f"input[{i}]"), f"input[{i}]")
        # One reply of the model, one message to the chat template, comes back as several items.
        if message.role == "assistant" and messages and messages[-1].role == "assistant":
            messages[-1] = _joined(messages[-1], message)
        else:
            messages.append(message)
    return messages


def _joined(first: Message, second: Message) -> Message:
    return Message(
        "assistant",
        first.text + second.text,
        first.reasoning + second.reasoning,
        first.tool_calls + second.tool_calls,
    )


def _item(item: dict[str, Any], field: str) -> Message:
    match item.get("type", "message"):
        case "message":
            role = ROLES.get(base.text(item.get("role"), f"{field}.role"))
            if role is None or role == "tool":
                raise BadRequest(f"{field}.role {item['role']!r} is not known", field=f"{field}.role")
            return _message(role, item.get("content"), f"{field}.content")
        case "function_call" | "custom_tool_call" as kind:
            name, space = base.text(item.get("name"), f"{field}.name"), item.get("namespace")
            call = ToolCall(
                id=base.text(item.get("call_id"), f"{field}.call_id"),
                name=_full_name(base.text(space, f"{field}.namespace"), name) if space else name,
                arguments=parse_arguments(item.get("arguments"), f"{field}.arguments")
                if kind == "function_call"
                else {INPUT: base.text(item.get("input"), f"{field}.input")},
            )
            return Message("assistant", "", tool_calls=(call,))
        case "function_call_output" | "custom_tool_call_output":
            call_id = base.text(item.get("call_id"), f"{field}.call_id")
            return replace(_message("tool", item.get("output"), f"{field}.output"), tool_call_id=call_id)
        case "reasoning":
            parts = base.items(item.get("content") or [], f"{field}.content")
            thoughts = [
                base.text(base.record(part, field).get("text"), f"{field}.content[{i}].text")
                for i, part in enumerate(parts)
            ]
            return Message("assistant", "", reasoning="".join(thoughts))
        case kind:
            raise BadRequest(f"{field}: items of type {kind!r} are not served", field=field, code="unsupported_content")


def _message(role: str, content: Any, field: str) -> Message:
    entries = content if isinstance(content, list) else [{"type": "text", "text": base.text(content, field)}]
    text, pictures = joined(
        _part(base.record(entry, f"{field}[{i}]"), f"{field}[{i}]", role) for i, entry in enumerate(entries)
    )
    return Message(role, text, pictures=pictures)  # pyright: ignore[reportArgumentType]  # the values of ROLES


def _part(part: dict[str, Any], field: str, role: str) -> str | SentPicture:
    if part.get("type") == "input_image" and role in ("user", "tool"):
        return base.picture(part.get("image_url"), f"{field}.image_url", part.get("detail"))
    if part.get("type") not in TEXT_PARTS:
        raise base.no_media(str(part.get("type")), field)
    return base.text(part.get("text"), f"{field}.text")


Shown = tuple[dict[str, Any], ToolForm | None]
"""A tool as chat templates take it, and what it is in this API where that is something else."""


def _tools(entry: Any, field: str) -> Iterator[Shown]:
    """Those of a namespace are several, whose names begin with its own. Its description is at the first."""
    sent = base.record(entry, field)
    if sent.get("type") != "namespace":
        yield _tool(sent, field)
        return
    space, about = base.text(sent.get("name"), f"{field}.name"), sent.get("description")
    for i, inner in enumerate(base.items(sent.get("tools"), f"{field}.tools")):
        shown, form = _tool(base.record(inner, f"{field}.tools[{i}]"), f"{field}.tools[{i}]")
        function = shown["function"]
        if about and i == 0:
            own = [base.text(about, f"{field}.description"), function.get("description", "")]
            function["description"] = "\n\n".join(filter(None, own))
        form = replace(form or ToolForm(function["name"]), namespace=space)
        function["name"] = _full_name(space, function["name"])
        yield shown, form


def _tool(sent: dict[str, Any], field: str) -> Shown:
    name, about = sent.get("name"), sent.get("description")
    if sent.get("defer_loading"):
        raise BadRequest(f"{field}: deferred tools are not served", field=field, code="invalid_tool")
    match sent.get("type"):
        case "function":
            return base.function_tool(name, about, sent.get("parameters"), field), None
        case "custom":
            shown = base.function_tool(name, about, TEXT_ALONE, field)
            return shown, ToolForm(shown["function"]["name"], custom=True)
        case kind:
            raise BadRequest(
                f"{field}: only tools of type function, custom and namespace are served, not {kind!r}",
                field=field,
                code="invalid_tool",
            )


def _full_name(space: str, name: str) -> str:
    return f"{space}__{name}"
