"""forward_backward and samples in protobuf: what a request says, and results. Pure.

The messages are those of tinker_public.proto in the client (tinker 0.38), as far as they are read or written here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from rltool.algorithms.named_losses import LOSSES
from rltool.errors import UsageError
from rltool.training.served import Datum, StepOutput, Values

_MESSAGES: dict[str, tuple[str, ...]] = {
    "ForwardBackwardRequest": (
        "string model_id 1", "int32 seq_id 2", "repeated Datum data 3", "string loss_fn 4",
        "repeated Number loss_fn_config 5", "bool forward_only 6", "repeated Setting loss_fn_config_v2 7",
    ),
    "Datum": ("repeated Chunk model_input 1", "repeated Input loss_fn_inputs 2"),
    "Chunk": ("EncodedText encoded_text 1",),
    "EncodedText": ("bytes tokens 1",),
    "Input": ("string key 1", "Tensor value 2"),
    "Tensor": ("bytes dense 1", "SparseCsr sparse_csr 2", "int32 dtype 3", "repeated int64 shape 4"),
    "SparseCsr": (),
    "Number": ("string key 1", "double value 2"),
    "Setting": ("string key 1", "SettingValue value 2"),
    "SettingValue": ("double number 1", "string text 2"),
    "ForwardBackwardOutput": (
        "string loss_fn_output_type 1", "repeated ArrayRecord loss_fn_outputs 2", "repeated Number metrics 3",
    ),
    "ArrayRecord": ("string type_tag 1", "repeated Field fields 2", "int32 num_datums 3"),
    "Field": ("string key 1", "BatchedTensor value 2"),
    "BatchedTensor": ("bytes data 1", "bytes offsets 2", "int32 dtype 3"),
    "SampleResponse": (
        "repeated SampledSequence sequences 1", "bytes prompt_logprobs 2", "TopkLogprobs topk_prompt_logprobs 3",
        "int32 prompt_cache_hit_tokens 4",
    ),
    "SampledSequence": ("int32 stop_reason 1", "bytes tokens 2", "bytes logprobs 3", "TopkLogprobs topk_logprobs 4"),
    "TopkLogprobs": ("bytes token_ids 1", "bytes logprobs 2", "int32 k 3", "int32 length 4"),
}  # fmt: skip
"""Message -> its fields: type, name, number. A map is written as its entries, which are the same bytes."""

_PACKAGE = "rltool.tinker"
_ARRAY_RECORD = "ArrayRecord"
_FLOAT32, _INT64 = 1, 2
_DTYPES = {_FLOAT32: np.dtype("<f4"), _INT64: np.dtype("<i8")}
"""Of the client's enum DType."""
_TARGETS = "target_tokens"
_STOP_REASONS = {"stop": 0, "length": 1}
_NO_TOKEN, _NO_LOGPROB = 0, -99999.0
"""What the client takes for "there is none" in a table of the most probable tokens."""


