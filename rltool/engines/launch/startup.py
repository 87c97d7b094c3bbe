"""What an engine that does not serve yet is doing, by its own log.

The lines are those of vLLM 0.29 to 0.33 and SGLang 0.5.17 to 0.5.23. Where one changes, an engine stays longer in the
phase before: nothing but what is shown depends on them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rltool.processes.logs import Tail


@dataclass(frozen=True)
class Phase:
    """done: the share of it that is over, 0 to 1; None: not known."""

    what: str
    done: float | None = None

    def __str__(self) -> str:
        return self.what if self.done is None else f"{self.what} {self.done:.0%}"


Show = Callable[[Mapping[str, Phase]], None]
"""Gets the engines that do not serve yet, by role, as often as their logs are read."""

_BAR = r"[^|]*?:\s+(\d{1,3})%"
_PHASES: tuple[tuple[str, str], ...] = (
    ("loading weights", rf"Starting to load model |Load weight begin|(?:Loading|Multi-thread loading) {_BAR}"),
    ("compiling", r"Starting torch\.compile|vLLM's torch\.compile|Dynamo bytecode transform|Compiling a graph for "),
    ("measuring memory", r"torch\.compile (?:took|takes) "),
    ("allocating the KV cache", r"KV cache size: |KV Cache is allocated|Memory pool end"),
    ("capturing graphs", rf"Capture \S.* graph begin|Capturing (?:CUDA graphs|batches) {_BAR}"),
    ("starting the server", r"init engine \(profile|max_total_num_tokens=\d+, |Starting vLLM |Started server process"),
    ("answering its first request", r"Application startup complete|The server is fired up"),
)
"""In the order in which engines go through them, and what is logged at the beginning of each or, in group 1, how many
percent of it are done."""
_PATTERNS = tuple((what, re.compile(pattern)) for what, pattern in _PHASES)
STARTING = Phase("starting")
_ORDER = {what: place for place, what in enumerate([STARTING.what, *(what for what, _ in _PHASES)])}
_LONGEST = 500  # a line of all arguments is much longer, and holds no progress


def phase_of(line: str) -> Phase | None:
    """The phase that a line of an engine's log belongs to; None: no phase. Pure."""
    for what, pattern in reversed(_PATTERNS):
        found = pattern.search(line, 0, _LONGEST)
        if found is not None:
            percent = next(filter(None, found.groups()), None)
            return Phase(what, None if percent is None else min(int(percent), 100) / 100)
    return None


def advance(now: Phase, line: str) -> Phase:
    """The phase after this line. Never an earlier one: workers of one engine write to one log, each at its own pace,
    and a draft model is loaded after the model. Pure."""
    found = phase_of(line)
    if found is None or _ORDER[found.what] < _ORDER[now.what] or found == Phase(now.what):
        return now
    return found


class StartupLogs:
    """logs: role -> the log of an engine that is starting, which nothing has written before."""

    def __init__(self, logs: Mapping[str, Path]) -> None:
        # tqdm ends what it writes by a carriage return.
        self._tails = {role: Tail(path, whole=True, ends=rb"[\r\n]") for role, path in logs.items()}
        self._phases = dict.fromkeys(logs, STARTING)

    def phases(self) -> dict[str, Phase]:
        for role, tail in self._tails.items():
            for line in tail.lines():
                self._phases[role] = advance(self._phases[role], line)
        return dict(self._phases)

    def serves(self, role: str) -> None:
        """It is not shown any more."""
        self._tails.pop(role, None)
        self._phases.pop(role, None)


def describe(phases: Mapping[str, Phase]) -> str:
    """engine-0, engine-1: loading weights 50%; engine-2: compiling."""
    together: dict[str, list[str]] = {}
    for role, phase in phases.items():
        together.setdefault(str(phase), []).append(role)
    return "; ".join(f"{', '.join(roles)}: {phase}" for phase, roles in together.items())


def in_lines(log: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> Show:
    """A line for each new phase, of all engines that have come to it together."""
    shown: dict[str, str] = {}
    began: dict[str, float] = {}

    def show(phases: Mapping[str, Phase]) -> None:
        new: dict[str, Phase] = {}
        for role, phase in phases.items():
            began.setdefault(role, clock())
            if shown.setdefault(role, STARTING.what) != phase.what:
                new[role] = Phase(phase.what)
                shown[role] = phase.what
        if new:
            log(f"{describe(new)} ({clock() - min(began[role] for role in new):.0f} s)")

    return show
