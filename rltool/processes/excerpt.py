"""What of a dead process' log an error message quotes: the exception that ended it, and the last lines.

A Python server that dies logs the cause once, then a page of what it leaked. The cause comes first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rltool.processes.logs import last_lines

SEARCHED_LINES = 600
"""Below the cause stand the tracebacks of processes that waited for the dead one, and leaks."""

_PREFIX = r"(?:\([\w ]+ pid=\d+\) )?(?:(?:ERROR|CRITICAL|WARNING|INFO) [\d: .-]+\[[\w.]+:\d+\] )?"
"""What vLLM puts before a line: the process, the level, the place."""
_EXCEPTION = re.compile(rf"^{_PREFIX}(?:\w+\.)*\w+(?:Error|Exception)\b(?::.*)?$")
_DEATH = re.compile(r"\bdied unexpectedly\b")
"""What vLLM logs of a worker that was killed, which could log nothing itself."""
_TRACEBACK = re.compile(rf"^{_PREFIX}Traceback \(most recent call last\):")
_CONSEQUENCE = re.compile(
    r"(?:EngineDeadError|BrokenPipeError|ConnectionResetError|CancelledError|TimeoutError|ProcessLookupError"
    r"|Engine core initialization failed|Worker failed with error|EngineCore encountered|Executor failed)"
)
"""Of processes that waited for the one that died."""
_NOISE = re.compile(
    r"^nanobind: |^ - (?:leaked |\.\.\. skipped)|^See https://nanobind|leaked (?:semaphore|shared_memory)"
    r"|^\s*warnings\.warn\('resource_tracker"
)
"""What the interpreter prints of the objects that a process left behind when it ended."""


def excerpt(log: Path, count: int) -> list[str]:
    """At most `count` lines: the end of the log without what was leaked, and, where the cause of the death stands
    further up, that in place of the upper half."""
    lines = [line for line in last_lines(log, SEARCHED_LINES) if not _NOISE.search(line)]
    while lines and not lines[-1].strip():
        lines.pop()
    end = lines[-count:]
    cause = _cause(lines)
    if cause is None or cause >= len(lines) - len(end):
        return end
    above = lines[_first_line(lines, cause, count // 2 - 1) : cause + 1]
    return [*above, "...", *end[len(above) + 1 :]]


def _cause(lines: Sequence[str]) -> int | None:
    """The line of the last exception, or death of a worker, that no other one explains."""
    exceptions = (_EXCEPTION.match(line) and not _CONSEQUENCE.search(line) for line in lines)
    found = [i for i, (line, first) in enumerate(zip(lines, exceptions, strict=True)) if first or _DEATH.search(line)]
    return found[-1] if found else None


def _first_line(lines: Sequence[str], cause: int, count: int) -> int:
    """Where the quotation of the cause begins: with its traceback, or as many lines above it as there is room for."""
    earliest = max(0, cause - count + 1)
    starts = [i for i in range(earliest, cause) if _TRACEBACK.match(lines[i])]
    return starts[-1] if starts else earliest
