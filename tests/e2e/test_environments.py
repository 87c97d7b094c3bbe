"""The two environments of the tests are what requirements/ says, package by package: their constraints are the lock."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.e2e.engines import sglang_python

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SETUP = {
    "constraints.txt": ROOT / "requirements" / "setup.sh",
    "sglang-cpu.txt": ROOT / "tests" / "sglang_cpu" / "setup.sh",
}
OF_PYTHON = {"pip", "setuptools", "rltool"}
"""What an environment is born with, and the checkout itself."""

INSTALLED = (
    "import importlib.metadata, json; "
    "print(json.dumps({found.name: found.version for found in importlib.metadata.distributions()}))"
)


def pins(text: str) -> dict[str, str]:
    """name==version, as they stand in files of requirements and in command lines, for this Python alone."""
    found = re.findall(r"^(?!#)\s*(\S+==[^;\s]+)(?:;\s*(.+))?$", text.replace(" ", "\n"), re.MULTILINE)
    parsed = [Requirement(pin) for pin, _ in found]
    return {canonicalize_name(each.name): next(iter(each.specifier)).version for each in parsed}


def lock(name: str) -> dict[str, str]:
    lines = [line for line in (ROOT / "requirements" / name).read_text().splitlines() if not line.startswith("#")]
    held = [Requirement(line) for line in lines if line]
    return {
        canonicalize_name(each.name): next(iter(each.specifier)).version
        for each in held
        if each.marker is None or each.marker.evaluate()
    }


def by_command(name: str) -> dict[str, str]:
    """What is installed besides: by the script itself, and by `make test-long`."""
    [nixl] = re.findall(r"^NIXL = (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return pins(SETUP[name].read_text()) | pins(nixl)


def differences(python: Path | str, name: str) -> list[str]:
    done = subprocess.run([python, "-c", INSTALLED], capture_output=True, text=True, check=True, timeout=60)
    installed = {canonicalize_name(key): version for key, version in json.loads(done.stdout).items()}
    held, besides = lock(name), by_command(name)
    wrong = []
    for package in sorted((installed.keys() | held.keys()) - OF_PYTHON):
        there = installed.get(package)
        wanted = held.get(package, besides.get(package))
        # torch's CPU build says so behind a plus.
        if there is None or wanted is None or there.partition("+")[0] != wanted:
            wrong.append(f"{package}: installed {there}, requirements/{name} has {wanted}")
    return wrong


def test_every_package_that_the_checkout_asks_for_is_pinned():
    [extras] = re.findall(r"-e \"\$here/\.\.\[([a-z0-9,-]+)\]\"", SETUP["constraints.txt"].read_text())
    assert {"train", "router", "dev"} <= set(extras.split(","))
    asked = [*PROJECT["dependencies"]]
    for extra in extras.split(","):
        asked += PROJECT["optional-dependencies"][extra]
    held = lock("constraints.txt")
    for requirement in map(Requirement, asked):
        version = held.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement} is not in requirements/constraints.txt: make constraints"
        assert requirement.specifier.contains(version, prereleases=True), f"{requirement}: constraints have {version}"


def test_this_environment_is_the_one_of_the_constraints():
    if not (Path(sys.prefix) / ".recipe").exists() and os.environ.get("CI", "").lower() not in ("true", "1"):
        pytest.skip(f"{sys.prefix} was not built by requirements/setup.sh (`make venv`)")
    assert differences(sys.executable, "constraints.txt") == [], "make constraints, after the tests have passed"


def test_sglangs_environment_is_the_one_of_its_requirements():
    assert differences(sglang_python(), "sglang-cpu.txt") == []


def test_the_torch_of_an_sglang_with_cuda_is_the_one_that_it_wants():
    code = "import importlib.metadata as m; print(*[r for r in m.requires('sglang') if r.startswith('torch==')])"
    wanted = subprocess.run([sglang_python(), "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert wanted.stdout.strip() == f"torch=={lock('sglang-cuda.txt')['torch']}"
