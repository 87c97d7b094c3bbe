"""Fixtures for all layers of tests: tiny model directories, made once per session."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.long_report import LongReport
from tests.tiny_models import write_tiny_qwen2

pytest_plugins = ["pytester"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long-report", type=Path, help="tests/long_report.py: the JSON file that it leaves")


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
    file = config.getoption("--long-report")
    if file is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(LongReport(file, config.rootpath))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `--dist loadgroup` a file stays together, as with loadfile; files that name one group do, too."""
    if config.getoption("dist", "no") == "loadgroup":
        for item in items:
            if item.get_closest_marker("xdist_group") is None:
                item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


@pytest.fixture(scope="session")
def tiny_tied_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """HF directory of a tiny Qwen2 with tied embeddings (fp32, random weights)."""
    return write_tiny_qwen2(tmp_path_factory.mktemp("tiny-tied"), tied=True)


@pytest.fixture(scope="session")
def tiny_untied_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """HF directory of a tiny Qwen2 with an own output head (fp32, random weights)."""
    return write_tiny_qwen2(tmp_path_factory.mktemp("tiny-untied"), tied=False, seed=1)
