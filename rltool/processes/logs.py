"""Reading the logs of processes: the last lines of one, and several at once as they grow."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from rltool.errors import UsageError

_BLOCK = 64 * 1024


def last_lines(path: Path, count: int) -> list[str]:
    """The last `count` lines, without line ends; fewer if the file is shorter, none if it is missing.

    Reads from the end, so the size of the file does not matter. Bytes that are not UTF-8 are replaced.
    """
    if count <= 0 or not path.exists():
        return []
    with path.open("rb") as file:
        position = file.seek(0, 2)
        data = b""
        # One newline more than lines: the last line usually ends in one.
        while position > 0 and data.count(b"\n") <= count:
            step = min(_BLOCK, position)
            position = file.seek(position - step)
            data = file.read(step) + data
    return data.decode("utf-8", "replace").removesuffix("\n").split("\n")[-count:] if data else []


def follow(
    files: Mapping[str, Path],
    *,
    lines: int = 0,
    poll: float = 0.2,
    sleep: Callable[[float], None] = time.sleep,
    go_on: Callable[[], bool] = lambda: True,
) -> Iterator[tuple[str, str]]:
    """(role, line) of every file: first its last `lines`, then each line when it is complete, until go_on() is false.

    When go_on turns false, what was written until then is still yielded, an unfinished last line too.
    """
    tails: dict[str, Tail] = {}
    for role, path in files.items():
        tails[role] = Tail(path)
        yield from ((role, line) for line in last_lines(path, lines))
    while True:
        active = go_on()
        for role, tail in tails.items():
            yield from ((role, line) for line in tail.lines(unfinished=not active))
        if not active:
            return
        sleep(poll)


class Tail:
    """What is appended to a file from now on, or `whole`; it need not be there yet. ends: pattern of what ends a
    line."""

    def __init__(self, path: Path, *, whole: bool = False, ends: bytes = rb"\n") -> None:
        self._path, self._ends = path, re.compile(ends)
        self._position = path.stat().st_size if path.exists() and not whole else 0
        self._rest = b""

    def lines(self, *, unfinished: bool = False) -> list[str]:
        """Those that are complete since the last call, without their ends. unfinished: and what was begun."""
        try:
            with self._path.open("rb") as file:
                if file.seek(0, 2) < self._position:
                    self._position = 0  # it was cut (rltool.processes.output)
                file.seek(self._position)
                fresh = file.read()
        except FileNotFoundError:
            fresh = b""
        self._position += len(fresh)
        *complete, self._rest = self._ends.split(self._rest + fresh)
        if unfinished and self._rest:
            complete.append(self._rest)
        return [line.decode("utf-8", "replace") for line in complete]


def log_files(logs_dir: Path) -> dict[str, Path]:
    """role -> its newest log, of all attempts below a run's logs directory."""
    files: dict[str, Path] = {}
    for attempt in sorted(logs_dir.glob("attempt_*"), key=lambda path: int(path.name.removeprefix("attempt_"))):
        files.update({log.stem: log for log in sorted(attempt.glob("*.log"))})
    return files


def choose_logs(logs_dir: Path, role: str | None) -> dict[str, Path]:
    """The logs to show: one role's, or all. Raises UsageError if there is none."""
    files = log_files(logs_dir)
    if not files:
        raise UsageError(f"there are no logs in {logs_dir}: nothing was started in this run yet")
    if role is None:
        return files
    if role not in files:
        raise UsageError(f"no log of {role!r}; this run has logs of: {', '.join(files)}")
    return {role: files[role]}
