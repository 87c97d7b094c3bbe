"""The journal of a served trainer: each accepted call, on the disk before it is acknowledged; each result, before it is
given out.

Calls are numbered in the order in which they were accepted. A line that a kill has left without its end was never
acknowledged: it is cut off when the journal is opened.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import threading
import time
from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rltool.errors import RltoolError, UsageError
from rltool.processes.files import sync_directory
from rltool.report.served import read_history

TALLY_SECONDS = 10.0
HISTORY_BYTES = 8 * 2**20
"""Of a history, before it is folded: some 40,000 calls."""
_NEXT, _FLOORS, _GONE = "next", "floors", "gone"
"""Of the first line of a journal that was compacted."""


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


def _open(path: Path) -> int:
    """To be read and appended to; for its owner alone, from its first byte."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)


def _replace(path: Path, values: Iterable[dict[str, Any]]) -> int:
    """A file with these lines in the place of `path`, which it is opened as. A kill leaves the old one or the new."""
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)  # what a kill has left may have another mode
    file = _open(new)
    try:
        for value in values:
            line = json.dumps(value, separators=(",", ":")).encode() + b"\n"
            while line:
                line = line[os.write(file, line) :]
        os.fsync(file)
        os.replace(new, path)
    except BaseException:
        os.close(file)
        new.unlink(missing_ok=True)
        raise
    return file


class Lines:
    """A file of JSON, one value a line, that grows, and is replaced as a whole."""

    def __init__(self, path: Path) -> None:
        self._file, self._path = _open(path), path
        self._whole: int | None = None
        """Bytes of the whole lines, where behind them is what could not be cut back."""

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

    def append(self, *values: dict[str, Any]) -> None:
        """All on the disk when this returns; where it raises (a full disk), the file is what it was."""
        lines = b"".join(json.dumps(value, separators=(",", ":")).encode() + b"\n" for value in values)
        self._cut_back()
        self._whole = os.fstat(self._file).st_size
        try:
            while lines:
                lines = lines[os.write(self._file, lines) :]
            os.fsync(self._file)
            self._whole = None
        except OSError:
            self._cut_back()
            raise

    def _cut_back(self) -> None:
        if self._whole is not None:
            os.ftruncate(self._file, self._whole)
            self._whole = None

    def replace(self, values: Iterable[dict[str, Any]]) -> None:
        """In place of all lines. On the disk when this returns; a kill leaves all the old lines or all the new ones."""
        file = _replace(self._path, values)
        os.close(self._file)
        self._file, self._whole = file, None
        sync_directory(self._path.parent)  # or a power cut could take the rename back

    def close(self) -> None:
        os.close(self._file)
        self._file = -1


