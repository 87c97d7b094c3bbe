"""`rltool debug weights` on engines that cut and join parameters: the tensor that differs is named, and the rank.

vLLM on a CPU packs the matrices of its layers, so of those biases and norms alone have checksums; SGLang's are plain.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rltool.config.rollout import WeightsConfig
from rltool.engines.fleet.engine_set import EngineSet
from rltool.engines.fleet.fleet import Fleet
from rltool.weights.verify.comparison import Comparison
from rltool.weights.verify.values import ValueCheck
from rltool.weights.verify.verdict import Verdict
from tests.e2e.delta_trainer import SECONDS, Trainer, trainer
from tests.e2e.engines import RunningEngine, serving_sglang, serving_vllm
from tests.tiny_models import write_tiny_tokenizer

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]

LITTLE = 1e-5
"""Of one element: log-probabilities do not show it."""
BIAS, NORM = "model.layers.1.self_attn.k_proj.bias", "model.layers.1.post_attention_layernorm.weight"
EMBEDDING = "model.embed_tokens.weight"
V, GATE, DOWN = (f"model.layers.1.{name}.weight" for name in ("self_attn.v_proj", "mlp.gate_proj", "mlp.down_proj"))
OUTPUT = "model.layers.0.self_attn.o_proj.weight"
WHERE_IT_IS = {
    BIAS: "model.layers.1.self_attn.qkv_proj.bias", V: "model.layers.1.self_attn.qkv_proj.weight",
    GATE: "model.layers.1.mlp.gate_up_proj.weight",
}  # fmt: skip
"""HF name -> the engine's, where it is another."""
OF_ALL_RANKS = (NORM,)
CASES = {
    "vllm-tp2": (BIAS, NORM, EMBEDDING),
    "sglang": (BIAS, NORM, EMBEDDING, V, GATE, DOWN, OUTPUT),
    "sglang-tp2": (BIAS, NORM, EMBEDDING, V, GATE, DOWN, OUTPUT),
}
COMPARED = {"vllm-tp2": 9, "sglang": 17, "sglang-tp2": 17}
"""Parameters with checksums: of each layer four matrices, which vLLM has packed, a bias and two norms; embedding, norm
and head."""


@pytest.fixture(scope="module", params=CASES)
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def engine(kind: str, tiny_untied_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    serving = serving_vllm if kind.startswith("vllm") else serving_sglang
    tp = 2 if kind.endswith("tp2") else 1
    with serving(tiny_untied_dir, tmp_path_factory.mktemp(kind), tp=tp) as running:
        yield running


@pytest.fixture
def debug_weights(engine: RunningEngine) -> Callable[[Path], tuple[int, str]]:
    def run(checkpoint: Path) -> tuple[int, str]:
        argv = [sys.executable, "-m", "rltool", "debug", "weights", engine.url, "--checkpoint", str(checkpoint)]
        argv += ["--key-file", str(engine.endpoint.key_file)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=240, env=os.environ | {"COLUMNS": "250"})
        return done.returncode, done.stdout + done.stderr

    return run


def last_element_off(model: torch.nn.Module, name: str) -> None:
    with torch.no_grad():
        model.get_parameter(name).view(-1)[-1].add_(LITTLE)


def assert_named(kind: str, name: str, said: str) -> None:
    """The last element of a tensor that is cut is the last rank's; an embedding's too, below which there is padding."""
    last = {"vllm-tp2": " (of dp0:pp0:pcp0:tp1)", "sglang": "", "sglang-tp2": " (of dp0:pp0:tp1)"}[kind]
    where = "" if name in OF_ALL_RANKS else last
    lines = [line.strip() for line in said.splitlines()]
    assert f"the first parameter that differs: {WHERE_IT_IS.get(name, name)}{where}" in lines, said
    assert f"{COMPARED[kind] - 1} of {COMPARED[kind]} parameters are bit-equal, 1 differ" in said, said
    assert "sampled tokens agree" in said, said


def test_the_checkpoint_that_it_serves_is_recognised_and_each_tensor_that_differs_is_named(
    kind, engine, debug_weights, tiny_untied_dir, tmp_path
):
    code, said = debug_weights(tiny_untied_dir)
    equal, compared = map(int, re.search(r"(\d+) of (\d+) parameters are bit-equal", said).groups())
    assert code == 0 and equal == compared == COMPARED[kind], said
    for name in CASES[kind]:
        model = AutoModelForCausalLM.from_pretrained(tiny_untied_dir, dtype=torch.float32)
        last_element_off(model, name)
        model.save_pretrained(tmp_path / name)
        write_tiny_tokenizer(tmp_path / name)
        code, said = debug_weights(tmp_path / name)
        assert code == 1, said
        assert_named(kind, name, said)


def test_the_trainer_is_recognised_and_each_tensor_that_differs_is_named(kind, engine, tmp_path):
    async def scenario() -> None:
        config = WeightsConfig(transport="disk", bucket_bytes=200_000)
        async with trainer(engine, config, tmp_path) as made:
            found = await compared(made)
            assert found.equal and f"{COMPARED[kind]} of {COMPARED[kind]} parameters" in found.lines[0]
            right = {name: made.ranks.at(0).get_parameter(name).clone() for name in CASES[kind]}
            for name, tensor in right.items():
                last_element_off(made.ranks.at(0), name)
                found = await compared(made)
                assert not found.equal
                assert_named(kind, name, "\n".join(found.lines))
                with torch.no_grad():
                    made.ranks.at(0).get_parameter(name).copy_(tensor)

    asyncio.run(scenario())


async def compared(made: Trainer) -> Verdict:
    info, url, fleet = await made.client.probe(made.endpoint), made.endpoint.url, Fleet()
    fleet.add(made.endpoint, info)
    check = ValueCheck(made.ranks.at(0).config.vocab_size, 1.0, 1e-4, info.max_model_len)
    comparison = Comparison(EngineSet(fleet, made.client), made.ranks, check, deadline=SECONDS)
    return (await comparison.compare(fleet.members()))[url]
