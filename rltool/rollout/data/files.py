"""Rows of local files, one at a time: JSONL, a JSON array, Parquet."""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rltool.errors import UsageError
from rltool.rollout.data.spec import SUFFIXES


def file_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """(place for error messages, row). The place counts lines or rows from 1. Raises UsageError naming it."""
    if not path.is_file():
        raise UsageError(f"data file {path} does not exist")
    if path.suffix not in SUFFIXES:
        raise UsageError(f"data file {path}: expected a name that ends in .jsonl, .json or .parquet")
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
    elif path.suffix == ".json" and _is_array(path):
        yield from _array_rows(path)
    else:
        yield from _jsonl_rows(path)


def _is_array(path: Path) -> bool:
    """Whether the file begins with `[`; JSONL does not, its rows are objects."""
    with path.open("rb") as file:
        return file.read(64).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def _array_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Of one JSON document, which has to be read whole."""
    rows = parse_json(path.read_bytes().removeprefix(codecs.BOM_UTF8), str(path))
    for number, row in enumerate(rows, 1):
        yield f"{path}, row {number}", row


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Any]]:
    # bytes, because text mode would need a decision on what a line is; in JSONL it is what ends in \n
    try:
        file = path.open("rb")
    except OSError as error:
        raise UsageError(f"data file {path} cannot be read: {error.strerror}") from error
    with file:
        for number, line in enumerate(file, 1):
            content = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if content.strip():
                place = f"{path}, line {number}"
                yield place, parse_json(content, place)


def parse_json(text: bytes, place: str) -> Any:
    """The value; UsageError, with the place in front, for anything but JSON in UTF-8 whose text is whole characters."""
    try:
        # Decoded here: json would take a line with NUL bytes for UTF-16.
        value = json.loads(text.decode("utf-8"))
        if b"\\u" in text:  # the only way to half of a surrogate pair, at which tokenizers and writers fail
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{place}: not UTF-8 ({error.reason} at byte {error.start})") from error
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])[1:-1]
        raise UsageError(
            f"{place}: {half} is half of a surrogate pair, which is no character; write both halves, or leave it out"
        ) from None
    except json.JSONDecodeError as error:
        raise UsageError(f"{place}: not valid JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, a thousand brackets
        raise UsageError(f"{place}: cannot be read as JSON: {error}") from error
    return value


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", without_nan(row)
    except (pyarrow.ArrowException, OSError) as error:
        raise UsageError(f"{path}: cannot be read as Parquet: {error}") from error


def without_nan(value: Any) -> Any:
    """A value of a table, with None where a number is NaN: pandas and others write it where a value is missing, and
    JSON, which checkpoints and dumps are, has none."""
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if isinstance(value, dict):
        return {key: without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [without_nan(inner) for inner in value]
    return value