def _classes() -> dict[str, Any]:
    """In the syntax proto2, which tells a field that is not set from one that is 0."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="rltool/tinker.proto", package=_PACKAGE, syntax="proto2")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field in fields:
            *repeated, kind, field_name, number = field.split()
            made = message.field.add(name=field_name, number=int(number), label=3 if repeated else 1)
            if kind in _MESSAGES:
                made.type, made.type_name = kinds.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
            else:
                made.type = kinds.Type.Value(f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)  # pyright: ignore[reportAttributeAccessIssue]
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _MESSAGES
    }


_CLASSES = _classes()


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
        sent = _CLASSES["ForwardBackwardRequest"].FromString(body)
        data = tuple(_datum(each, i) for i, each in enumerate(sent.data))
        # Of a loss that is not supported they may be anything; it is refused by its name.
        settings = {each.key: _number(each) for each in sent.loss_fn_config_v2 if sent.loss_fn in LOSSES}
    except (DecodeError, ValueError) as error:
        raise UsageError(f"the body is not a ForwardBackwardRequest of tinker 0.38: {error}") from error
    old = {each.key: each.value for each in sent.loss_fn_config}
    return ForwardRequest(sent.model_id, sent.seq_id, data, sent.loss_fn, settings or old, not sent.forward_only)


def _number(setting: Any) -> float:
    if setting.value.HasField("text"):
        raise UsageError(f"loss_fn_config: {setting.key} is text, expected a number")
    return setting.value.number


def _datum(sent: Any, index: int) -> Datum:
    if not all(chunk.HasField("encoded_text") for chunk in sent.model_input):
        raise UsageError(f"datum {index}: model_input has a picture or sound; text alone is supported")
    tokens = [np.frombuffer(chunk.encoded_text.tokens, "<i4").astype(np.int64) for chunk in sent.model_input]
    inputs = {each.key: _tensor(each.value, f"datum {index}: {each.key}") for each in sent.loss_fn_inputs}
    if _TARGETS not in inputs or not tokens:
        raise UsageError(f"datum {index} lacks {_TARGETS if tokens else 'model_input'}")
    targets = inputs.pop(_TARGETS)
    if targets.dtype != np.int64:
        raise UsageError(f"datum {index}: {_TARGETS} are {targets.dtype}, expected int64")
    return Datum(np.concatenate(tokens), targets, {name: each.astype(np.float32) for name, each in inputs.items()})


def _tensor(sent: Any, what: str) -> Values:
    if sent.HasField("sparse_csr"):
        raise UsageError(f"{what} is sparse, expected a dense tensor")
    if sent.dtype not in _DTYPES:
        raise UsageError(f"{what} has dtype {sent.dtype}, expected float32 or int64")
    values = np.frombuffer(sent.dense, _DTYPES[sent.dtype]).copy()
    return values.reshape(list(sent.shape)) if sent.shape else values


def encode_output(output: StepOutput) -> bytes:
    """A ForwardBackwardOutput: one record of all data, with the values of each field one behind the other."""
    message = _CLASSES["ForwardBackwardOutput"](loss_fn_output_type=_ARRAY_RECORD)
    record = message.loss_fn_outputs.add(type_tag=_ARRAY_RECORD, num_datums=len(output.logprobs))
    for name, rows in (("logprobs", output.logprobs), ("elementwise_loss", output.elementwise_loss)):
        field = record.fields.add(key=name)
        field.value.data = np.concatenate(rows).astype("<f4").tobytes()
        field.value.offsets = np.cumsum([0, *(4 * len(row) for row in rows)]).astype("<i8").tobytes()
        field.value.dtype = _FLOAT32
    message.metrics.add(key="loss:sum", value=output.metrics["loss_sum"])
    message.metrics.add(key="num_tokens:sum", value=output.metrics["num_tokens"])
    return message.SerializeToString()


@dataclass(frozen=True)
class Topk:
    """Of the most probable tokens in each of n places, the most probable first. ids: [n, k] int; logprobs: [n, k]; -1
    and -inf where there is none."""

    ids: Values
    logprobs: Values


@dataclass(frozen=True)
class SampledTokens:
    """stop_reason: stop or length."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop_reason: str
    topk: Topk | None = None


@dataclass(frozen=True)
class SampleOutput:
    """prompt_logprobs: [prompt tokens], NaN where it was not asked for, as of the first; None: of none."""

    sequences: tuple[SampledTokens, ...]
    prompt_logprobs: Values | None = None
    prompt_topk: Topk | None = None
    cached_tokens: int = 0


def encode_samples(output: SampleOutput) -> bytes:
    """A SampleResponse."""
    message = _CLASSES["SampleResponse"](prompt_cache_hit_tokens=output.cached_tokens)
    for each in output.sequences:
        sequence = message.sequences.add(stop_reason=_STOP_REASONS[each.stop_reason])
        sequence.tokens = np.asarray(each.tokens, "<i4").tobytes()
        sequence.logprobs = np.asarray(each.logprobs, "<f4").tobytes()
        if each.topk is not None:
            _put_topk(sequence.topk_logprobs, each.topk)
    if output.prompt_logprobs is not None:
        message.prompt_logprobs = output.prompt_logprobs.astype("<f4").tobytes()
    if output.prompt_topk is not None:
        _put_topk(message.topk_prompt_logprobs, output.prompt_topk)
    return message.SerializeToString()


def _put_topk(message: Any, topk: Topk) -> None:
    there = topk.ids >= 0
    message.length, message.k = topk.ids.shape
    message.token_ids = np.where(there, topk.ids, _NO_TOKEN).astype("<i4").tobytes()
    message.logprobs = np.where(there, topk.logprobs, _NO_LOGPROB).astype("<f4").tobytes()
