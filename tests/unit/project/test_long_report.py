"""The report of `make test-long`, of a run of pytest inside this one."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

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


@pytest.fixture
def commit(pytester):
    """Commits what is in the directory of the tests."""

    def run(*words: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *who, *words], cwd=pytester.path, check=True, capture_output=True)

    def commit() -> None:
        run("init")
        (pytester.path / ".gitignore").write_text("__pycache__\nrunpytest-*\n")
        run("add", "-A")
        run("commit", "--allow-empty", "-m", "tests")

    return commit


def outcomes(report: LongReport) -> dict[str, str]:
    return {test["id"].partition("::")[2]: test["outcome"] for test in json.loads(report.file.read_text())["tests"]}


def begun(pytester, tmp_path, *words: str, resume: bool = True) -> LongReport:
    report = LongReport(tmp_path / "long.json", pytester.path, resume=resume)
    pytester.inline_run("-p", "no:cacheprovider", *words, plugins=[report])
    return report


CUT_OFF = """
import os, pathlib
def test_a(): pass
def test_b(): assert False
def test_c():
    with pathlib.Path(os.environ["MADE"]).open("a+") as file:
        file.write("x")
        file.flush()
        file.seek(0)
        if file.read() == "x":
            os._exit(9)
def test_d(): pass
"""


def test_a_run_that_is_cut_off_is_resumed_without_what_passed(pytester, tmp_path, commit, monkeypatch):
    made = tmp_path / "made"
    pytester.makeconftest(
        "from pathlib import Path\nfrom tests.long_report import LongReport\ndef pytest_configure(config):\n"
        f"    config.pluginmanager.register(LongReport(Path({str(tmp_path / 'long.json')!r}), config.rootpath))\n"
    )
    pytester.makepyfile(test_some=CUT_OFF)
    commit()
    monkeypatch.setenv("MADE", str(made))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    assert pytester.runpytest_subprocess("-p", "no:cacheprovider").ret == 9
    report = LongReport(tmp_path / "long.json", pytester.path)
    assert outcomes(report) == {"test_a": "passed", "test_b": "failed"}
    found = json.loads(report.file.read_text())
    assert found["running"] == ["test_some.py::test_c"]
    assert found["not_run"] == ["test_some.py::test_c", "test_some.py::test_d"]
    assert "- cut off in test_some.py::test_c" in report.file.with_suffix(".md").read_text()

    pytester.makeconftest("")
    commit()  # other tests: what passed has to pass again
    assert outcomes(begun(pytester, tmp_path, "-k", "test_a")) == {"test_a": "passed"}
    assert made.read_text() == "x"
    resumed = begun(pytester, tmp_path, "-k", "not test_b")
    assert outcomes(resumed) == {"test_a": "passed", "test_c": "passed", "test_d": "passed"}
    assert made.read_text() == "xx"
    resumed = begun(pytester, tmp_path)
    assert outcomes(resumed)["test_b"] == "failed" and made.read_text() == "xx", "only what has not passed is run"
    assert json.loads(resumed.file.read_text())["not_run"] == [] and resumed.as_json()["running"] == []
    assert len(outcomes(begun(pytester, tmp_path, "-k", "test_a", resume=False))) == 1


def test_what_passed_in_a_changed_tree_is_run_again(pytester, tmp_path, commit):
    pytester.makepyfile(test_some="def test_a(): pass")
    commit()
    pytester.makepyfile(test_other="def test_b(): pass")
    begun(pytester, tmp_path)
    assert outcomes(begun(pytester, tmp_path, "-k", "test_b")) == {"test_b": "passed"}


def test_processes_leave_out_what_passed_before(pytester, tmp_path, commit):
    """Each test writes its name: two processes, a run of one file, then one of all."""
    report = f"LongReport(Path({str(tmp_path / 'long.json')!r}), config.rootpath, resume=True)"
    pytester.makeconftest(
        "from pathlib import Path\nfrom tests.long_report import WORKER_INPUT, LeftOut, LongReport\n"
        "def pytest_configure(config):\n    config.pluginmanager.register(LeftOut(config.workerinput[WORKER_INPUT]) if "
        f"hasattr(config, 'workerinput') else {report})\n"
    )
    made = tmp_path / "made"
    write = f"    with open({str(made)!r}, 'a') as file: file.write('%s')\n"
    pytester.makepyfile(
        test_one="def test_a():\n" + write % "a", test_two="def test_b():\n" + write % "b" + "    assert False\n"
    )
    commit()
    words = ["-p", "no:cacheprovider", "-n", "2", "--dist", "loadfile"]
    pytester.runpytest_inprocess(*words, "test_one.py")
    pytester.runpytest_inprocess(*words)
    found = json.loads((tmp_path / "long.json").read_text())
    assert {test["id"]: test["outcome"] for test in found["tests"]} == {
        "test_one.py::test_a": "passed", "test_two.py::test_b": "failed",
    }  # fmt: skip
    assert made.read_text() == "ab" and found["not_run"] == [] and found["running"] == []


def registers(pytester, *everywhere: str, once: tuple[str, ...] = ()) -> None:
    """Plugins of all processes, and of the one that reports."""
    pytester.makeconftest("\n".join([
        "from pathlib import Path", "from tests.long_report import FailuresAtOnce, LongReport, RunAgain",
        "def pytest_configure(config):",
        *(f"    config.pluginmanager.register({plugin})" for plugin in everywhere),
        "    if not hasattr(config, 'workerinput'):",
        *(f"        config.pluginmanager.register({plugin})" for plugin in once or ("object()",)),
    ]))  # fmt: skip


def test_a_failure_is_named_at_once(pytester):
    registers(pytester, once=("FailuresAtOnce(config)",))
    pytester.makepyfile(test_some=TESTS)
    for words in ([], ["-n", "1"]):
        result = pytester.runpytest_inprocess("-p", "no:cacheprovider", *words)
        result.stdout.fnmatch_lines(
            ["failed: test_some.py::test_bad", "error: test_some.py::test_error", "*= ERRORS =*"], consecutive=False
        )
        assert result.stdout.lines[-1].strip("= ").startswith("1 failed, 1 passed, 1 skipped, 1 xfailed, 1 error in ")


AGAIN = """
from pathlib import Path
import pytest

