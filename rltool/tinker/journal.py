"""The journal of a served trainer: each accepted call, on the disk before it is acknowledged; each result, before it is
given out.

A call's number is its place in the journal. A line that a kill has left without its end was never acknowledged: it is
cut off when the journal is opened.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rltool.errors import UsageError


@dataclass(frozen=True)
class Call:
    """number: from 0; client: its key's name; key: what a repetition of the same call has too; digest: of its content;
    body: values of JSON."""

    number: int
    client: str
    kind: str
    model: str
    key: str
    digest: str
    body: dict[str, Any]


class Lines:
    """A file of JSON, one value a line, that only grows."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self._path = path

    def read(self) -> list[dict[str, Any]]:
        data = self._path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.ftruncate(self._file, whole)
            os.fsync(self._file)
        found: list[dict[str, Any]] = []
        for number, line in enumerate(data[:whole].splitlines(), 1):
            try:
                found.append(json.loads(line))
            except ValueError as error:
                raise UsageError(f"{self._path}, line {number} is damaged ({error}); restore the file") from error
        return found

    def append(self, value: dict[str, Any]) -> None:
        """On the disk when this returns; where it raises (a full disk), the file is what it was."""
        line = json.dumps(value, separators=(",", ":")).encode() + b"\n"
        size = os.fstat(self._file).st_size
        try:
            while line:
                line = line[os.write(self._file, line) :]
            os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, size)
            raise

    def close(self) -> None:
        os.close(self._file)


class Journal:
    """calls: in the order in which they were acknowledged; results: by number."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._calls, self._results = Lines(directory / "calls.jsonl"), Lines(directory / "results.jsonl")
        self.calls = [Call(**each) for each in self._calls.read()]
        self.results: dict[int, dict[str, Any]] = {each["number"]: each["result"] for each in self._results.read()}

    def accept(self, call: Call) -> None:
        self._calls.append(asdict(call))
        self.calls.append(call)

    def finish(self, call: Call, result: dict[str, Any]) -> None:
        self._results.append({"number": call.number, "result": result})
        self.results[call.number] = result

    def close(self) -> None:
        self._calls.close()
        self._results.close()
