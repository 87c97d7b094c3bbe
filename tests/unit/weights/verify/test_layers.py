"""rltool.weights.verify.layers: which part of which layer is found. With the real trainer and the real vLLM it is in
tests/e2e/test_megatron_trainer.py and tests/gpu/test_exact.py."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from rltool.weights.verify.layers import Found, Trace, engine_parts, first_difference, is_stream, verdict, watching


class Block(torch.nn.Module):
    """A layer as vLLM has it: norms add to the residual stream in place, and return both."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = AddNorm(), AddNorm()
        self.self_attn, self.mlp = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x, residual):
        if residual is None:
            x, residual = self.input_layernorm(x), x
        else:
            x, residual = self.input_layernorm(x, residual)
        x, residual = self.post_attention_layernorm(self.self_attn(x), residual)
        return self.mlp(x), residual


class AddNorm(torch.nn.Module):
    def forward(self, x, residual=None):
        if residual is None:
            return x * 0.5
        residual += x
        x.copy_(residual * 0.5)
        return x, residual


class Engine(torch.nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList(Block() for _ in range(layers))
        self.model.norm = AddNorm()

    @torch.no_grad()
    def stream(self, x: torch.Tensor) -> torch.Tensor:
        """Behind the last layer."""
        residual = None
        for layer in self.model.layers:
            x, residual = layer(x, residual)
        return residual + x

    @torch.no_grad()
    def traced(self, *pieces: torch.Tensor) -> Trace:
        trace = Trace()
        with watching(engine_parts(self), trace.note):
            for x in pieces:
                residual = None
                for layer in self.model.layers:
                    x, residual = layer(x, residual)
                self.model.norm(x, residual)
        assert not any(module._forward_hooks for module in self.modules())
        return trace


def trace_of(change: str | None, by: float = 1e-3) -> Trace:
    torch.manual_seed(0)
    engine = Engine()
    if change is not None:
        with torch.no_grad():
            engine.get_parameter(change).view(-1)[-1] += by
    return engine.traced(torch.randn(5, 8), torch.randn(2, 8))


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (None, None),
        ("model.layers.0.self_attn.weight", "model.layers.0.self_attn"),
        ("model.layers.1.mlp.bias", "model.layers.1.mlp"),
        ("model.layers.2.mlp.bias", "model.layers.2.mlp"),
    ],
)
def test_the_first_part_with_another_bit_is_found_at_its_tokens(change, part):
    """Also where the prompt came in two pieces; nothing that is changed in place later counts."""
    found = first_difference(trace_of(None), trace_of(change, 1e-6))
    assert (found[0] if found else None) == part
    assert found is None or found[1].tolist()[-1]
    assert first_difference(trace_of(None), trace_of(change, 1e-6), tolerance=1e-3) is None


def test_a_residual_stream_that_is_summed_otherwise_is_found_in_the_norm_that_reads_it():
    ours, theirs = trace_of(None), trace_of(None)
    theirs.bits["input of model.layers.2.input_layernorm"][3] += 1
    found = first_difference(ours, theirs)
    assert found is not None and found[0] == "input of model.layers.2.input_layernorm"
    assert found[1].nonzero().flatten().tolist() == [3]
    torch.manual_seed(0)
    engine, vectors = Engine(), torch.randn(5, 8)
    read = engine.traced(vectors.clone()).shown["input of model.norm"]
    torch.testing.assert_close(read, engine.stream(vectors))
    streams = [name for name in ours.bits if is_stream(name)]
    norms = ("layers.1.input_layernorm", "layers.2.input_layernorm", "norm")
    assert streams == [f"input of model.{norm}" for norm in norms]


def test_one_bit_anywhere_in_a_vector_changes_its_number_and_the_sign_of_zero_does_not():
    vectors = torch.randn(3, 64, dtype=torch.bfloat16)
    vectors[1, 5] = 0.0
    for column in range(64):
        trace, other = Trace(), vectors.clone()
        other.view(torch.int16)[2, column] ^= 1
        other[1, 5] = -0.0
        trace.note("before", vectors[:, None, :])
        trace.note("after", other)
        assert (trace.bits["before"] == trace.bits["after"]).tolist() == [True, True, False]


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            Found(41, 28, -1.0, -2.0, -2.5, "model.layers.12.mlp", 3, 38, 0.125),
            "as a prompt the first part that differs is model.layers.12.mlp (layers are numbered 0 to 27): at 3 of 40 "
            "tokens, the first of them token 38, by up to 1.2e-01",
        ),
        (Found(41, 28, -1.0, -2.0, -2.5), "all 28 layers agree, and the head does not: trainer -2, vLLM -2.5"),
        (Found(41, 28, -1.5, -2.0, -2.0), "alone the trainer's rank 0 gives the token -1.5: it is what the micro-"),
        (Found(41, 28, -1.0, -2.0, -2.0), "all 28 layers and the head agree: the difference is in how it was sampled"),
    ],
)
def test_what_was_found_is_said(found, said):
    assert said in verdict(found, -1.0)


RANK = """
import pathlib, torch, types
from rltool.weights.verify import layers
trainer = types.SimpleNamespace(runtime=types.SimpleNamespace(device=torch.device("cpu")), dtype=torch.float32)
print(layers._by_engine(trainer, [1, 2], pathlib.Path(".")), flush=True)
"""
VLLM = """
import os, pathlib, time, types
SamplingParams = TokensPrompt = lambda *given, **named: None
class LLM:
    def __init__(self, *given, **named):
        pathlib.Path("new").write_text(str(os.getpid()))
        pathlib.Path("new").rename("pid")
        time.sleep(600 * pathlib.Path("hangs").exists())
    def apply_model(self, function):
        model = types.SimpleNamespace(named_modules=dict, model=types.SimpleNamespace(layers=[]))
        return [function(model)]
    def generate(self, *given, **named):
        return [types.SimpleNamespace(prompt_logprobs=[None, {2: types.SimpleNamespace(logprob=-0.5)}])]
"""


@pytest.mark.parametrize("is_killed", [False, True])
def test_vllm_ends_with_a_rank_that_is_killed_and_with_no_other(tmp_path, is_killed):
    (tmp_path / "vllm.py").write_text(VLLM)
    if is_killed:
        (tmp_path / "hangs").touch()
    root = str(Path(__file__).resolve().parents[4])
    rank = subprocess.Popen(
        [sys.executable, "-c", RANK], cwd=tmp_path, env=os.environ | {"PYTHONPATH": root}, stdout=subprocess.PIPE
    )
    try:
        if not is_killed:
            assert rank.communicate(timeout=120)[0].split() == [b"-0.5"]
            return
        wait_until((tmp_path / "pid").exists)
    finally:
        rank.kill()
        rank.wait()
    vllm = int((tmp_path / "pid").read_text())
    try:
        wait_until(lambda: not psutil.pid_exists(vllm) or psutil.Process(vllm).status() == psutil.STATUS_ZOMBIE)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(vllm, signal.SIGKILL)


def wait_until(holds) -> None:
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)
