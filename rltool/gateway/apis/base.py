"""What a translator is, and reading a JSON body field by field."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rltool.chat.conversation import Conversation, Message, RawPrompt, Reply, SentPicture
from rltool.gateway.errors import BadRequest, RequestError
from rltool.gateway.sampling import ApiName


@dataclass(frozen=True)
class ToolForm:
    """name: within its namespace; custom: it is called with a text, not with an object."""

    name: str
    namespace: str = ""
    custom: bool = False


@dataclass(frozen=True)
class Asked:
    """A request, read. model: the name that it gives; max_tokens: None where the agent leaves it to us; include_usage:
    a last chunk with token counts (OpenAI); reasoning: whether the reply shows the model's thinking; stop: texts that
    end it; logprobs: whether the reply has those of its tokens; forms: of tools that the model knows as functions and
    the API as something else, by the model's name."""

    model: str
    prompt: Conversation | RawPrompt
    stream: bool
    max_tokens: int | None
    include_usage: bool = False
    reasoning: bool = True
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    forms: Mapping[str, ToolForm] | None = None


@dataclass(frozen=True)
class Answer:
    """What a reply needs beside the Reply: id (of the turn), model and creation time (seconds since the epoch)."""

    id: str
    model: str
    created: int
    asked: Asked
    reply: Reply


Event = tuple[str | None, Mapping[str, Any] | str]
"""One server-sent event: its name, if the API has names, and its data."""


class EventStream(Protocol):
    """A streamed answer: `begin` once, `more` any number of times, `end` with the whole. Each answer's message, raw
    text and log-probabilities begin with those of the one before."""

    def begin(self, answer: Answer) -> Iterator[Event]: ...

    def more(self, answer: Answer) -> Iterator[Event]: ...

    def end(self, answer: Answer) -> Iterator[Event]:
        """With what `more` has not had."""
        ...


class Api(Protocol):
    """name: as in gateway/sampling.py, which says what becomes of each field of a body."""

    name: ApiName

    def parse(self, body: Mapping[str, Any]) -> Asked:
        """Raises BadRequest."""
        ...

    def body(self, answer: Answer) -> dict[str, Any]: ...

    def stream(self) -> EventStream:
        """The events of one answer."""
        ...

    def ping(self) -> bytes:
        """What keeps a stream open before its first event."""
        ...

    def error(self, error: RequestError) -> dict[str, Any]: ...

    def error_event(self, error: RequestError) -> Event:
        """A failure after the stream has begun."""
        ...


def new_text(whole: str, sent: str) -> str:
    """What is to be sent yet. A text that does not go on from what was sent has been written otherwise since (a
    tokenizer whose tokens change the text before them): nothing of it is sent twice."""
    return whole[len(sent) :] if whole.startswith(sent) else ""


NOTHING = Message("assistant", "")
MOST_STOPS = 16
PING_COMMENT = b": waiting\n\n"
"""A comment line, which every reader of server-sent events skips."""


def openai_error(error: RequestError) -> dict[str, Any]:
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    return {"error": {"message": str(error), "type": kind, "param": error.field, "code": error.code}}


def expect(value: Any, kind: type, field: str, *, wanted: str) -> Any:
    """`value` if it is of this type, else BadRequest. A bool is no number."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise BadRequest(f"{field} must be {wanted}, not {_shown(value)}", field=field)
    return value


def text(value: Any, field: str) -> str:
    return expect(value, str, field, wanted="a text")


def items(value: Any, field: str) -> list[Any]:
    return expect(value, list, field, wanted="a list")


def record(value: Any, field: str) -> dict[str, Any]:
    return expect(value, dict, field, wanted="an object")


def flag(body: Mapping[str, Any], field: str) -> bool:
    value = body.get(field)
    return False if value is None else expect(value, bool, field, wanted="true or false")


def count(body: Mapping[str, Any], *fields: str) -> int | None:
    """The first of these fields that is given: a whole number from 1."""
    for field in fields:
        value = body.get(field)
        if value is not None:
            if expect(value, int, field, wanted="a whole number") < 1:
                raise BadRequest(f"{field} must be at least 1, not {value}", field=field)
            return value
    return None


def stop_texts(body: Mapping[str, Any], field: str) -> tuple[str, ...]:
    """One text, or a list of them; empty ones are none."""
    sent = body.get(field)
    found = [sent] if isinstance(sent, str) else items(sent or [], field)
    if len(found) > MOST_STOPS:
        raise BadRequest(f"{field} has {len(found)} texts, {MOST_STOPS} are served", field=field)
    return tuple(entry for i, entry in enumerate(found) if text(entry, f"{field}[{i}]"))


def model_name(body: Mapping[str, Any]) -> str:
    return text(body.get("model"), "model")


def no_media(kind: str, field: str) -> BadRequest:
    return BadRequest(
        f"{field}: {kind!r} is not served: the gateway takes text and images (no video, audio or files)",
        field=field,
        code="unsupported_content",
    )


def picture(url: Any, field: str, detail: Any = None) -> SentPicture:
    """By its data URL. BadRequest for any other, whose picture may be another one tomorrow, and for a wish for less
    detail, which the model's image processor would not follow."""
    scheme, found, _ = text(url, field).partition(":")
    if scheme.lower() != "data":
        what = f"{scheme[:20]}: URLs are not fetched" if found else "this is none"
        raise BadRequest(
            f"{field}: an image comes as a data URL, and {what}", field=field, code="unsupported_content"
        )
    if detail not in (None, "auto", "high"):
        raise BadRequest(f"{field}: detail {_shown(detail)} is not served", field=field, code="unsupported_content")
    return SentPicture(0, url)


def function_tool(name: Any, description: Any, parameters: Any, field: str) -> dict[str, Any]:
    """A tool as chat templates take it. BadRequest for a schema that is none."""
    if not text(name, f"{field}.name"):
        raise BadRequest(f"{field}.name is empty", field=field)
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = text(description, f"{field}.description")
    schema = record({} if parameters is None else parameters, f"{field}.parameters")
    if schema and schema.get("type", "object") != "object":
        raise BadRequest(
            f"{field}: the JSON schema of a tool's arguments describes an object, not {_shown(schema.get('type'))}",
            field=field,
            code="invalid_tool",
        )
    properties = schema.get("properties", {})
    if not isinstance(properties, dict) or not all(isinstance(entry, (dict, bool)) for entry in properties.values()):
        raise BadRequest(f"{field}: properties must be an object of schemas", field=field, code="invalid_tool")
    function["parameters"] = schema or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def _shown(value: Any) -> str:
    shown = repr(value)
    return "missing" if value is None else shown if len(shown) <= 60 else shown[:60] + "..."
