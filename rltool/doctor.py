"""What this machine has, and what is missing for which feature. Facts are collected apart from the verdicts on them.

Versions come from package metadata: importing torch or vllm takes seconds, and a broken installation would take the
doctor down.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

import psutil
from pydantic import BaseModel

from rltool import __version__
from rltool.config.serve import ENGINES
from rltool.engines.dialects.supported import newest
from rltool.engines.dialects.table import launches
from rltool.environments.sandbox import walls_of_this_host
from rltool.errors import RltoolError, UsageError
from rltool.processes.gpus import Gpu, visible_gpus
from rltool.processes.ports import reserved_ports
from rltool.processes.run_directory import runs_root

BASE = ("aiohttp", "psutil", "pydantic", "requests", "rich", "tomlkit", "typer")
SHOWN = (
    *BASE, "torch", "transformers", "safetensors", "ray", "megatron-core",
    *(package for name in ENGINES for package in launches(name).installation.packages), "sglang-router",
    "pyarrow", "tensorboard", "reasoning-gym", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "torchvision",
)  # fmt: skip

MIN_PYTHON = (3, 11)
MIN_NCCL = (2, 29)
"""With an older one vLLM 0.32's weight-transfer communicator disables itself in silence: every call reports success,
nothing arrives."""
MIN_SHARED_MEMORY = 1 << 30
"""Bytes. NCCL and Ray keep their buffers in /dev/shm; containers often get 64 MiB."""


@dataclass(frozen=True)
class Need:
    """A feature and what it needs: each entry is a set of packages of which one will do."""

    feature: str
    packages: tuple[tuple[str, ...], ...]
    extra: str
    note: str = ""
    cpu_fix: str = ""
    """What pip installs instead of the extra on a host without GPUs."""
    apart: tuple[str, str] | None = None
    """In place of both: what makes an environment of its own for it, on a host with GPUs and on one without."""


def _engine(name: str) -> Need:
    wanted = launches(name).installation
    apart = None if wanted.apart is None else (wanted.apart[0].format(newest=newest(name)), wanted.apart[1])
    return Need(
        f"serve-engines --engine {name}", (wanted.packages,), wanted.extra, wanted.note, wanted.cpu_fix, apart
    )


FEATURES = (
    *map(_engine, ENGINES),
    Need("router", (("sglang-router",),), "router"),
    Need(
        "train",
        tuple(
            (name,)
            for name in ("torch", "transformers", "safetensors", "ray", "megatron-core", "pyarrow", "tensorboard")
        ),
        "train",
    ),
    Need("convert-ckpt", tuple((name,) for name in ("torch", "transformers", "safetensors", "megatron-core")), "train"),
    Need(
        "quickstart",
        tuple((name,) for name in ("torch", "ray", "megatron-core", "sglang-router", "reasoning-gym")),
        "train,router,quickstart",
    ),
)


class Facts(BaseModel):
    """Everything that was looked up. Sizes in bytes; shared_memory is None where there is no /dev/shm."""

    rltool: str
    python: str
    executable: Path
    source: Path | None
    """The checkout that rltool was installed from; None: a wheel, or another source."""
    platform: str
    cpus: int
    memory: int
    shared_memory: int | None
    versions: dict[str, str | None]
    gpus: list[Gpu]
    nccl_override: str | None
    keeps_bytecode: bool
    can_listen: str | None
    """None: loopback ports can be bound; else why not."""
    can_write_runs: str | None
    sandbox: list[str]
    """How the Python sandbox for programs of a model is walled here."""
    sandbox_problem: str | None


class Finding(BaseModel):
    """`broken` is for the base alone: nothing of rltool works then. `fix` is what to type or to change."""

    level: Literal["ok", "missing", "warning", "broken"]
    about: str
    text: str
    fix: str = ""


def collect() -> Facts:
    shared = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    sandbox, sandbox_problem = _sandbox()
    return Facts(
        rltool=__version__,
        python=platform.python_version(),
        executable=Path(sys.executable),
        source=_source(),
        platform=platform.platform(),
        cpus=os.cpu_count() or 1,
        memory=psutil.virtual_memory().total,
        shared_memory=shared.total if shared else None,
        versions={name: _version(name) for name in SHOWN},
        gpus=visible_gpus(),
        nccl_override=os.environ.get("VLLM_NCCL_SO_PATH"),
        keeps_bytecode=not sys.dont_write_bytecode,
        can_listen=_listen_problem(),
        can_write_runs=_write_problem(runs_root()),
        sandbox=sandbox,
        sandbox_problem=sandbox_problem,
    )


def examine(facts: Facts) -> list[Finding]:
    """The verdicts, base first. Pure."""
    return [*_base(facts), *(_feature(need, facts) for need in FEATURES), *_machine(facts)]


def _base(facts: Facts) -> list[Finding]:
    found = []
    python = tuple(int(part) for part in facts.python.split(".")[:2])
    if python < MIN_PYTHON:
        found.append(
            Finding(
                level="broken",
                about="python",
                text=f"{facts.python}; rltool needs 3.11",
                fix="make an environment with Python 3.11 or newer",
            )
        )
    missing = [name for name in BASE if facts.versions.get(name) is None]
    if missing:
        found.append(
            Finding(
                level="broken",
                about="base packages",
                text=f"missing: {', '.join(missing)}",
                fix=_pip(facts, _ours(facts)),
            )
        )
    if facts.can_listen is not None:
        found.append(Finding(level="broken", about="ports", text=facts.can_listen, fix="allow binding 127.0.0.1"))
    if facts.can_write_runs is not None:
        found.append(
            Finding(
                level="broken",
                about="runs",
                text=facts.can_write_runs,
                fix="set RLTOOL_RUNS to a directory that you may write",
            )
        )
    return found or [Finding(level="ok", about="base", text=f"rltool {facts.rltool}, Python {facts.python}")]


def _feature(need: Need, facts: Facts) -> Finding:
    missing = [
        " or ".join(choices) for choices in need.packages if not any(facts.versions.get(name) for name in choices)
    ]
    if missing:
        note = f" ({need.note})" if need.note else ""
        if need.apart is not None:
            fix = need.apart[0 if facts.gpus else 1]
        else:
            fix = _pip(facts, _ours(facts, need.extra) if facts.gpus or not need.cpu_fix else need.cpu_fix)
        return Finding(level="missing", about=need.feature, text=f"missing: {', '.join(missing)}{note}", fix=fix)
    have = ", ".join(
        f"{name} {facts.versions[name]}" for choices in need.packages for name in choices if facts.versions.get(name)
    )
    return Finding(level="ok", about=need.feature, text=have)


def _machine(facts: Facts) -> list[Finding]:
    found = []
    if facts.shared_memory is not None and facts.shared_memory < MIN_SHARED_MEMORY:
        text = f"/dev/shm has {facts.shared_memory >> 20} MiB; NCCL and Ray want at least {MIN_SHARED_MEMORY >> 20}"
        found.append(
            Finding(
                level="warning",
                about="shared memory",
                text=text,
                fix="start the container with --shm-size=8g or --ipc=host",
            )
        )
    if not facts.keeps_bytecode:
        found.append(
            Finding(
                level="warning",
                about="bytecode",
                text="Python keeps none (PYTHONDONTWRITEBYTECODE or -B): every process compiles its sources again, an "
                "import of vLLM takes half a minute",
                fix="unset PYTHONDONTWRITEBYTECODE",
            )
        )
    if not facts.gpus:
        found.append(Finding(level="ok", about="GPUs", text="none: --device cpu"))
    else:
        found.append(
            Finding(level="ok", about="GPUs", text=", ".join(f"{gpu.index}: {gpu.name}" for gpu in facts.gpus))
        )
        found += _nccl(facts)
    if facts.sandbox_problem is None:
        found.append(Finding(level="ok", about="Python sandbox", text=", ".join(facts.sandbox)))
    else:
        found.append(Finding(level="missing", about="Python sandbox", text=facts.sandbox_problem))
    return found


def _nccl(facts: Facts) -> list[Finding]:
    name, version = next(
        ((n, v) for n in ("nvidia-nccl-cu13", "nvidia-nccl-cu12") if (v := facts.versions.get(n))), (None, None)
    )
    if facts.nccl_override:
        return [
            Finding(
                level="ok",
                about="NCCL",
                text=f"VLLM_NCCL_SO_PATH={facts.nccl_override}: make sure that it is at least 2.29, on both sides",
            )
        ]
    if name is None or version is None:
        return [
            Finding(
                level="warning",
                about="NCCL",
                text="no nvidia-nccl package found: its version is unknown",
                fix="weight transfer to vLLM 0.32 needs libnccl 2.29 or newer",
            )
        ]
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_NCCL:
        text = f"{name} {version}: weight transfer to vLLM 0.32 would do nothing and report success"
        return [
            Finding(
                level="warning",
                about="NCCL",
                text=text,
                fix=_pip(facts, f"'{name}>=2.29'") + "  (or point VLLM_NCCL_SO_PATH at a newer libnccl.so.2)",
            )
        ]
    return [Finding(level="ok", about="NCCL", text=f"{name} {version}")]


def _pip(facts: Facts, requirement: str) -> str:
    return f"{facts.executable} -m pip install {requirement}"


def _ours(facts: Facts, extras: str = "") -> str:
    """rltool itself for pip: the checkout, for a package index may not have it."""
    wanted = f"{facts.source}[{extras}]" if facts.source else f"rltool[{extras}]"
    option, wanted = "-e " if facts.source else "", wanted.removesuffix("[]")
    return f"{option}'{wanted}'"


def _source() -> Path | None:
    """By pip's record of a direct URL (PEP 610)."""
    try:
        record = json.loads(importlib.metadata.distribution("rltool").read_text("direct_url.json") or "{}")
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None
    url = str(record.get("url", ""))
    directory = Path(unquote(urlsplit(url).path))
    return directory if url.startswith("file:") and (directory / "pyproject.toml").is_file() else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _listen_problem() -> str | None:
    try:
        with reserved_ports(1):
            return None
    except RltoolError as error:
        return str(error)


def _write_problem(root: Path) -> str | None:
    """Whether runs could be made, without making anything: the nearest existing directory must be writable."""
    nearest = next(path for path in (root, *root.parents) if path.exists())
    return None if os.access(nearest, os.W_OK) else f"{nearest} cannot be written, and runs go to {root}"


def _sandbox() -> tuple[list[str], str | None]:
    """(its walls, why it has none)."""
    try:
        return list(walls_of_this_host()), None
    except (UsageError, RuntimeError) as error:
        return [], str(error)


def versions_found(versions: Mapping[str, str | None]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version)
