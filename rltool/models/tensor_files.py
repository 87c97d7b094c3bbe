"""Safetensors files, one tensor at a time: nothing is mapped, so that a file larger than memory stays out of it."""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Iterable
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rltool.models.weight_files import TensorFileDamaged, read_header

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class TensorFile:
    """A safetensors file open for reading."""

    def __init__(self, path: Path) -> None:
        """Raises TensorFileDamaged for a file that is cut off or no safetensors file."""
        self.path = path
        self._stream: BufferedReader = path.open("rb")
        try:
            self._entries, self._start = read_header(path, self._stream)
        except BaseException:
            self._stream.close()
            raise

    @property
    def names(self) -> list[str]:
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._entries[name]["shape"])

    def dtype(self, name: str) -> torch.dtype:
        """TensorFileDamaged for one that is not known."""
        found = self._entries[name]["dtype"]
        if found not in _DTYPES:
            raise TensorFileDamaged(f"{self.path}: {name} has dtype {found}; known: {', '.join(_DTYPES)}")
        return _DTYPES[found]

    def read(self, name: str, part: int | None = None) -> Tensor:
        """The tensor, in memory of its own; part: of its first dimension that one alone. TensorFileDamaged for a dtype
        that is not known or sizes that contradict."""
        entry, dtype = self._entries[name], self.dtype(name)
        (begin, end), shape = entry["data_offsets"], entry["shape"]
        if not 0 <= begin <= end or end - begin != math.prod(shape) * dtype.itemsize:
            raise TensorFileDamaged(f"{self.path}: {name} of shape {shape} has {end - begin} bytes")
        tensor = torch.empty(shape if part is None else shape[1:], dtype=dtype)
        begin += (part or 0) * tensor.nbytes
        if tensor.nbytes:
            self._stream.seek(self._start + begin)
            if self._stream.readinto(_bytes_of(tensor)) != tensor.nbytes:
                raise TensorFileDamaged(f"{self.path}: {name} is cut off")
        return tensor

    def close(self) -> None:
        self._stream.close()


def write_tensor_file(
    path: Path, layout: list[tuple[str, torch.dtype, tuple[int, ...]]], tensors: Iterable[Tensor]
) -> None:
    """A safetensors file from tensors that come one by one in the order of `layout`: (name, dtype, shape) of each.

    All of one dtype, or the larger dtypes first: the format wants its tensors aligned.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in layout:
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for (name, dtype, shape), tensor in zip(layout, tensors, strict=True):
            if (tensor.dtype, tuple(tensor.shape)) != (dtype, shape):
                raise ValueError(
                    f"{name}: {tensor.dtype} {tuple(tensor.shape)} came where {dtype} {shape} was announced"
                )
            if tensor.nbytes:
                contiguous = tensor.detach().cpu().contiguous()
                stream.write(_bytes_of(contiguous))


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, valid while the tensor lives.

    Not by way of numpy: a storage that numpy has seen can no longer be freed by `resize_`.
    """
    return memoryview((ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
