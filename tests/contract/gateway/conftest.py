"""Scripted engines, a tokenizer, a gateway in front of them, and the real client libraries."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.fakes.scripted import ScriptedVllm
from tests.contract.gateway.running import Gateway
from tests.gateway_models import Words, gateway_tokenizer, write_gateway_tokenizer


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory) -> Path:
    return write_gateway_tokenizer(tmp_path_factory.mktemp("gateway-tokenizer"))


@pytest.fixture(scope="session")
def words() -> Words:
    return Words(gateway_tokenizer())


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory, words) -> Path:
    """The tokenizer and as much of a model as a run against scripted engines reads."""
    directory = write_gateway_tokenizer(tmp_path_factory.mktemp("gateway-model"))
    (directory / "config.json").write_text(json.dumps({"vocab_size": words.size}))
    return directory


@pytest.fixture
def engine(words) -> Iterator[ScriptedVllm]:
    with ScriptedVllm(vocab_size=words.size, default=words.spell("fine")) as server:
        yield server


@pytest.fixture
def gateway(engine, tokenizer_dir, tmp_path) -> Iterator[Gateway]:
    with Gateway(tmp_path, tokenizer_dir, [engine]) as running:
        yield running
