"""What is read and written is what the standard library reads and writes."""

from __future__ import annotations

import json
import math
import random
import re
import struct
from enum import StrEnum

import pytest

from rltool.engines.fast_json import dumps, loads


class Kind(StrEnum):
    ONE = "one"


VALUES = [
    None, True, 0, -0.0, 1e-7, 1e16, 1e22, 5e-324, 2**70, -(2**63) - 1, "", "plain",
    "é 😀 \u2028\u2029\x85\x7f\x00\r\n\"\\/</", "half \ud83d", ["\udc00", {"\ud800": 1}],
    math.nan, [math.inf, -math.inf], (1, (2,)), Kind.ONE,
    {"b": 1, "a": {"z": [], "y": {}}, "é": 2}, {"tokens": list(range(1000)), "text": "fünf"},
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_what_is_written_is_ascii_and_says_the_same(value):
    data = dumps(value)
    assert data.isascii() and b"\n" not in data
    # By their text: NaN is not itself, and 0.0 is -0.0.
    assert json.dumps(json.loads(data)) == json.dumps(value) == json.dumps(loads(data))


def test_every_double_comes_back_as_it_was():
    chance = random.Random(0)
    values = [struct.unpack("d", chance.randbytes(8))[0] for _ in range(20_000)]
    values = [value for value in values if math.isfinite(value)] + [chance.uniform(-30, 0) for _ in range(20_000)]
    data = dumps(values)
    assert values == json.loads(data) == loads(data) == loads(json.dumps(values))


def test_what_is_no_json_is_no_json():
    with pytest.raises(TypeError):
        dumps({"a": object()})
    for text in (b"", b"{", b"[1,]", b"01", b"'a'", b'"\xff"', b'"a\tb"', b"1" * 5000, b"{} {}"):
        with pytest.raises(ValueError) as error:  # noqa: PT011  # it has many words for it
            json.loads(text)
        with pytest.raises(ValueError, match=re.escape(str(error.value))):
            loads(text)


SENT = [b'{"a": 1, "b": 2, "a": 3}', b"[1e400, NaN, -Infinity]", b'"\\ud800"', b'"\\ud83d\\ude00"', b"\xef\xbb\xbf[1]",
        '{"a": "é"}'.encode("utf-16"), b"[" * 300 + b"]" * 300, b"-0", b"1E5"]  # fmt: skip


@pytest.mark.parametrize("sent", SENT, ids=lambda sent: repr(sent[:20]))
def test_what_is_read_is_what_the_standard_library_reads(sent):
    assert json.dumps(loads(sent)) == json.dumps(json.loads(sent))


def test_constants_are_refused_where_they_are_asked_for():
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    for name in ("NaN", "Infinity", "-Infinity"):
        with pytest.raises(ValueError, match=f"{name} is no JSON"):
            loads(f"[{name}]", constant=refuse)
    assert loads(b'{"a": [1.5]}', constant=refuse) == {"a": [1.5]}
