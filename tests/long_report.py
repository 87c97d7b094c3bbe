"""What `make test-long` leaves: one JSON file, and the same as a table in Markdown beside it.

tests/conftest.py registers it under `--long-report FILE`, FailuresAtOnce always, and RunAgain under `--run-again`. With
`--long-resume` a run goes on where an earlier one of the same commit was cut off, or was given other files. The file:

commit, changed  the commit that was tested, and whether the working tree differed from it
host, python, cores
began, seconds   UTC, and how long its runs took together
running          the tests that a run was cut off in: one for each process of it
totals           outcome -> number of tests
tests            each with id, outcome (passed, failed, error, skipped, xfailed or xpassed) and seconds, set-up and
                 teardown included
not_run          ids of those that were chosen and have no outcome
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
from typing import Any

import pytest
import pytest_timeout
from _pytest.runner import runtestprotocol

AGAIN = "rerun"
"""Outcome of a phase that failed in a test that is then run once more."""
DONE = ("passed", "xfailed")
WORKER_INPUT = "long_report_done"
"""Where a process of xdist's finds what it leaves out."""


class LongReport:
    """Written after every test, so that a run that is cut off has left what it found."""

    def __init__(self, file: Path, root: Path, *, resume: bool = False) -> None:
        self.file, self.root = file, root
        self.began, self._clock = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
        self.commit, self.changed = _git(root, "rev-parse", "HEAD"), bool(_git(root, "status", "--porcelain"))
        self.tests: dict[str, dict[str, str | float]] = {}
        self.chosen: dict[str, None] = {}
        self.running: dict[str, None] = {}
        self._before = 0.0
        if resume:
            self._resume()

    def _resume(self) -> None:
        found = json.loads(self.file.read_text()) if self.file.exists() else {}
        if self.changed or found.get("changed") or found.get("commit") != self.commit or not self.commit:
            return  # what passed then says nothing of this tree
        self.began, self._before = found["began"], found["seconds"]
        self.tests = {test["id"]: test for test in found["tests"]}
        self.chosen = dict.fromkeys([*self.tests, *found["not_run"]])

    def done(self) -> list[str]:
        return [name for name, test in self.tests.items() if test["outcome"] in DONE]

    @pytest.hookimpl(trylast=True)  # -m and -k have chosen
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        self.chosen |= dict.fromkeys(item.nodeid for item in items)
        leave_out(self.done(), config, items)
        self.write()

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """With xdist the workers collect; they deselect what has passed before."""
        node.workerinput[WORKER_INPUT] = self.done()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.chosen |= dict.fromkeys(ids)
        self.write()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.tests.pop(nodeid, None)
        self.running[nodeid] = None
        self.write()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found = self.tests.setdefault(report.nodeid, {"id": report.nodeid, "outcome": "passed", "seconds": 0.0})
        found["seconds"] = round(float(found["seconds"]) + report.duration, 2)
        outcome = outcome_of(report)
        if outcome == AGAIN:
            return
        if outcome != "passed" and found["outcome"] != "failed":
            found["outcome"] = outcome
        if report.when == "teardown":
            self.running.pop(report.nodeid, None)
            self.write()

    def as_json(self) -> dict:
        tests = [test for test in self.tests.values() if test["id"] not in self.running]
        done = {test["id"] for test in tests}
        return {
            "commit": self.commit, "changed": self.changed, "host": platform.node(),
            "python": platform.python_version(), "cores": os.cpu_count(), "began": self.began,
            "seconds": round(self._before + time.monotonic() - self._clock, 1), "running": list(self.running),
            "totals": dict(Counter(str(test["outcome"]) for test in tests)), "tests": tests,
            "not_run": [name for name in self.chosen if name not in done],
        }  # fmt: skip

    def write(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        found = self.as_json()
        for file, text in (
            (self.file, json.dumps(found, indent=1) + "\n"),
            (self.file.with_suffix(".md"), table(found)),
        ):
            whole = file.with_name(f".{file.name}.new")  # one that is cut off here leaves the one before
            whole.write_text(text)
            whole.replace(file)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        self.write()
        terminalreporter.write_line(table(self.as_json()))


class LeftOut:
    """In a process of xdist's: the tests that its report has as done."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        leave_out(self.names, config, items)


def leave_out(names: list[str], config: pytest.Config, items: list[pytest.Item]) -> None:
    done = set(names)
    left_out = [item for item in items if item.nodeid in done]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.nodeid not in done]


class FailuresAtOnce:
    """Names a test as soon as it has failed; pytest itself does at its end. `-v` names all. Why a test was run again is
    quoted at the end, before the summary: pytest drops it."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    @pytest.hookimpl(trylast=True)  # behind its letter
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        again = report.outcome == AGAIN
        if (report.failed or again) and reporter is not None and reporter.verbosity <= 0:
            reporter.ensure_newline()
            writer = self.config.get_terminal_writer()
            if writer.width_of_current_line:  # letters of xdist's, which that knows nothing of
                writer.line()
            what = "run again" if again else "failed" if report.when == "call" else "error"
            reporter.write_line(f"{what}: {report.nodeid}")
            reporter.flush()

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        return (AGAIN, "R", "RERUN") if report.outcome == AGAIN else None

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for report in terminalreporter.stats.get(AGAIN, []):
            terminalreporter.write_sep("=", f"first failure of {report.nodeid}, in its {report.when}", yellow=True)
            terminalreporter.write_line(report.longreprtext)
            for title, text in report.sections:
                terminalreporter.write_sep("-", title)
                terminalreporter.write_line(text.rstrip())


class RunAgain:
    """Runs a test that failed once more, in the same process, with fixtures of every scope made anew: an engine or a
    run's directory that the first try has used would fail the second. Of the first try the phase that failed alone is
    reported, with the outcome "rerun"."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        hook = item.ihook
        hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        failed = [report for report in reports if report.failed]
        if failed:
            for report in failed:
                report.outcome = AGAIN  # type: ignore[assignment]
                hook.pytest_runtest_logreport(report=report)
            _start_clock(item)
            try:
                item.session._setupstate.teardown_exact(None)  # what the module, the package and the session share
            except (Exception, pytest.fail.Exception) as error:
                reports = [_in_teardown(item, error)]
            else:
                reports = runtestprotocol(item, nextitem=nextitem, log=False)
        for report in reports:
            hook.pytest_runtest_logreport(report=report)
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True


def _start_clock(item: pytest.Item) -> None:
    """pytest-timeout has one for both tries, which the first has used."""
    item.ihook.pytest_timeout_cancel_timer(item=item)
    settings = pytest_timeout._get_item_settings(item)
    if settings.timeout and settings.timeout > 0:
        item.ihook.pytest_timeout_set_timer(item=item, settings=settings)


def _in_teardown(item: pytest.Item, error: BaseException) -> pytest.TestReport:
    """What fixtures of a wider scope raised when they ended."""
    call = pytest.CallInfo(None, pytest.ExceptionInfo.from_exception(error), 0, 0, 0, "teardown", _ispytest=True)
    return pytest.TestReport.from_item_and_call(item, call)


def outcome_of(report: pytest.TestReport) -> str:
    """Of one phase."""
    if hasattr(report, "wasxfail"):
        return "xfailed" if report.skipped else "xpassed"
    return "error" if report.failed and report.when != "call" else report.outcome


def table(found: dict) -> str:
    """Markdown: what ran where, a row for each file, and the tests that did not pass."""
    files: dict[str, Counter[str]] = {}
    seconds: Counter[str] = Counter()
    for test in [*found["tests"], *({"id": name, "outcome": "not run", "seconds": 0} for name in found["not_run"])]:
        name = test["id"].partition("::")[0]
        files.setdefault(name, Counter())[test["outcome"]] += 1
        seconds[name] += test["seconds"]
    totals = [f"{count} {outcome}" for outcome, count in sorted(found["totals"].items())]
    totals += [f"{len(found['not_run'])} not run"] if found["not_run"] else []
    lines = [
        f"commit {found['commit']}{' and changes' if found['changed'] else ''}, {found['began']}, {found['cores']} "
        f"cores, Python {found['python']}: {', '.join(totals)} in {found['seconds'] / 60:.0f} minutes", "",
        "| file | result | seconds |", "|---|---|---|",
    ]  # fmt: skip
    for name, outcomes in files.items():
        said = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
        lines.append(f"| {name} | {said} | {seconds[name]:.0f} |")
    others = [test for test in found["tests"] if test["outcome"] not in DONE]
    lines += ["", *(f"- {test['outcome']}: {test['id']}" for test in others)]
    lines += [f"- cut off in {name}" for name in found["running"]]
    return "\n".join(lines).rstrip() + "\n"


def _git(root: Path, *words: str) -> str:
    """Empty where this is no checkout."""
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