def made(what):
    with open("made", "a") as file:
        file.write(what)
    return Path("made").read_text().count(what)

@pytest.fixture(scope="session")
def engine():
    yield made("s")
    made("S")

@pytest.fixture(scope="module")
def job(engine):
    yield made("m")
    made("M")

def test_before(job): pass

def test_flaky(job):
    assert job == 2, "the first time"

def test_behind(job):
    assert job == 2

def test_always(job):
    assert not job, "every time"
"""


def test_a_test_that_fails_is_run_again_with_all_fixtures_anew_and_both_failures_are_in_the_log(pytester):
    report = "LongReport(Path('report.json'), config.rootpath)"
    registers(pytester, "RunAgain()", once=("FailuresAtOnce(config)", report))
    pytester.makepyfile(test_some=AGAIN)
    for words in ([], ["-n", "1"]):
        result = pytester.runpytest_inprocess("-p", "no:cacheprovider", *words)
        result.stdout.fnmatch_lines(
            [
                "run again: test_some.py::test_flaky", "run again: test_some.py::test_always",
                "failed: test_some.py::test_always", "*= FAILURES =*", "*AssertionError: every time",
                "*= first failure of test_some.py::test_flaky, in its call =*", "*AssertionError: the first time",
                "*= first failure of test_some.py::test_always, in its call =*", "*AssertionError: every time",
                "*= 1 failed, 3 passed, 2 rerun in *",
            ]
        )  # fmt: skip
        assert json.loads(Path("report.json").read_text())["totals"] == {"passed": 3, "failed": 1}
        assert Path("made").read_text() == "sm" + "MSsm" + "MSsm" + "MS"
        Path("made").unlink()


def test_fixtures_that_fail_to_end_before_the_second_try_are_an_error(pytester):
    registers(pytester, "RunAgain()")
    pytester.makepyfile(
        test_some="import pytest\n@pytest.fixture(scope='session')\ndef engine():\n    yield\n"
        "    raise OSError('still there')\ndef test_a(engine): assert False\ndef test_b(): pass"
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.stdout.fnmatch_lines(["*OSError: still there", "*= 1 passed, *1 error*"])


SLOW = """
import time
import pytest
tries = []

@pytest.mark.timeout(3)
def test_a():
    tries.append(1)
    time.sleep(1.6)
    assert len(tries) == 2

@pytest.mark.timeout(0.2)
def test_b():
    time.sleep(2)  # it passes where the limit does not hold
"""


def test_a_second_try_has_its_own_time(pytester):
    """Two of 1.6 s in a limit of three; and a test that is too slow is that in both."""
    registers(pytester, "RunAgain()")
    pytester.makepyfile(test_some=SLOW)
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=1, failed=1)
