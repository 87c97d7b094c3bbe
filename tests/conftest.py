"""Fixtures for all layers of tests: tiny model directories, made once per session."""

from __future__ import annotations

import os
import re
import signal
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.long_report import WORKER_INPUT, FailuresAtOnce, LeftOut, LongReport, RunAgain
from tests.tiny_models import write_tiny_qwen2

pytest_plugins = ["pytester"]

# OpenMP's threads that spin while they wait take the core from the tests beside. Read once, when torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Engines beside a run take most of a host of 24 GiB, and at 95 % Ray would end ranks, which are small.
os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long-report", type=Path, help="tests/long_report.py: the JSON file that it leaves")
    parser.addoption("--long-resume", action="store_true", help="without what has passed there, at the same commit")
    parser.addoption("--run-again", action="store_true", help="once more what fails, with all fixtures anew")


def pytest_configure(config: pytest.Config) -> None:
    """A shell starts its background jobs with SIGINT ignored, and so do nohup and some CI runners with others. Children
    inherit that, and tests that interrupt them would wait for ever."""
    for number, usual in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGTERM, signal.SIG_DFL),
        (signal.SIGHUP, signal.SIG_DFL),
        (signal.SIGQUIT, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)
    if config.getoption("--run-again"):
        config.pluginmanager.register(RunAgain())
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(LeftOut(config.workerinput.get(WORKER_INPUT, [])))
        return
    file = config.getoption("--long-report")
    if file is not None:
        config.pluginmanager.register(LongReport(file, config.rootpath, resume=config.getoption("--long-resume")))
    config.pluginmanager.register(FailuresAtOnce(config))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, files whose tests ask the engines of tests/e2e/conftest.py run in one process, one after
    the other: one engine of each kind, and not one in each process. (loadgroup of xdist 3.8 groups nothing with
    pytest 9.2.)"""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "engines" if shares_engines(config.rootpath / file) else file

    return Scheduling(config, log)


FIRST = ("quickstart", "prefill_decode", "vllm_families", "parallel_engines", "sglang_train", "reward_model", "agents")
"""Files of tests/e2e that take a minute or two each, whole."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long files first, of which the one of the shared engines is the longest: with two processes the last files should
    be short ones."""

    def place(item: pytest.Item) -> int:
        layer, *_ = item.path.relative_to(config.rootpath / "tests").parts
        if layer != "e2e":
            return 4 if layer == "unit" else 3
        if shares_engines(item.path):
            return 0
        return 1 if item.path.stem.removeprefix("test_") in FIRST else 2

    items.sort(key=place)


@cache
def shares_engines(file: Path) -> bool:
    """Whether a test file names a session's engine."""
    return re.search(r"\b(vllm|sglang)_engine", file.read_text()) is not None


@pytest.fixture(scope="session")
def tiny_tied_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """HF directory of a tiny Qwen2 with tied embeddings (fp32, random weights)."""
    return write_tiny_qwen2(tmp_path_factory.mktemp("tiny-tied"), tied=True)


@pytest.fixture(scope="session")
def tiny_untied_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """HF directory of a tiny Qwen2 with an own output head (fp32, random weights)."""
    return write_tiny_qwen2(tmp_path_factory.mktemp("tiny-untied"), tied=False, seed=1)
