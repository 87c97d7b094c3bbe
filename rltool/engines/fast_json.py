"""JSON as the standard library reads and writes it, by pydantic's parser and writer, which take a third of its time for
lists of numbers. What they refuse is the standard library's to decide: nested deeper than 200, NaN, half a surrogate
pair, other encodings than UTF-8.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from pydantic_core import from_json, to_json


def loads(data: bytes | str, *, constant: Callable[[str], Any] | None = None) -> Any:
    """constant: as json's parse_constant, asked for NaN and Infinity. ValueError, RecursionError."""
    try:
        return from_json(data, allow_inf_nan=constant is None)
    except ValueError:
        return json.loads(data, parse_constant=constant)


def dumps(value: Any) -> bytes:
    """ASCII, without white space; TypeError for what is no JSON. Keys are texts."""
    try:
        data = to_json(value)
    except ValueError:
        data = b"\xff"
    return data if data.isascii() else json.dumps(value, separators=(",", ":")).encode()
