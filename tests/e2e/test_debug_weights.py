"""`rltool debug weights` on the real vLLM: what bits show, and what only values show."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rltool.engines.client import EngineClient
from rltool.engines.dialects.checksums import EMPTY, Checksums
from tests.e2e.commands import completed
from tests.e2e.engines import RunningEngine, serving_vllm
from tests.e2e.megatron_models import LATENT, save_hf
from tests.e2e.weights import Sender, perturbed_model, tensors_of
from tests.tiny_models import write_tiny_tokenizer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

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
def rltool(tmp_path: Path):
    def run(*words: str) -> tuple[int, str]:
        env = os.environ | {"COLUMNS": "250"}
        return completed(words, env=env, cwd=tmp_path, out=tmp_path / "out", timeout=240)

    return run


@pytest.fixture
def debug_weights(rltool, vllm_engine_tied: RunningEngine):
    key = ["--key-file", str(vllm_engine_tied.endpoint.key_file)]
    return lambda *words: rltool("debug", "weights", vllm_engine_tied.url, *words, *key)


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


def test_the_checkpoint_that_the_engine_holds_is_recognised(held, debug_weights, tmp_path):
    code, said = debug_weights("--checkpoint", saved(held, tmp_path / "hf"))
    assert code == 0, said
    assert "the same weights as" in said and "sampled tokens agree" in said
    equal, compared = map(int, re.search(r"(\d+) of (\d+) parameters are bit-equal", said).groups())
    assert equal == compared > 5, "the embedding, the norms and the biases"


@pytest.mark.long
def test_so_it_is_in_megatrons_format(held, rltool, debug_weights, tmp_path):
    converted = rltool("convert-ckpt", saved(held, tmp_path / "hf"), str(tmp_path / "torch_dist"), "--no-verify")
    assert converted[0] == 0, converted
    assert debug_weights("--checkpoint", str(tmp_path / "torch_dist"))[0] == 0


def test_a_difference_too_small_for_values_is_found_by_its_bits_and_named(held, debug_weights, tmp_path):
    code, said = debug_weights("--checkpoint", saved(held, tmp_path / "hf", NORM, 1e-5))
    assert code == 1 and f"the first parameter that differs: {NORM}" in said
    assert "sampled tokens agree" in said


def test_a_difference_in_what_vllm_has_packed_is_found_by_values(held, debug_weights, tmp_path):
    code, said = debug_weights("--checkpoint", saved(held, tmp_path / "hf", PACKED, 0.1))
    assert code == 1 and "the first parameter that differs" not in said
    assert "sampled tokens differ" in said


@pytest.mark.long
def test_an_engine_equals_itself(held, debug_weights, vllm_engine_tied):
    code, said = debug_weights("--engine", vllm_engine_tied.url)
    assert code == 0 and "the same weights as" in said, said


@pytest.mark.long
def test_what_vllm_decodes_latent_attention_with_is_compared_and_is_of_the_weights_that_came_last(rltool, tmp_path):
    """Nothing is left out but what vLLM has packed for a CPU: linear layers, which have no bytes any more, and
    experts."""
    sizes = LATENT["deepseek_v3"] | {"hidden_size": 128, "num_attention_heads": 4}
    first, then = (save_hf(tmp_path / f"{seed}", "deepseek_v3", False, seed, sizes) for seed in (1, 2))
    write_tiny_tokenizer(first), write_tiny_tokenizer(then)
    half = shutil.copytree(then, tmp_path / "half")
    [file] = half.glob("*.safetensors")
    product = "model.layers.1.self_attn.kv_b_proj.weight"
    save_file(load_file(file) | {product: load_file(first / file.name)[product]}, file, metadata={"format": "pt"})
    with serving_vllm(first, tmp_path, extra_args=("--attention-backend", "CPU_MLA")) as engine:

        async def sent() -> Checksums:
            async with EngineClient() as client:
                await Sender(client, engine).gloo(load_file(then / file.name), "sent")
                return await client.checksums(engine.endpoint, timeout=60.0) or {}

        def compared(checkpoint: Path) -> tuple[int, str]:
            words = ("debug", "weights", engine.url, "--key-file", str(engine.endpoint.key_file), "--checkpoint")
            return rltool(*words, str(checkpoint))

        code, said = compared(first)
        assert code == 0, said
        checksums = asyncio.run(sent())
        packed = sum(digest == EMPTY or ".experts.routed" in name for name, digest in checksums.items())
        derived = [name for name in checksums if "W_U" in name]
        assert len(derived) == 2 * 4 and all(checksums[name] != EMPTY for name in derived)
        code, said = compared(then)
        assert code == 0, said
        counts = re.search(r"(\d+) of (\d+) parameters are bit-equal; (\d+) more cannot", said)
        assert counts is not None and list(map(int, counts.groups())) == [len(checksums) - packed] * 2 + [packed], said
        assert compared(first)[0] == 1
        code, said = compared(half)
        assert code == 1 and "model.layers.1.self_attn.mla_attn.mla_attn.W_U" in said, said


@pytest.mark.long
@pytest.mark.parametrize("kind", ["qwen3_moe", "glm4_moe", "gpt_oss"])
def test_one_expert_that_differs_is_found_in_an_engine_that_fuses_them(rltool, tmp_path, kind):
    right, wrong = save_hf(tmp_path / "right", kind, tied=False), tmp_path / "wrong"
    write_tiny_tokenizer(right)
    shutil.copytree(right, wrong)
    [file] = wrong.glob("*.safetensors")
    tensors = load_file(file)
    name = max(name for name in tensors if "experts" in name and "down_proj" in name and "bias" not in name)
    tensors[name].view(-1, tensors[name].shape[-1])[-1] += 1.0  # gpt-oss has all experts of a layer in one tensor
    save_file(tensors, file, metadata={"format": "pt"})
    with serving_vllm(right, tmp_path) as engine:
        words = ("debug", "weights", engine.url, "--key-file", str(engine.endpoint.key_file), "--checkpoint")
        code, said = rltool(*words, str(right))
        assert code == 0 and "sampled tokens agree" in said, said
        code, said = rltool(*words, str(wrong))
        assert code == 1 and "sampled tokens differ" in said, said
