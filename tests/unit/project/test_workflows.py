"""The workflows of .github run make targets and files that are there, and together what .ci/run runs."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[3]
WORKFLOWS = {file.stem: yaml.safe_load(file.read_text()) for file in (ROOT / ".github/workflows").glob("*.yml")}
MAKEFILE = (ROOT / "Makefile").read_text()
AS_ROOT = 'sudo -E env "PATH=$PATH" '
TARGETS = set(re.findall(r"^([a-z0-9-]+):", MAKEFILE, re.MULTILINE))


def runs(workflow: str, *, as_written: bool = False) -> list[str]:
    """Command lines of all its jobs, once for each value of a job's matrix; without AS_ROOT."""
    found = []
    for job in WORKFLOWS[workflow]["jobs"].values():
        matrix: dict[str, list[Any]] = job.get("strategy", {}).get("matrix", {})
        assert len(matrix) <= 1
        [(name, values)] = matrix.items() or [("", [None])]
        for value in values:
            for step in job["steps"]:
                lines = step.get("run", "").replace(f"${{{{ matrix.{name} }}}}", str(value)).splitlines()
                found += [line if as_written else line.removeprefix(AS_ROOT) for line in lines if line]
    return found


def made(line: str) -> tuple[str, str]:
    """(target, ARGS) of a command line that begins with make."""
    words = shlex.split(line)
    arguments = [word.removeprefix("ARGS=") for word in words[2:] if word.startswith("ARGS=")]
    return words[1], arguments[0] if arguments else ""


def test_every_line_runs_a_make_target_or_a_program_that_is_there():
    for workflow in WORKFLOWS:
        for line in runs(workflow):
            program, *rest = shlex.split(line)
            if program == "make":
                assert rest[0] in TARGETS, f"{workflow}: {line}"
            elif program != "ls":  # of the wheel that a target has built
                assert (ROOT / program).is_file(), f"{workflow}: {line}"
    used = {made(line)[0] for workflow in WORKFLOWS for line in runs(workflow) if line.startswith("make ")}
    assert used >= {"lint", "docs", "unit", "test", "test-long", "test-gpu", "wheel"}


def test_the_makefile_runs_files_that_are_there():
    recipes = "\n".join(line for line in MAKEFILE.splitlines() if line.startswith("\t"))
    named = re.findall(r"(?:^|\s)((?:requirements|tests|docs)/[\w./-]+\.(?:py|sh|txt))", recipes, re.MULTILINE)
    assert {"requirements/setup.sh", "requirements/docs.txt", "tests/sglang_cpu/setup.sh"} <= set(named)
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_every_step_is_a_command_or_an_action_at_a_version():
    for workflow in WORKFLOWS.values():
        assert workflow["permissions"] == {"contents": "read"}
        for job in workflow["jobs"].values():
            assert job["timeout-minutes"] and job["runs-on"]
            for step in job["steps"]:
                assert ("run" in step) != ("uses" in step), step
                assert "uses" not in step or re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step["uses"]), step
                for pattern in (step.get("with") or {}).get("cache-dependency-path", "").split():
                    assert list(ROOT.glob(pattern)), pattern


def test_the_jobs_of_a_change_are_together_what_ci_runs():
    made_by_ci = re.findall(r"^(?:exec )?make (.+?)(?: ARGS=.*)?$", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    ci = [word for line in made_by_ci for word in line.split() if not re.match(r"-|\d|venv", word)]
    assert ci == ["lint", "docs", "test"]
    lines = [made(line) for line in runs("tests")]
    assert {target for target, _ in lines} == {*ci, "unit"}
    [unit] = re.findall(r"^unit:.*\n\t.*-m pytest (.*) \$\(ARGS\)$", MAKEFILE, re.MULTILINE)
    parts = [unit.split()]
    for target, arguments in lines:
        if target == "test":
            shown = subprocess.run(
                ["bash", "-c", f'echo "{arguments}"'], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30
            )
            parts.append(shown.stdout.split())
    everything = {file.relative_to(ROOT).as_posix() for file in (ROOT / "tests").rglob("test_*.py")}
    run = [name for part in parts for name in part]
    left_out = {name for name in everything if not any(Path(name).is_relative_to(part) for part in run)}
    assert {Path(name).parent.as_posix() for name in left_out} == {"tests/gpu"}, "a GPU's alone, which gpu.yml runs"
    assert len(run) == len(set(run)), "nothing is run twice"


def test_jobs_with_tests_of_several_hosts_run_as_root():
    """Of which these tests make network namespaces; without it they fail in CI, where nothing is skipped."""
    lines = [line for workflow in ("tests", "nightly") for line in runs(workflow, as_written=True)]
    need_it = [line for line in lines if made(line.removeprefix(AS_ROOT))[0] in ("test", "test-long", "test-312")]
    assert len(need_it) == 4 + 2 and all(line.startswith(AS_ROOT) for line in need_it)


def test_no_workflow_names_a_host():
    files = sorted((ROOT / ".github").rglob("*.yml"))
    assert not [file.name for file in files if "://" in file.read_text()]
