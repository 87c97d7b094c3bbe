"""`rltool debug weights` on the real vLLM: what bits show, and what only values show."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rltool.engines.client import EngineClient
from tests.e2e.engines import RunningEngine
from tests.e2e.weights import Sender, perturbed_model, tensors_of
from tests.tiny_models import write_tiny_tokenizer

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(600)]

NORM = "model.layers.1.input_layernorm.weight"
PACKED = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def held(vllm_engine_tied: RunningEngine, tmp_path_factory: pytest.TempPathFactory):
    """Weights that the engine was sent, and nobody has given it by way of a file."""
    model = perturbed_model(vllm_engine_tied.launch.model, seed=30)

    async def push() -> None:
        async with EngineClient() as client:
            await Sender(client, vllm_engine_tied).gloo(tensors_of(model), "held")

    asyncio.run(push())
    return model


@pytest.fixture
def debug_weights(vllm_engine_tied: RunningEngine):
    def run(*words: str) -> tuple[int, str]:
        key = ["--key-file", str(vllm_engine_tied.endpoint.key_file)]
        argv = [sys.executable, "-m", "rltool", "debug", "weights", vllm_engine_tied.url, *words, *key]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=240, env=os.environ | {"COLUMNS": "250"})
        return done.returncode, done.stdout + done.stderr

    return run


def saved(model, directory: Path, changed: str | None = None, by: float = 0.0) -> str:
    """The model as a Hugging Face directory, with one tensor off."""
    model.save_pretrained(directory)
    if changed is not None:
        parameter = dict(model.named_parameters())[changed]
        with torch.no_grad():
            right = parameter.clone()
            parameter.add_(by)
            model.save_pretrained(directory)
            parameter.copy_(right)
    write_tiny_tokenizer(directory)
    return str(directory)


def test_the_checkpoint_that_the_engine_holds_is_recognised_in_both_formats(held, debug_weights, tmp_path):
    hf = saved(held, tmp_path / "hf")
    code, said = debug_weights("--checkpoint", hf)
    assert code == 0, said
    assert "the same weights as" in said and "sampled tokens agree" in said
    equal, compared = map(int, re.search(r"(\d+) of (\d+) parameters are bit-equal", said).groups())
    assert equal == compared > 5, "the embedding, the norms and the biases"
    convert = [sys.executable, "-m", "rltool", "convert-ckpt", hf, str(tmp_path / "torch_dist"), "--no-verify"]
    subprocess.run(convert, check=True, timeout=240, capture_output=True)
    assert debug_weights("--checkpoint", str(tmp_path / "torch_dist"))[0] == 0


def test_a_difference_too_small_for_values_is_found_by_its_bits_and_named(held, debug_weights, tmp_path):
    code, said = debug_weights("--checkpoint", saved(held, tmp_path / "hf", NORM, 1e-5))
    assert code == 1 and f"the first parameter that differs: {NORM}" in said
    assert "sampled tokens agree" in said


def test_a_difference_in_what_vllm_has_packed_is_found_by_values(held, debug_weights, tmp_path):
    code, said = debug_weights("--checkpoint", saved(held, tmp_path / "hf", PACKED, 0.1))
    assert code == 1 and "the first parameter that differs" not in said
    assert "sampled tokens differ" in said


def test_an_engine_equals_itself(held, debug_weights, vllm_engine_tied):
    code, said = debug_weights("--engine", vllm_engine_tied.url)
    assert code == 0 and "the same weights as" in said, said
