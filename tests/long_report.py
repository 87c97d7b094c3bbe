"""What `make test-long` leaves: one JSON file and a table of all tests of one run, at one commit.

    {"commit": "...", "changed": false, "host": "...", "python": "3.11.7", "cores": 2,
     "began": "2026-01-31T01:00:00+00:00", "seconds": 7200.0, "totals": {"passed": 90},
     "tests": [{"id": "...", "outcome": "passed", "seconds": 61.2}]}

`changed`: the working tree was not the commit's. `seconds` of a test has its fixtures in it. outcome: passed, failed,
error (in a fixture), skipped, xfailed, xpassed.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import pytest


class LongReport:
    """Written after every test, so that a run that is cut off has left what it found."""

    def __init__(self, file: Path, root: Path) -> None:
        self.file, self.root = file, root
        self.began, self._clock = datetime.now(UTC), time.monotonic()
        self.tests: dict[str, dict[str, str | float]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found = self.tests.setdefault(report.nodeid, {"id": report.nodeid, "outcome": "passed", "seconds": 0.0})
        found["seconds"] = round(float(found["seconds"]) + report.duration, 2)
        outcome = outcome_of(report)
        if outcome != "passed" and found["outcome"] != "failed":
            found["outcome"] = outcome
        if report.when == "teardown":
            self.write()

    def as_json(self) -> dict:
        tests = list(self.tests.values())
        return {
            "commit": _git(self.root, "rev-parse", "HEAD"), "changed": bool(_git(self.root, "status", "--porcelain")),
            "host": platform.node(), "python": platform.python_version(), "cores": os.cpu_count(),
            "began": self.began.isoformat(timespec="seconds"), "seconds": round(time.monotonic() - self._clock, 1),
            "totals": dict(Counter(str(test["outcome"]) for test in tests)), "tests": tests,
        }  # fmt: skip

    def write(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(self.as_json(), indent=1) + "\n")
        self.file.with_suffix(".md").write_text(table(self.as_json()))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        self.write()
        terminalreporter.write_line(table(self.as_json()))


def outcome_of(report: pytest.TestReport) -> str:
    """Of one phase."""
    if hasattr(report, "wasxfail"):
        return "xfailed" if report.skipped else "xpassed"
    return "error" if report.failed and report.when != "call" else report.outcome


def table(found: dict) -> str:
    """Markdown: what ran where, a row for each file, and the tests that did not pass."""
    files: dict[str, Counter[str]] = {}
    seconds: Counter[str] = Counter()
    for test in found["tests"]:
        name = test["id"].partition("::")[0]
        files.setdefault(name, Counter())[test["outcome"]] += 1
        seconds[name] += test["seconds"]
    totals = ", ".join(f"{count} {outcome}" for outcome, count in sorted(found["totals"].items()))
    lines = [
        f"commit {found['commit']}{' and changes' if found['changed'] else ''}, {found['began']}, {found['cores']} "
        f"cores, Python {found['python']}: {totals} in {found['seconds'] / 60:.0f} minutes", "",
        "| file | result | seconds |", "|---|---|---|",
    ]  # fmt: skip
    for name, outcomes in files.items():
        said = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
        lines.append(f"| {name} | {said} | {seconds[name]:.0f} |")
    others = [test for test in found["tests"] if test["outcome"] not in ("passed", "xfailed")]
    lines += ["", *(f"- {test['outcome']}: {test['id']}" for test in others)]
    return "\n".join(lines).rstrip() + "\n"


def _git(root: Path, *words: str) -> str:
    """Empty where this is no checkout."""
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