class Journal:
    """calls, results: by number, calls in their order; `compact` takes some out. next: the number of the next call.
    floors: by model, the highest seq_id of a call that was taken out. gone: of sessions, by the numbers of their models
    that were taken out whole, whether one was evicted."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._calls, self._results = Lines(directory / "calls.jsonl"), Lines(directory / "results.jsonl")
        self._lock = threading.Lock()
        """Calls are accepted in one thread, and taken out in another."""
        lines = self._calls.read()
        head = lines.pop(0) if lines and _NEXT in lines[0] else {}
        self.floors: dict[str, int] = head.get(_FLOORS, {})
        self.gone: dict[str, dict[str, bool]] = head.get(_GONE, {})
        self.calls = {each["number"]: Call(**each) for each in lines}
        self.next: int = max([head.get(_NEXT, 0), *(number + 1 for number in self.calls)])
        results = {each["number"]: each["result"] for each in self._results.read()}
        self.results: dict[int, dict[str, Any]] = {n: each for n, each in results.items() if n in self.calls}

    def accept(self, *calls: Call) -> None:
        """All, or none (OSError)."""
        with self._lock:
            self._calls.append(*map(asdict, calls))
            self.calls |= {call.number: call for call in calls}
            self.next += len(calls)

    def finish(self, call: Call, result: dict[str, Any]) -> None:
        self._results.append({"number": call.number, "result": result})
        self.results[call.number] = result

    def compact(
        self, changed: Mapping[int, Call | None], results: Iterable[int], floors: Mapping[str, int],
        gone: Mapping[str, Mapping[str, bool]], left: Container[str],
    ) -> None:  # fmt: skip
        """changed: calls in place of those of their numbers, None takes one out, with its result; results: of which
        calls these go; left: models whose floors go. A kill at any moment leaves a journal that is the same for a
        restart, which needs neither."""
        with self._lock:
            self.floors = {model: seq for model, seq in (self.floors | dict(floors)).items() if model not in left}
            calls = {n: changed.get(n, call) for n, call in self.calls.items()}
            head = {_NEXT: self.next, _FLOORS: self.floors, _GONE: gone}
            self._calls.replace([head, *(asdict(call) for call in calls.values() if call is not None)])
            out = {n for n, call in calls.items() if call is None} | set(results)
            kept = ({"number": n, "result": each} for n, each in self.results.items() if n not in out)
            # Only now: a call without its result would be waited for.
            self._results.replace(kept)
            for number in out:
                self.results.pop(number, None)
            for number, call in changed.items():
                if call is None:
                    del self.calls[number]
                else:
                    self.calls[number] = call

    def close(self) -> None:
        with self._lock:  # a call may be on its way to the disk
            self._calls.close()
            self._results.close()


class History:
    """What a report shows: a line for each call that was carried out, and the tallies of clients, every TALLY_SECONDS
    where they have changed; `compact` folds it to a line for each model. Not synced to the disk: a kill may lose the
    last tallies. clients: name -> what is counted.

    samples: requests that engines have answered; refused: calls that were not accepted, the last with its reason.
    """

    def __init__(self, directory: Path) -> None:
        self._path, self._lock, self._folded = directory / "history.jsonl", threading.Lock(), 0
        self._file = _open(self._path)
        self._cut()
        self._boot, self._written = secrets.token_hex(6), time.monotonic()
        self.clients: dict[str, dict[str, Any]] = {}
        self._changed = True
        self._tally(-math.inf)

    def carried_out(self, call: Call, result: Mapping[str, Any], seconds: float) -> None:
        line = {"client": call.client, "model": call.model, "kind": call.kind, "seconds": round(seconds, 6)}
        line |= {key: result[key] for key in ("loss", "backward", "error") if key in result}
        line |= {key: value for key, value in result.get("metrics", {}).items() if math.isfinite(value)}
        self._write(line | {"tokens": call.body.get("tokens", 0)})

    def sampled(self, client: str, tokens: int) -> None:
        self._count(client, samples=1, sampled_tokens=tokens)

    def refused(self, client: str, reason: str) -> None:
        self.clients.setdefault(client, {})["last_refusal"] = reason[:300]
        self._count(client, refused=1)

    def compact(self) -> None:
        """Where it has doubled since, and is more than HISTORY_BYTES. One that is damaged is left as it is."""
        if os.fstat(self._file).st_size <= max(HISTORY_BYTES, 2 * self._folded):
            return
        with self._lock, suppress(OSError, RltoolError):
            file = _replace(self._path, read_history(self._path).folded(self._boot))
            os.close(self._file)
            self._file = file
        self._folded = os.fstat(self._file).st_size

    def close(self) -> None:
        self._tally(-math.inf)
        os.close(self._file)
        self._file = -1  # a sample may end later

    def _cut(self) -> None:
        """A line that a kill has left without its end."""
        data = self._path.read_bytes()
        if not data.endswith(b"\n"):
            os.ftruncate(self._file, data.rfind(b"\n") + 1)

    def _count(self, client: str, **counts: int) -> None:
        found = self.clients.setdefault(client, {})
        for name, count in counts.items():
            found[name] = found.get(name, 0) + count
        self._changed = True
        self._tally(self._written + TALLY_SECONDS)

    def _tally(self, due: float) -> None:
        if self._changed and time.monotonic() >= due:
            self._changed, self._written = False, time.monotonic()
            self._write({"boot": self._boot, "clients": self.clients})

    def _write(self, line: dict[str, Any]) -> None:
        """One write: lines of two threads stay whole. A full disk takes no call with it."""
        data = json.dumps({"time": round(time.time(), 3), **line}).encode() + b"\n"
        with self._lock, suppress(OSError):
            if (written := os.write(self._file, data)) < len(data):
                os.ftruncate(self._file, os.fstat(self._file).st_size - written)
