"""Images, video and audio of rows: found in columns and in parts of messages, kept as they are, never decoded. Pure."""

from __future__ import annotations

import base64
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

PLURALS = {"image": "images", "video": "video", "audio": "audio"}
PART_TYPES = {form.format(kind): kind for kind in PLURALS for form in ("{}", "{}_url", "input_{}")}
"""Types of the parts of a message: transformers' (`image`), OpenAI's (`image_url`, `input_audio`)."""
SOURCES = ("url", "path", "base64")
"""Where transformers' parts may have what others have under the name of their type."""


def multimodal_inputs(columns: Mapping[str, Any], messages: Any) -> dict[str, list[Any]]:
    """Kind ("image", "video", "audio") -> what a row has of it, JSON: those in messages first, in order, then those of
    its column. Bytes become base64 text.

    columns: kind -> value of its column, a list, one value, or None; messages: the prompt's, or text. A part without a
    source ({"type": "image"}) only marks the place of one of the column. ValueError for what is no JSON, such as a
    decoded image.
    """
    found: dict[str, list[Any]] = {kind: [] for kind in PLURALS}
    for part in _parts(messages):
        kind, value = kind_of(part), source_in(part)
        if kind is not None and value is not None:
            found[kind].append(value)
    for kind, value in columns.items():
        found[kind] += value if isinstance(value, list) else [] if value is None else [value]
    return {kind: _as_json(kind, values) for kind, values in found.items() if values}


def kinds_in(messages: Any) -> set[str]:
    """Kinds that messages mention, with a source or without."""
    return {kind for kind in map(kind_of, _parts(messages)) if kind is not None}


def plain_messages(messages: Sequence[Any]) -> list[Any]:
    """Messages with their parts as JSON, and without keys that are None in these: Arrow gives all structs of a column
    the same keys, and chat templates ask whether a part has a key `image`, not what is in it. What is no message stays
    as it is. ValueError as above."""
    return [
        {**one, "content": _plain(one["content"])} if isinstance(one, dict) and "content" in one else one
        for one in messages
    ]


def kind_of(part: Mapping[str, Any]) -> str | None:
    """Of a part of a message; None: text, or a type that is not known here."""
    if part.get("type") is not None:
        return PART_TYPES.get(part["type"]) if isinstance(part["type"], str) else None
    return next((kind for kind in PLURALS if part.get(kind) is not None), None)


def source_in(part: Mapping[str, Any]) -> Any:
    """What a part of a message has of its kind: a path, a URL, base64 text, or an object with one; None: only a
    place."""
    kind = kind_of(part)
    names = () if kind is None else (part.get("type", kind), kind, *SOURCES)
    return next((part[name] for name in names if part.get(name) is not None), None)


def named(kinds: Collection[str]) -> str:
    """For messages: "images and audio"."""
    return " and ".join(PLURALS[kind] for kind in PLURALS if kind in kinds)


def _parts(messages: Any) -> Iterator[Mapping[str, Any]]:
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        yield from (part for part in content if isinstance(part, Mapping)) if isinstance(content, list) else ()


def _plain(content: Any) -> Any:
    return _as_json("messages", [_without_none(part) for part in content]) if isinstance(content, list) else content


def _without_none(part: Any) -> Any:
    return {key: value for key, value in part.items() if value is not None} if isinstance(part, Mapping) else part


def _as_json(what: str, values: list[Any]) -> list[Any]:
    try:
        return json.loads(json.dumps(values, default=_base64, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{what}: cannot be written as JSON ({error}): give paths, URLs, bytes or base64 text (of a set of the "
            "package datasets: cast the column to Image(decode=False) or its like)"
        ) from error


def _base64(value: Any) -> str:
    if isinstance(value, bytes | bytearray):
        return base64.b64encode(value).decode()
    raise TypeError(f"it holds {type(value).__module__}.{type(value).__name__}")
