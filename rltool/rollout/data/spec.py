"""What a user writes for a data set, taken apart. Pure but for looking whether a path exists."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qsl

from rltool.errors import UsageError

GYM = "reasoning-gym:"
SUFFIXES = (".jsonl", ".json", ".parquet")
_SLICE = re.compile(r"^(?P<name>.*)\[(?P<start>\d*):(?P<stop>\d*)\]$")
_HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
HUB_OPTIONS = ("config", "split", "revision")


@dataclass(frozen=True)
class DataSpec:
    """One data set. name: path, OWNER/NAME on the hub, or task of reasoning-gym; options: what stood behind `?`.

    start, stop: the rows that are taken, counted from 0 as Python slices are; stop None: to the end.
    """

    text: str
    kind: Literal["file", "directory", "hub", "reasoning-gym"]
    name: str
    options: Mapping[str, str] = field(default_factory=dict)
    start: int = 0
    stop: int | None = None


def parse_spec(text: str) -> DataSpec:
    """`rows.jsonl[:1000]`, `saved/`, `openai/gsm8k?config=main&split=test`, `reasoning-gym:chain_sum?size=50&seed=7`.

    A name is the hub's where it is OWNER/NAME, ends in no suffix of a data file, and there is no path OWNER. Raises
    UsageError for an empty slice, and for options that the kind does not have.
    """
    body, start, stop = text, 0, None
    if found := _SLICE.match(text):
        body = found["name"]
        start, stop = int(found["start"] or 0), int(found["stop"]) if found["stop"] else None
        if stop is not None and stop <= start:
            raise UsageError(f"data set {text!r}: the slice [{found['start']}:{found['stop']}] holds no row")
    if body.startswith(GYM):
        name, _, query = body.removeprefix(GYM).partition("?")
        return DataSpec(text, "reasoning-gym", name, _options(text, query), start, stop)
    name, _, query = body.partition("?")
    if not name.endswith(SUFFIXES) and _HUB_NAME.match(name) and not Path(name).parent.exists():
        options = _options(text, query)
        unknown = sorted(set(options) - set(HUB_OPTIONS))
        if unknown:
            raise UsageError(
                f"data set {text!r}: a data set of the hub has the options {', '.join(HUB_OPTIONS)}, not {unknown[0]}"
            )
        return DataSpec(text, "hub", name, options, start, stop)
    kind = "directory" if Path(body).is_dir() else "file"
    return DataSpec(text, kind, body, {}, start, stop)


def _options(text: str, query: str) -> dict[str, str]:
    if not query:
        return {}
    try:
        pairs = parse_qsl(query, strict_parsing=True)
    except ValueError:
        raise UsageError(f"data set {text!r}: expected ?KEY=VALUE&KEY=VALUE behind the name, found ?{query}") from None
    names = [name for name, _ in pairs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"data set {text!r}: {twice} is given twice")
    return dict(pairs)
