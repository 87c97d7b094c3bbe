"""forward_backward in protobuf: what a request says and its result, by the wire format, without generated code. Pure.

Field numbers are those of tinker_public.proto in the client (tinker 0.38); the format is protobuf.dev, "Encoding".
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from rltool.errors import UsageError
from rltool.training.served import Datum, StepOutput, Values

_DTYPES = {1: np.dtype("<f4"), 2: np.dtype("<i8")}
_TARGETS = "target_tokens"


@dataclass(frozen=True)
class ForwardRequest:
    """backward: the gradient is wanted too."""

    model: str
    seq: int
    data: tuple[Datum, ...]
    loss: str
    settings: dict[str, float]
    backward: bool


def decode_forward(body: bytes) -> ForwardRequest:
    """UsageError for what is no such message, and by name for what is not supported."""
    try:
        return _forward(body)
    except (IndexError, struct.error, UnicodeDecodeError, ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"the body is not a ForwardBackwardRequest of tinker 0.38: {error}") from error


def _forward(body: bytes) -> ForwardRequest:
    model, seq, loss, backward = "", 0, "", True
    data: list[Datum] = []
    old: dict[str, float] = {}
    settings: dict[str, float] = {}
    for number, value in _fields(body):
        if number == 1:
            model = value.decode()
        elif number == 2:
            seq = value
        elif number == 3:
            data.append(_datum(value, len(data)))
        elif number == 4:
            loss = value.decode()
        elif number == 5:
            key, number_of = _entry(value)
            [old[key]] = struct.unpack("<d", number_of)
        elif number == 6:
            backward = not value
        elif number == 7:
            key, setting = _entry(value)
            parts = dict(_fields(setting))
            if 2 in parts:
                raise UsageError(f"loss_fn_config: {key} is text, expected a number")
            [settings[key]] = struct.unpack("<d", parts[1])
    return ForwardRequest(model, seq, tuple(data), loss, settings or old, backward)


def _datum(message: bytes, index: int) -> Datum:
    tokens: list[Values] = []
    inputs: dict[str, Values] = {}
    for number, value in _fields(message):
        if number == 1:
            chunk = dict(_fields(value))
            if 1 not in chunk:
                raise UsageError(f"datum {index}: model_input has a picture or sound; text alone is supported")
            tokens.append(np.frombuffer(dict(_fields(chunk[1]))[1], "<i4").astype(np.int64))
        elif number == 2:
            name, tensor = _entry(value)
            inputs[name] = _tensor(tensor, f"datum {index}: {name}")
    if _TARGETS not in inputs or not tokens:
        raise UsageError(f"datum {index} lacks {_TARGETS if tokens else 'model_input'}")
    targets = inputs.pop(_TARGETS)
    if targets.dtype != np.int64:
        raise UsageError(f"datum {index}: {_TARGETS} are {targets.dtype}, expected int64")
    return Datum(np.concatenate(tokens), targets, {name: each.astype(np.float32) for name, each in inputs.items()})


def _tensor(message: bytes, what: str) -> Values:
    dense, dtype, shape = b"", 0, list[int]()
    for number, value in _fields(message):
        if number == 1:
            dense = value
        elif number == 2:
            raise UsageError(f"{what} is sparse, expected a dense tensor")
        elif number == 3:
            dtype = value
        elif number == 4:
            shape += _packed(value) if isinstance(value, bytes) else [value]
    if dtype not in _DTYPES:
        raise UsageError(f"{what} has dtype {dtype}, expected float32 or int64")
    values = np.frombuffer(dense, _DTYPES[dtype]).copy()
    return values.reshape(shape) if shape else values


def _entry(message: bytes) -> tuple[str, bytes]:
    """Of a map."""
    parts = dict(_fields(message))
    return parts[1].decode(), parts.get(2, b"\0" * 8)


def _packed(message: bytes) -> list[int]:
    found: list[int] = []
    at = 0
    while at < len(message):
        value, at = _varint(message, at)
        found.append(value)
    return found


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field: an int, or bytes (also of the fixed widths)."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield tag >> 3, value
            continue
        if kind == 2:
            size, at = _varint(message, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"wire type {kind}")
        if at + size > len(message):
            raise ValueError("it is cut off")
        yield tag >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7


def encode_output(output: StepOutput) -> bytes:
    """A ForwardBackwardOutput: one record of all data, with the values of each field one behind the other."""
    fields = {"logprobs": output.logprobs, "elementwise_loss": output.elementwise_loss}
    record = _bytes(1, b"ArrayRecord") + _number(3, len(output.logprobs))
    for name, rows in fields.items():
        data = np.concatenate(rows).astype("<f4").tobytes()
        offsets = np.cumsum([0, *(4 * len(row) for row in rows)]).astype("<i8").tobytes()
        batched = _bytes(1, data) + _bytes(2, offsets) + _number(3, 1)
        record += _bytes(2, _bytes(1, name.encode()) + _bytes(2, batched))
    message = _bytes(1, b"ArrayRecord") + _bytes(2, record)
    metrics = {"loss:sum": output.metrics["loss_sum"], "num_tokens:sum": output.metrics["num_tokens"]}
    for name, value in metrics.items():
        message += _bytes(3, _bytes(1, name.encode()) + _to_varint(2 << 3 | 1) + struct.pack("<d", value))
    return message


def _number(number: int, value: int) -> bytes:
    return _to_varint(number << 3) + _to_varint(value)


def _bytes(number: int, value: bytes) -> bytes:
    return _to_varint(number << 3 | 2) + _to_varint(len(value)) + value


def _to_varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])
