"""Fixtures for all layers of tests: tiny model directories, made once per session."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.tiny_models import write_tiny_qwen2


def pytest_configure() -> None:
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


@pytest.fixture(scope="session")
def tiny_tied_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """HF directory of a tiny Qwen2 with tied embeddings (fp32, random weights)."""
    return write_tiny_qwen2(tmp_path_factory.mktemp("tiny-tied"), tied=True)


@pytest.fixture(scope="session")
def tiny_untied_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """HF directory of a tiny Qwen2 with an own output head (fp32, random weights)."""
    return write_tiny_qwen2(tmp_path_factory.mktemp("tiny-untied"), tied=False, seed=1)
