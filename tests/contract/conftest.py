"""Fixtures of fake engines on loopback sockets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.contract.fakes.sglang import EXPECTED_KEY
from tests.contract.fakes.vllm import FakeVllm

KEY = "test-key"


@pytest.fixture
def fake_vllm() -> Iterator[FakeVllm]:
    """A fake vLLM with rltool's plugin and the key "test-key"."""
    with FakeVllm(key=KEY) as server:
        yield server


@pytest.fixture
def fake_stock_vllm() -> Iterator[FakeVllm]:
    """A fake vLLM that somebody else started: development mode, no plugin, no key."""
    with FakeVllm(plugin=False) as server:
        yield server


@pytest.fixture
def key_file(tmp_path):
    """The file with the fakes' key."""
    path = tmp_path / "key"
    path.write_text(KEY + "\n")
    return path


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Fakes that a test enters here end with it."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def two(stack: ExitStack) -> list[FakeVllm]:
    """Two fake vLLMs with rltool's plugin and the key that fake SGLangs have (sync_rig)."""
    return [stack.enter_context(FakeVllm(key=EXPECTED_KEY)) for _ in range(2)]
