"""Sessions on disk: one file of JSON lines each, below the run's directory, written before the agent gets its answer.

    {"event": "session", ...}    its first line
    {"event": "turn", ...}       trajectory.TurnRecord
    {"event": "mark", ...}       what became of a turn (Session.mark)
    {"event": "ended", ...}      its last line

and beside it a directory of the pictures that its turns name, once they are any.

Several processes may serve the sessions of one directory: each reads what the others have written before it uses a
session, and writes while it has the file locked (flock). What a killed one has written stays; a line that it was
writing is no part of the session, and the next one that writes cuts it off.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rltool.engines.fast_json import dumps, loads
from rltool.errors import RltoolError
from rltool.gateway.errors import NotRecorded
from rltool.gateway.session import Session
from rltool.gateway.trajectory import TurnRecord
from rltool.processes.files import clock_ahead

SESSION_ID = re.compile(r"[0-9a-f]{32}")
_TAIL = 4096
"""Bytes from the end of a file in which its last line stands, if that is an `ended`."""


@dataclass(frozen=True)
class SessionFile:
    """A session's file, open for writing, and locked. Its methods raise NotRecorded."""

    path: Path
    descriptor: int
    session: Session

    def turn(self, record: TurnRecord) -> None:
        self.append({"event": "turn", **record.to_json()})

    def mark(self, turn: str, *, left_out: str | None = None, reward: float | None = None) -> None:
        self.append({"event": "mark", "turn": turn, "left_out": left_out, "reward": reward})

    def ended(self, reason: str, now: float) -> None:
        self.append({"event": "ended", "reason": reason, "time": now})

    def append(self, event: dict[str, Any]) -> None:
        """All of a line or nothing of it: a file system that is full must not leave half a turn."""
        data = dumps(event) + b"\n"
        session = self.session
        with _recording(self.path):
            if os.write(self.descriptor, data) != len(data):
                os.ftruncate(self.descriptor, session.file_bytes)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            session.file_bytes += len(data)
            session.file_time = os.fstat(self.descriptor).st_mtime_ns


