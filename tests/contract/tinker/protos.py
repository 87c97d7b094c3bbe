"""A forward_backward request as bytes, written field by field."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np


def varint(value: int) -> bytes:
    found = b""
    while value > 127:
        found += bytes([value & 127 | 128])
        value >>= 7
    return found + bytes([value])


def field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def tensor(values: Sequence[float], dtype: str) -> bytes:
    code = {"<f4": 1, "<i8": 2}[dtype]
    return field(1, np.array(values, dtype).tobytes()) + field(3, code) + field(4, varint(len(values)))


def double(number: int, value: float) -> bytes:
    return varint(number << 3 | 1) + struct.pack("<d", value)


def forward_proto(
    model: str, seq: int, *, tokens: Sequence[int], targets: Sequence[int], loss: str = "cross_entropy",
    settings: dict[str, float | str] | None = None, only: bool = False, **inputs: Sequence[float],
) -> bytes:  # fmt: skip
    named = {"target_tokens": tensor(targets, "<i8")} | {n: tensor(each, "<f4") for n, each in inputs.items()}
    datum = field(1, field(1, field(1, np.array(tokens, "<i4").tobytes())))
    datum += b"".join(field(2, field(1, name.encode()) + field(2, each)) for name, each in named.items())
    body = field(1, model.encode()) + field(2, seq) + field(3, datum) + field(4, loss.encode())
    for name, value in (settings or {}).items():
        encoded = field(2, value.encode()) if isinstance(value, str) else double(1, value)
        body += field(7, field(1, name.encode()) + field(2, encoded))
    return body + (field(6, 1) if only else b"")
