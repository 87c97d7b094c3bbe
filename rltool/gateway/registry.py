"""The sessions of a gateway: opened, found, ended, and taken up again after a restart.

Several processes may serve those of one directory; what one has recorded the others read before they use the session.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from rltool.errors import RltoolError
from rltool.gateway.errors import NotFound, TooMany, Unauthorized
from rltool.gateway.session import Session
from rltool.gateway.store import SESSION_ID, SessionStore

_KEY_BYTES = 32


class Sessions:
    """store: their files; clock: seconds since the epoch; on_end: called with the id of a session that has ended.
    Sessions of an earlier gateway are read from disk when asked for."""

    def __init__(
        self,
        store: SessionStore,
        *,
        max_sessions: int,
        idle_timeout: float,
        on_end: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.store, self._most, self._idle, self._clock = store, max_sessions, idle_timeout, clock
        self._on_end = on_end
        self._living: dict[str, Session] = {}
        self._asleep = store.open_sessions()
        """Those on disk not yet asked for, and when they were last written, by the clock of files."""
        self.counts: Counter[str] = Counter(resumable=len(self._asleep))
        """Events since the start: opened, ended, timed_out; resumable: found at the start."""

    @property
    def open(self) -> int:
        return len(self._living) + len(self._asleep)

    @property
    def turns_in_progress(self) -> int:
        return sum(session.in_progress for session in self._living.values())

    def create(self, metadata: Mapping[str, Any]) -> tuple[Session, str]:
        """A session and its key, which is kept nowhere: its digest is. Raises TooMany."""
        if self.open >= self._most:
            raise TooMany(f"{self._most} sessions are open (--max-sessions): end some with DELETE /sessions/ID")
        key = f"sk-rltool-{secrets.token_urlsafe(_KEY_BYTES)}"
        now = self._clock()
        session = Session(uuid.uuid4().hex, _digest(key), now, metadata, last_used=now)
        self.store.create(session)
        self._living[session.id] = session
        self.counts["opened"] += 1
        return session, key

    def find(self, session_id: str) -> Session:
        """An open session, with all that was recorded of it. Raises NotFound, with a message of its own for one that
        has ended."""
        session = self.look(session_id)
        if session.ended is not None:
            raise NotFound(f"session {session_id} has ended: {session.ended}")
        self._asleep.pop(session_id, None)
        self._living[session_id] = session
        return session

    def look(self, session_id: str) -> Session:
        """A session, open or ended; an ended one is read from disk each time. Raises NotFound."""
        living = self._living.get(session_id)
        if living is not None:
            self._refresh(living)
            return living
        session = self.store.load(session_id) if SESSION_ID.fullmatch(session_id) else None
        if session is None:
            raise NotFound(f"there is no session {session_id[:64]!r} in this run: POST /sessions opens one")
        return session

    def touch(self, session: Session) -> None:
        """Mark it as used; in its file, too, before other processes would take it for idle."""
        now = self._clock()
        if now - session.last_used > self._idle / 3:
            self.store.touch(session)
        session.last_used = now

    def end(self, session: Session, reason: str) -> None:
        """Its record stays on disk."""
        with self.store.writing(session) as file:
            if session.ended is None:
                file.ended(reason, self._clock())
                session.ended = reason
                self.counts["ended"] += 1
        self._forget(session)

    def _forget(self, session: Session) -> None:
        self._living.pop(session.id, None)
        self._asleep.pop(session.id, None)
        self._on_end(session.id)

    def _refresh(self, session: Session) -> bool:
        """Whether another process has used it since."""
        is_news = self.store.refresh(session)
        if session.ended is not None:
            self._forget(session)
        return is_news

    def remove_ended(self, keep: float) -> int:
        """Remove the files of sessions that ended that many seconds ago; how many. Safe in any thread."""
        return self.store.remove_ended(self._clock() - keep)

    def expire(self) -> int:
        """End sessions unused for the idle time-out; how many. What cannot be read, such as a damaged
        file, holds up no other: RltoolError names all such, at the end."""
        oldest = self._clock() - self._idle
        for session in self._living.values():
            if session.in_progress:
                self.touch(session)
        late = [s for s in self._living.values() if s.last_used < oldest and not s.in_progress]
        asleep, failed, ended = list[str](), list[str](), 0
        try:
            before = oldest + self.store.ahead() if self._asleep else oldest
            asleep = [name for name, written in self._asleep.items() if written < before]
        except OSError as error:
            failed.append(str(error))
        for late_one in (*late, *asleep):
            try:
                if isinstance(late_one, str):
                    known = self._asleep.pop(late_one)  # first: a damaged file must not come up each time
                    written = self.store.last_written(late_one)
                    if written is None:  # another process has ended it, long ago
                        continue
                    if written != known:
                        self._asleep[late_one] = written
                        continue
                    late_one = self.look(late_one)
                elif self._refresh(late_one) and late_one.ended is None:
                    late_one.last_used = self._clock()
                if late_one.ended is None and late_one.last_used < oldest:
                    self.end(late_one, f"timed out after {self._idle:g} s without a turn")
                    ended += 1
            except (RltoolError, OSError) as error:
                failed.append(str(error))
        self.counts["timed_out"] += ended
        if failed:
            raise RltoolError("; ".join(failed))
        return ended


def demand_key(session: Session, given: str | None) -> None:
    """Raises Unauthorized unless `given` is the key of this session."""
    if given is None or not hmac.compare_digest(_digest(given), session.key_digest):
        raise Unauthorized("the key is missing, or is not this session's: POST /sessions gave it")


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