class SessionStore:
    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.directory = directory

    def path(self, session_id: str) -> Path:
        return self.directory / f"{session_id}.jsonl"

    def create(self, session: Session) -> None:
        about = {"id": session.id, "created": session.created, "metadata": dict(session.metadata)}
        with self._opened(session, os.O_CREAT | os.O_EXCL) as file:
            file.append({"event": "session", **about, "key_digest": session.key_digest})

    @contextmanager
    def writing(self, session: Session) -> Iterator[SessionFile]:
        """The session's file, which no other process writes meanwhile; what they have written is in the session. Raises
        NotRecorded, and RltoolError for a damaged file. No await within: a session is locked for microseconds."""
        with self._opened(session) as file:
            with _recording(file.path):
                fcntl.flock(file.descriptor, fcntl.LOCK_EX)
                size = os.fstat(file.descriptor).st_size
            if size > session.file_bytes:
                self._read_on(session, size)
                with _recording(file.path):
                    os.ftruncate(file.descriptor, session.file_bytes)  # of a line that a killed process was writing
            yield file

    def refresh(self, session: Session) -> bool:
        """Take over what other processes have written since; whether they have, or have touched it. RltoolError for a
        damaged file."""
        try:
            about = os.stat(self.path(session.id))
        except FileNotFoundError:
            return False
        is_news = (about.st_size, about.st_mtime_ns) != (session.file_bytes, session.file_time)
        if about.st_size > session.file_bytes:
            self._read_on(session, about.st_size)
        session.file_time = about.st_mtime_ns
        return is_news

    def touch(self, session: Session) -> None:
        """Tell other processes that the session is in use."""
        path = self.path(session.id)
        with contextlib.suppress(OSError):
            os.utime(path)
            session.file_time = os.stat(path).st_mtime_ns

    def ahead(self) -> float:
        """Seconds by which the times of files are ahead of this host's clock (clock_ahead)."""
        return clock_ahead(self.directory)

    def open_sessions(self) -> dict[str, float]:
        """Sessions that have not ended -> when their file was last written, by the clock of files."""
        files = ((file, file.stem) for file in self.directory.glob("*.jsonl"))
        found: dict[str, float] = {}
        for file, name in files:
            with contextlib.suppress(FileNotFoundError):  # another process may have removed it
                if SESSION_ID.fullmatch(name) and not _has_ended(file):
                    found[name] = file.stat().st_mtime
        return found

    def last_written(self, session_id: str) -> float | None:
        """By the clock of files; None where there is no file."""
        with contextlib.suppress(FileNotFoundError):
            return self.path(session_id).stat().st_mtime
        return None

    def remove_ended(self, before: float) -> int:
        """Remove the files of sessions that ended before that time (seconds since the epoch, by this host's clock); how
        many."""
        before, removed = before + self.ahead(), 0
        for file in self.directory.glob("*.jsonl"):
            with contextlib.suppress(FileNotFoundError):  # another gateway may have removed it
                if SESSION_ID.fullmatch(file.stem) and file.stat().st_mtime < before and _has_ended(file):
                    shutil.rmtree(self._pictures(file.stem), ignore_errors=True)
                    file.unlink()
                    removed += 1
        return removed

    def keep_picture(self, session_id: str, digest: str, data: bytes) -> None:
        """In any thread, of any process. Raises NotRecorded."""
        directory = self._pictures(session_id)
        begun = directory / f"{digest}.{uuid.uuid4().hex}"
        with _recording(directory / digest):
            directory.mkdir(exist_ok=True, mode=0o700)
            begun.write_bytes(data)
            begun.replace(directory / digest)

    def kept_pictures(self, session_id: str) -> set[str]:
        """Their digests."""
        directory = self._pictures(session_id)
        return {file.name for file in directory.iterdir() if not file.suffix} if directory.is_dir() else set()

    def picture(self, session_id: str, digest: str) -> bytes:
        """Raises RltoolError where it is gone."""
        file = self._pictures(session_id) / digest
        try:
            return file.read_bytes()
        except OSError as error:
            raise RltoolError(f"a picture of the session cannot be read: {file}: {error.strerror or error}") from error

    def _pictures(self, session_id: str) -> Path:
        return self.directory / f"{session_id}.pictures"

    def load(self, session_id: str) -> Session | None:
        """The session in its file, ended or not; None where there is none. RltoolError for a damaged file."""
        file = self.path(session_id)
        try:
            with file.open("rb") as opened:
                about = os.fstat(opened.fileno())
                first = opened.readline()
        except FileNotFoundError:
            return None
        if not first.endswith(b"\n"):
            return None
        used = about.st_mtime - self.ahead()
        with _blaming(file):
            event = loads(first)
            if event.pop("event") != "session":
                raise ValueError("its first line is no session's")
            session = Session(**event, last_used=used)
        session.file_bytes, session.file_time = len(first), about.st_mtime_ns
        self._read_on(session, about.st_size)
        return session

    def _read_on(self, session: Session, size: int) -> None:
        """Every line that has an end, behind those that the session has, in the first `size` bytes."""
        file = self.path(session.id)
        with file.open("rb") as opened:
            opened.seek(session.file_bytes)
            data = opened.read(size - session.file_bytes)
        end = data.rfind(b"\n") + 1
        with _blaming(file):
            _apply(session, data[:end].splitlines())
        session.file_bytes += end

    @contextmanager
    def _opened(self, session: Session, flags: int = 0) -> Iterator[SessionFile]:
        path = self.path(session.id)
        with _recording(path):
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | flags, 0o600)
        try:
            yield SessionFile(path, descriptor, session)
        finally:
            os.close(descriptor)  # and with it the lock


def _apply(session: Session, lines: Iterable[bytes]) -> None:
    for line in lines:
        event = loads(line)
        match event.pop("event"):
            case "turn":
                session.apply(TurnRecord.from_json(event))
            case "mark":
                session.mark(event["turn"], left_out=event["left_out"], reward=event["reward"])
            case "ended":
                session.ended = event["reason"]


@contextmanager
def _blaming(file: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, LookupError, TypeError, AssertionError) as error:
        raise RltoolError(f"{file} is damaged and cannot be read as a session: {error!r}; move it away") from error


@contextmanager
def _recording(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise NotRecorded(f"{file} cannot be written: {error.strerror or error}") from error


def _has_ended(file: Path) -> bool:
    with file.open("rb") as opened:
        size = opened.seek(0, os.SEEK_END)
        opened.seek(max(0, size - _TAIL))
        lines = opened.read().splitlines()
    return bool(lines) and lines[-1].startswith(b'{"event":"ended"')
