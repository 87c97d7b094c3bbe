"""Tools for the model: plain typed Python functions, with a JSON schema made from their signature."""

from __future__ import annotations

import asyncio
import inspect
import json
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError

from rltool.config.import_path import load_callable
from rltool.environments.plain_calls import PlainCalls
from rltool.environments.protocol import Content
from rltool.errors import UsageError
from rltool.masking import masked
from rltool.rollout.multimodal import kind_of

MAX_RESULT_CHARACTERS = 8192
"""Longest result that the model reads; the rest is cut, with a note."""
_CALLS = PlainCalls()
_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class ModelTool(Protocol):
    """What the model may call."""

    @property
    def name(self) -> str: ...

    @property
    def schema(self) -> dict[str, Any]:
        """OpenAI's form, which chat templates take."""
        ...

    async def call(self, arguments: Mapping[str, Any], *, seconds: float) -> Content:
        """The result for the model, as text or with pictures; what is wrong with the call is text. Raises where the
        episode cannot go on."""
        ...


class Toolbox(Protocol):
    """Tools that are there for as long as an episode: of a server, for example."""

    async def open(self) -> Sequence[ModelTool]:
        """Called once. Where it was cancelled, `close` is called all the same."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. arguments: a pydantic model of its parameters."""

    name: str
    description: str
    function: Callable[..., Any]
    arguments: type[BaseModel]

    @property
    def schema(self) -> dict[str, Any]:
        """See ModelTool."""
        return function_schema(self.name, self.description, self.arguments.model_json_schema())

    async def call(self, arguments: Mapping[str, Any], *, seconds: float) -> Content:
        """The result as text, or as parts of a message where it is a list of these with a picture. What is wrong with
        the arguments, what the function raises, and that it was late is text for the model to read; a UsageError, which
        the user must fix, is raised.

        A plain function runs in a thread, which nothing ends: one that may hang belongs into a process (sandbox.py).
        Too many that hang are a UsageError.
        """
        try:
            given = self.arguments.model_validate(dict(arguments))
        except ValidationError as error:
            return "error: " + "; ".join(_complaint(item) for item in error.errors())
        named = {name: getattr(given, name) for name in self.arguments.model_fields}
        try:
            async with asyncio.timeout(seconds):
                if inspect.iscoroutinefunction(self.function):
                    result = await self.function(**named)
                else:
                    result = await _CALLS.run(partial(self.function, **named), self.name)
        except UsageError:
            raise
        except TimeoutError:
            return f"error: no result within {seconds:g} s"
        except Exception as error:
            return cut(f"error: {type(error).__name__}: {error}")
        if _has_pictures(result):
            return [{**part, "text": cut(str(part["text"]))} if "text" in part else part for part in result]
        return cut(result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str))


def make_tool(function: Callable[..., Any] | str) -> Tool:
    """A tool of a function, or of its import path. Its name, docstring and type hints are what the model sees;
    `Annotated[int, "what it is"]` describes a parameter. UsageError for a signature that is no JSON schema."""
    if isinstance(function, str):
        function = load_callable(function, setting="tools")
    name = getattr(function, "__name__", type(function).__name__)
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise UsageError(f"tool {name}: its type hints cannot be read: {error}") from error
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in _KINDS or parameter.name not in hints:
            raise UsageError(f"tool {name}: parameter {parameter} needs a name of its own and a type hint")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (_described(hints[parameter.name]), default)
    try:
        arguments = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        arguments.model_json_schema()
    except PydanticUserError as error:
        raise UsageError(f"tool {name}: its parameters cannot be written as a JSON schema: {error}") from error
    return Tool(name, inspect.getdoc(function) or "", function, arguments)


def function_schema(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI's form. parameters: a JSON schema of an object."""
    function = {"name": name, "description": description, "parameters": _without_titles(dict(parameters))}
    return {"type": "function", "function": function}


def make_tools(wanted: str | Callable[..., Any] | Mapping[str, Any]) -> Tool | Toolbox:
    """Of one entry of `tools`: a function or its import path, or a table {make = "package.module:f", ...}, where
    f(**the rest) gives a function or a Toolbox. UsageError for what is none of these."""
    if not isinstance(wanted, Mapping):
        return make_tool(wanted)
    arguments = dict(wanted)
    path = arguments.pop("make", None)
    if not isinstance(path, str):
        raise UsageError(f"tools: {masked(wanted)} needs `make`, the import path of a function that makes a tool")
    made = load_callable(path, setting="tools: make")
    try:
        found = made(**arguments)
    except TypeError as error:
        raise UsageError(f"tools: {path} with {masked(arguments)}: {error}") from error
    return found if callable(getattr(found, "open", None)) else make_tool(found)


def _has_pictures(result: Any) -> bool:
    """Whether it is parts of a message, and not text alone: any other list is shown as JSON."""
    if not isinstance(result, list) or not all(isinstance(part, Mapping) for part in result):
        return False
    kinds = [kind_of(part) for part in result]
    texts = [part.get("type") == "text" for part in result]
    return any(kinds) and all(kind is not None or text for kind, text in zip(kinds, texts, strict=True))


def _described(hint: Any) -> Any:
    """A text in Annotated is the description of the parameter."""
    texts = [text for text in getattr(hint, "__metadata__", ()) if isinstance(text, str)]
    return Annotated[hint, Field(description=texts[0])] if texts else hint


def _without_titles(schema: Any) -> Any:
    """pydantic's titles repeat the names, and every token of a schema is read in every episode."""
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: _without_titles(part) for name, part in value.items()}
        if key in ("properties", "$defs")
        else _without_titles(value)
        for key, value in schema.items()
        if key != "title" or not isinstance(value, str)
    }


def _complaint(item: Any) -> str:
    place = ".".join(map(str, item["loc"]))
    return f"{place}: {item['msg']}" if place else item["msg"]


def cut(text: str) -> str:
    over = len(text) - MAX_RESULT_CHARACTERS
    return text if over <= 0 else f"{text[:MAX_RESULT_CHARACTERS]} ... ({over} characters were cut)"
