"""Fixtures for all layers of tests: tiny model directories, made once per session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_models import write_tiny_qwen2


@pytest.fixture(scope="session")
def tiny_tied_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """HF directory of a tiny Qwen2 with tied embeddings (fp32, random weights)."""
    return write_tiny_qwen2(tmp_path_factory.mktemp("tiny-tied"), tied=True)


@pytest.fixture(scope="session")
def tiny_untied_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """HF directory of a tiny Qwen2 with an own output head (fp32, random weights)."""
    return write_tiny_qwen2(tmp_path_factory.mktemp("tiny-untied"), tied=False, seed=1)
