"""Sessions on disk: one file of JSON lines each, below the run's directory, written before the agent gets its answer.

    {"event": "session", ...}    its first line
    {"event": "turn", ...}       trajectory.TurnRecord
    {"event": "mark", ...}       what became of a turn (Session.mark)
    {"event": "ended", ...}      its last line

What a killed gateway has written stays; a line that it was writing is cut off when the session is opened again.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from pathlib import Path
from typing import Any

from rltool.errors import RltoolError
from rltool.gateway.errors import NotRecorded
from rltool.gateway.session import Session
from rltool.gateway.trajectory import TurnRecord

SESSION_ID = re.compile(r"[0-9a-f]{32}")
_TAIL = 4096
"""Bytes from the end of a file in which its last line stands, if that is an `ended`."""


class SessionStore:
    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.directory = directory

    def path(self, session_id: str) -> Path:
        return self.directory / f"{session_id}.jsonl"

    def create(self, session: Session) -> None:
        about = {"id": session.id, "created": session.created, "metadata": dict(session.metadata)}
        self._append(session.id, {"event": "session", **about, "key_digest": session.key_digest}, new=True)

    def turn(self, session_id: str, record: TurnRecord) -> None:
        self._append(session_id, {"event": "turn", **record.to_json()})

    def mark(self, session_id: str, turn: str, *, left_out: str | None = None, reward: float | None = None) -> None:
        self._append(session_id, {"event": "mark", "turn": turn, "left_out": left_out, "reward": reward})

    def ended(self, session_id: str, reason: str, time: float) -> None:
        self._append(session_id, {"event": "ended", "reason": reason, "time": time})

    def open_sessions(self) -> dict[str, float]:
        """Sessions that have not ended -> when their file was last written, in seconds since the epoch."""
        files = ((file, file.stem) for file in self.directory.glob("*.jsonl"))
        return {
            name: file.stat().st_mtime for file, name in files if SESSION_ID.fullmatch(name) and not _has_ended(file)
        }

    def remove_ended(self, before: float) -> int:
        """Remove the files of sessions that ended before that time (seconds since the epoch); how many."""
        removed = 0
        for file in self.directory.glob("*.jsonl"):
            with contextlib.suppress(FileNotFoundError):  # another gateway may have removed it
                if SESSION_ID.fullmatch(file.stem) and file.stat().st_mtime < before and _has_ended(file):
                    file.unlink()
                    removed += 1
        return removed

    def load(self, session_id: str) -> Session | None:
        """The session in its file, ended or not; None where there is none. RltoolError for a damaged file."""
        file = self.path(session_id)
        try:
            lines = _complete_lines(file)
            session: Session | None = None
            for line in lines:
                event = json.loads(line)
                match event.pop("event"):
                    case "session":
                        session = Session(**event, last_used=file.stat().st_mtime)
                    case "turn":
                        assert session is not None
                        session.apply(TurnRecord.from_json(event))
                    case "mark":
                        assert session is not None
                        session.mark(event["turn"], left_out=event["left_out"], reward=event["reward"])
                    case "ended":
                        assert session is not None
                        session.ended = event["reason"]
        except FileNotFoundError:
            return None
        except (ValueError, LookupError, TypeError, AssertionError) as error:
            raise RltoolError(f"{file} is damaged and cannot be read as a session: {error!r}; move it away") from error
        return session

    def _append(self, session_id: str, event: dict[str, Any], *, new: bool = False) -> None:
        """All of a line or nothing of it: a file system that is full must not leave half a turn."""
        data = (json.dumps(event, separators=(",", ":")) + "\n").encode()
        file = self.path(session_id)
        try:
            descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | (os.O_CREAT | os.O_EXCL if new else 0), 0o600)
            try:
                before = os.fstat(descriptor).st_size
                if os.write(descriptor, data) != len(data):
                    os.ftruncate(descriptor, before)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(descriptor)
        except OSError as error:
            raise NotRecorded(f"{file} cannot be written: {error.strerror or error}") from error


def _complete_lines(file: Path) -> list[bytes]:
    """Every line that has an end; what follows the last of them is removed from the file."""
    data = file.read_bytes()
    end = data.rfind(b"\n") + 1
    if end < len(data):
        os.truncate(file, end)
    return data[:end].splitlines()


def _has_ended(file: Path) -> bool:
    with file.open("rb") as opened:
        size = opened.seek(0, os.SEEK_END)
        opened.seek(max(0, size - _TAIL))
        lines = opened.read().splitlines()
    return bool(lines) and lines[-1].startswith(b'{"event":"ended"')
