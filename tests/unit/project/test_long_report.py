"""The report of `make test-long`, of a run of pytest inside this one."""

from __future__ import annotations

import json

from tests.long_report import LongReport

TESTS = """
import pytest

@pytest.fixture
def broken():
    raise RuntimeError

def test_good(): pass
def test_bad(): assert False
def test_error(broken): pass
def test_skipped(): pytest.skip("no GPU")
@pytest.mark.xfail
def test_expected(): assert False
"""


def test_every_outcome_is_in_the_file_and_what_did_not_pass_is_named_in_the_table(pytester, tmp_path):
    pytester.makepyfile(test_some=TESTS)
    report = LongReport(tmp_path / "build" / "long.json", pytester.path)
    pytester.inline_run("-p", "no:cacheprovider", plugins=[report])
    found = json.loads(report.file.read_text())
    assert {test["id"].partition("::")[2]: test["outcome"] for test in found["tests"]} == {
        "test_good": "passed", "test_bad": "failed", "test_error": "error", "test_skipped": "skipped",
        "test_expected": "xfailed",
    }  # fmt: skip
    assert found["totals"] == {"passed": 1, "failed": 1, "error": 1, "skipped": 1, "xfailed": 1}
    assert found["commit"] == "" and all(test["seconds"] >= 0 for test in found["tests"])
    table = report.file.with_suffix(".md").read_text()
    assert "| test_some.py | 1 error, 1 failed, 1 passed, 1 skipped, 1 xfailed |" in table
    named = [line for line in table.splitlines() if line.startswith("- ")]
    assert named == [
        "- failed: test_some.py::test_bad", "- error: test_some.py::test_error",
        "- skipped: test_some.py::test_skipped",
    ]  # fmt: skip
