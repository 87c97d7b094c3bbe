"""The files of a Hugging Face directory: the safetensors with their headers, and whether it has a tokenizer.
Needs no torch, so that serve-engines can look before an engine does.

Format: 8 bytes little-endian header length, JSON header, data.
"""

from __future__ import annotations

import json
from io import BufferedReader
from pathlib import Path
from typing import Any

from rltool.errors import UsageError

TOKENIZERS = ("tokenizer*", "vocab*", "*.tiktoken", "*.model", "*.spm", "tekken.json")
"""Names of the files that a tokenizer is read from. tokenizer_config.json may be enough: of bytes, or of own code."""
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CARRIED = "carried.safetensors"
"""In a torch_dist directory: the tensors that are not of the model (`Family.carried`)."""
_LARGEST_HEADER = 100_000_000
"""The format's own limit."""


class TensorFileDamaged(UsageError):
    """A safetensors file whose header or size is not what the format demands."""


def weight_files(directory: Path) -> list[Path]:
    """The files that hold the weights. UsageError when there are none, or for a broken index."""
    index = directory / INDEX
    if index.is_file():
        try:
            names = sorted({str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{index} is no index of safetensors files: {error!r}; copy it again") from error
        absent = [name for name in names if not (directory / name).is_file()]
        if absent:
            raise UsageError(f"{index} names files that are not there: {', '.join(absent)}")
        return [directory / name for name in names]
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    raise UsageError(
        f"{directory} has neither {SINGLE} nor {INDEX}; other weight formats are not read "
        "(save the model with transformers' save_pretrained, which writes safetensors)"
    )


def files_with_carried(directory: Path) -> list[Path]:
    """Those of a Hugging Face directory, or of one of ours, that may hold tensors which are not of the model."""
    if any((directory / name).is_file() for name in (INDEX, SINGLE)):
        return weight_files(directory)
    return [path for path in (directory / CARRIED,) if path.is_file()]


def check_weight_files(directory: Path) -> None:
    """Raises UsageError for files that are missing or cut off. Reads headers alone."""
    for path in weight_files(directory):
        with path.open("rb") as stream:
            read_header(path, stream)


def check_tokenizer_files(directory: Path) -> None:
    """UsageError for a directory without any file of a tokenizer."""
    if not any(found for pattern in TOKENIZERS for found in directory.glob(pattern)):
        raise no_tokenizer(directory, ["tokenizer.json", "tokenizer.model", "vocab.json"])


def no_tokenizer(directory: Path, wanted: list[str]) -> UsageError:
    return UsageError(
        f"{directory} has no tokenizer ({', '.join(wanted)}: none of these is there); copy the tokenizer's files from "
        "the model that it was made of"
    )


def read_header(path: Path, stream: BufferedReader) -> tuple[dict[str, Any], int]:
    """(name -> dtype, shape and offsets; where the data begins). Raises TensorFileDamaged."""
    size = path.stat().st_size
    length = int.from_bytes(stream.read(8), "little")
    if size < 8 or length > min(size - 8, _LARGEST_HEADER):
        raise TensorFileDamaged(f"{path} is no safetensors file, or it is cut off ({size} bytes)")
    try:
        entries = json.loads(stream.read(length))
        entries.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise TensorFileDamaged(f"{path}: the header cannot be read: {error!r}") from error
    if size != 8 + length + end:
        raise TensorFileDamaged(f"{path} has {size} bytes, its header needs {8 + length + end}; copy it again")
    return entries, 8 + length
