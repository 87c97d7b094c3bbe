"""Real engines, one of each kind per session, started at first use and shared by all tests.

A file's tests may change an engine's weights: the next file gets them as they were.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.engines import RunningEngine, serving_sglang, serving_vllm
from tests.e2e.megatron_ranks import RankPool
from tests.e2e.weights import reset


@pytest.fixture(scope="session")
def engine_key() -> str:
    """Of the engines that stand behind one router, which hands on one key."""
    return secrets.token_hex(16)


@pytest.fixture(scope="session")
def started_sglang_engine(
    tiny_tied_dir: Path, tmp_path_factory: pytest.TempPathFactory, engine_key: str
) -> Iterator[RunningEngine]:
    """A keyed SGLang on the CPU with tied embeddings, ready to serve."""
    with serving_sglang(tiny_tied_dir, tmp_path_factory.mktemp("sglang"), key=engine_key) as engine:
        yield engine


@pytest.fixture(scope="session")
def started_vllm_engine_tied(
    tiny_tied_dir: Path, tmp_path_factory: pytest.TempPathFactory, engine_key: str
) -> Iterator[RunningEngine]:
    """A guarded vLLM on the CPU with tied embeddings, ready to serve."""
    with serving_vllm(tiny_tied_dir, tmp_path_factory.mktemp("vllm-tied"), key=engine_key) as engine:
        yield engine


@pytest.fixture(scope="session")
def started_vllm_engine_untied(
    tiny_untied_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningEngine]:
    """A guarded vLLM on the CPU with an own output head, ready to serve."""
    with serving_vllm(tiny_untied_dir, tmp_path_factory.mktemp("vllm-untied")) as engine:
        yield engine


@pytest.fixture(scope="module")
def sglang_engine(started_sglang_engine: RunningEngine) -> RunningEngine:
    return reset(started_sglang_engine)


@pytest.fixture(scope="module")
def vllm_engine_tied(started_vllm_engine_tied: RunningEngine) -> RunningEngine:
    return reset(started_vllm_engine_tied)


@pytest.fixture(scope="module")
def vllm_engine_untied(started_vllm_engine_untied: RunningEngine) -> RunningEngine:
    return reset(started_vllm_engine_untied)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Two processes for trainer ranks, started at first use."""
    pool = RankPool()
    try:
        yield pool
    finally:
        pool.close()
