"""The wheel: built, installed into an environment of its own, started there."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from rltool import __version__
from rltool.cli import VERBS

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the files that git knows, so that nothing of this checkout's build directories gets in."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    for name in filter(None, files):
        target = tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(out), str(tree)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    [found] = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel, which finds the packages of this one: nothing is downloaded."""
    root = tmp_path_factory.mktemp("environment") / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(root)], check=True, timeout=120)
    python = root / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, capture_output=True, timeout=300)
    [site] = (root / "lib").glob("python3*/site-packages")
    (site / "packages_of_the_tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return root


def run(environment: Path, cwd: Path, *words: str) -> str:
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([*words], cwd=cwd, env=clean, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_installed_wheel_runs_every_verb_and_has_its_files(environment, tmp_path):
    rltool = str(environment / "bin" / "rltool")
    assert run(environment, tmp_path, rltool, "--version").startswith(f"rltool {__version__}\n")
    where = run(environment, tmp_path, str(environment / "bin/python"), "-c", "import rltool; print(rltool.__file__)")
    assert Path(where.strip()).is_relative_to(environment), "it is the wheel that runs"
    for verb in VERBS:
        assert "Usage" in run(environment, tmp_path, rltool, verb, "--help")
    run(environment, tmp_path, rltool, "init", "run.toml")
    assert (tmp_path / "run.toml").stat().st_size > 500


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"rltool", f"rltool-{__version__}.dist-info"}
    assert "rltool/py.typed" in names and any(name.startswith("rltool/templates/") for name in names)
