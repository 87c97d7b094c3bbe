"""Arguments of a call out of a model's text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rltool.chat.parsers.parsed import Call, Tools

_KINDS: dict[type, str] = {
    bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object", type(None): "null",
}  # fmt: skip
_WORDS = {"True": "true", "False": "false", "None": "null"}
"""Python's, which models write as well."""


def call_in(text: str, *keys: str) -> Call | None:
    """Of an object with a name, and with arguments under the first of `keys` that is there."""
    found = object_in(text)
    return None if found is None else call_of(found, *keys)


def call_of(found: Any, *keys: str) -> Call | None:
    if not isinstance(found, dict):
        return None
    name, arguments = found.get("name"), next((found[key] for key in keys if key in found), {})
    if isinstance(arguments, str):
        arguments = object_in(arguments)
    if not isinstance(arguments, dict) or not isinstance(name, str) or not name:
        return None
    return Call(name, arguments)


def calls_in(text: str, *keys: str) -> list[Call]:
    """Of objects one behind the other, with white space or semicolons between them; none if any is no call."""
    decoder, at, found = json.JSONDecoder(parse_constant=_refuse), 0, list[Call | None]()
    while at < len(text):
        if text[at] in "; \t\r\n":
            at += 1
            continue
        try:
            one, at = decoder.raw_decode(text, at)
            _check_text(one)
        except (ValueError, RecursionError):
            return []
        found.append(call_of(one, *keys))
    calls = [call for call in found if call is not None]
    return calls if len(calls) == len(found) else []


def object_in(text: str) -> dict[str, Any] | None:
    found = json_in(text)
    return found if isinstance(found, dict) else None


def json_in(text: str) -> Any:
    """None where it is no JSON."""
    try:
        found: Any = json.loads(text, parse_constant=_refuse)
        _check_text(found)
    except (ValueError, RecursionError):
        return None
    return found


def _check_text(found: Any) -> None:
    """ValueError where a string has half of a surrogate pair, which no UTF-8 has."""
    json.dumps(found, ensure_ascii=False).encode()


def _refuse(constant: str) -> None:
    """NaN and Infinity, which Python reads and no other JSON does."""
    raise ValueError(constant)


def typed(text: str, name: str, key: str, tools: Tools) -> Any:
    """The value of an argument that the model wrote as text, by its declaration: strings as they are, others as JSON;
    what no declared type takes stays text."""
    kinds = _declared(name, key, tools)
    if not kinds - {"string"}:
        return text
    value = json_in(_WORDS.get(text.strip(), text))
    kind = _KINDS[type(value)]
    if value is None and text.strip() not in ("null", "None"):
        return text
    if kind in kinds or (kind == "integer" and "number" in kinds):
        return value
    return text if "string" in kinds else value


def _declared(name: str, key: str, tools: Tools) -> set[str]:
    """JSON types that an argument may have; empty where nothing says. Schemas are the agent's, and may be anything."""
    for tool in tools:
        function = _object(tool.get("function"))
        if function.get("name") == name:
            return _types(_object(_object(_object(function.get("parameters")).get("properties")).get(key)))
    return set()


def _types(schema: Mapping[str, Any]) -> set[str]:
    one = schema.get("type")
    found = {kind for kind in ([one] if isinstance(one, str) else _list(one)) if isinstance(kind, str)}
    for key in ("anyOf", "oneOf"):
        found |= {kind for option in _list(schema.get(key)) for kind in _types(_object(option))}
    return found or {_KINDS[type(value)] for value in _list(schema.get("enum"))}


def _object(found: Any) -> Mapping[str, Any]:
    return found if isinstance(found, Mapping) else {}


def _list(found: Any) -> list[Any]:
    return found if isinstance(found, list) else []
