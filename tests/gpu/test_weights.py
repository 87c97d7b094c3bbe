"""Weights from a trainer into an external vLLM on the same GPU, where NCCL cannot be, and, sharded, on another one:
values compared, digests. And in FP8 into an SGLang, and into a vLLM from a trainer that rounds as it does."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.trainer_speed import SHAPES
from benchmarks.whole_step import make_model, make_prompts
from rltool.engines.client import EngineClient
from rltool.engines.endpoints import resolve
from rltool.engines.transfer import fp8
from tests.e2e.engines import sglang_python

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
on_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

STEPS = 4
"""The first two updates are loaded by vLLM's reload, the others replayed as copies."""
SMALLER = {
    "0.5B": {"num_hidden_layers": 4, "vocab_size": 8192},
    # SGLang does not tie the head of Qwen3 MoE to the embedding: its logits would all be 0.
    "30B-A3B": {
        "num_hidden_layers": 2, "vocab_size": 8192, "hidden_size": 512, "num_experts": 16, "tie_word_embeddings": False
    },
}
Rltool = Callable[..., str]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def rltool(work: Path) -> Rltool:
    def call(*words: str, runs: str = "runs") -> str:
        environment = {**os.environ, "RLTOOL_RUNS": str(work / runs), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "rltool", *words]
        done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
        return done.stdout + done.stderr

    return call


@pytest.fixture(scope="module")
def model(work: Path, request: pytest.FixtureRequest) -> Path:
    """Of the shape that a test names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SHAPES, "test", SHAPES[request.param] | SMALLER[request.param])
        return make_model(work / f"model-{request.param}", "test", 256)


@pytest.fixture(scope="module")
def endpoints(work: Path, rltool: Rltool, model: Path) -> Iterator[str]:
    """Of one vLLM that leaves the trainer most of the GPU."""
    yield from serving(work, rltool, model, f"engines-{model.name}")


@pytest.fixture(scope="module")
def elsewhere(work: Path, rltool: Rltool, model: Path) -> Iterator[str]:
    """The same on the second GPU."""
    yield from serving(work, rltool, model, f"elsewhere-{model.name}", "--gpus", "1")


def serving(work: Path, rltool: Rltool, model: Path, run: str, *options: str) -> Iterator[str]:
    options = ("--max-model-len", "128", "--run", run, "--detach", *options)
    memory = ("--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", "1073741824")
    rltool("serve-engines", str(model), *options, "--", *memory, "--enforce-eager")
    try:
        yield f"@{work}/runs/{run}/endpoints.json"
    finally:
        rltool("stop", "--run", run)


@pytest.mark.parametrize("transport", ["gloo", "disk"])
@pytest.mark.parametrize("model", SMALLER, indirect=True)
def test_an_engine_on_the_trainers_gpu_has_the_trainers_weights(work, rltool, model, endpoints, transport):
    """The run compares values itself after its first sync; digests of every tensor are compared with its checkpoint."""
    train_and_compare(work, rltool, model, endpoints, transport, {"trainer.share_gpus": "true"})


@on_two_gpus
@pytest.mark.parametrize("transport", ["nccl", "disk", "gloo"])
@pytest.mark.parametrize("model", SMALLER, indirect=True)
def test_sharded_weights_reach_an_engine_on_another_gpu(work, rltool, model, elsewhere, transport):
    """Of one rank, which holds everything: as large as one copy is what it sends, not more."""
    more = {"weights.sharded": "true", "weights.bucket_bytes": "16777216"}
    steps = train_and_compare(work, rltool, model, elsewhere, transport, more)
    syncs = [step for step in steps if "weights/rank_bytes" in step]
    print([{name: value for name, value in step.items() if "weights/" in name} for step in syncs])
    assert len(syncs) >= STEPS - 1
    assert all(step["weights/rank_bytes"] == step["weights/sync_bytes"] for step in syncs)


def train_and_compare(
    work: Path, rltool: Rltool, model: Path, endpoints: str, transport: str, more: dict[str, str]
) -> list[dict]:
    """The steps' metrics."""
    name = f"{model.name}-{transport}-{'sharded' if 'weights.sharded' in more else 'whole'}"
    rltool("init", f"{name}.toml")
    settings = {
        "model.path": f'"{model}"', "data.train": f'["{make_prompts(work / "prompts.jsonl")}"]', "steps": str(STEPS),
        "rollout.prompts_per_step": "8", "sampling.max_prompt_tokens": "32", "sampling.max_response_tokens": "32",
        "reward.function": '"benchmarks.rewards:letter_share"', "weights.transport": f'"{transport}"',
        "optimizer.lr": "1e-4",
    } | more  # fmt: skip
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    options = ("--config", f"{name}.toml", "--run", name, "--rollout-external", endpoints, "--gpus", "0")
    rltool("train", *options, *words)
    run, engines = work / "runs" / name, Path(endpoints[1:]).parent
    steps = [r for r in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "train/loss" in r]
    assert len(steps) == STEPS
    assert max(record["train/mismatch_kl"] for record in steps) < 2e-3
    assert "not as copies" not in "".join(log.read_text() for log in engines.rglob("engine*.log"))
    (checkpoint,) = (run / "checkpoints").glob("step_*")
    assert "the same weights as" in rltool("debug", "weights", endpoints, "--checkpoint", str(checkpoint))
    # The model that the run began with differs.
    with pytest.raises(AssertionError, match="other weights than"):
        rltool("debug", "weights", endpoints, "--checkpoint", str(model))
    return steps


def test_matrices_in_fp8_are_the_same_bits_on_a_gpu_as_on_a_cpu_also_in_parts(monkeypatch):
    matrix = torch.randn(1152, 896, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    whole = fp8.quantized(matrix)
    monkeypatch.setattr(fp8, "AT_ONCE", 1)
    assert len(fp8.parts(matrix)) == 9
    for other in (matrix, matrix.cuda()):
        for here, there in zip(whole, fp8.quantized(other), strict=True):
            assert torch.equal(here.view(torch.uint8), there.cpu().view(torch.uint8))
    monkeypatch.undo()
    for here, there in zip(fp8.quantized(matrix), fp8.quantized(matrix.cuda()), strict=True):
        assert torch.equal(here.view(torch.uint8), there.cpu().view(torch.uint8))


@pytest.mark.parametrize("model", ["0.5B"], indirect=True)
def test_a_trainer_that_rounds_its_weights_is_nearer_to_a_vllm_in_fp8(work, rltool, model):
    """What engines round of inputs remains, 0.48 of the KL of SmolLM2 on an H200."""
    engines = serving(work, rltool, model, "in-fp8", "--quantization", "fp8")
    endpoints, found = next(engines), {}
    try:
        for fake in ("false", "true"):
            rltool("init", f"fake-{fake}.toml")
            settings = {
                "model.path": f'"{model}"', "model.dtype": '"bfloat16"', "steps": "3", "optimizer.lr": "1e-6",
                "data.train": f'["{make_prompts(work / "prompts.jsonl")}"]', "rollout.prompts_per_step": "16",
                "sampling.max_prompt_tokens": "32", "sampling.max_response_tokens": "32",
                "reward.function": '"benchmarks.rewards:letter_share"', "weights.transport": '"gloo"',
                "engines.quantization": '"fp8"', "trainer.fake_quantization": fake, "trainer.share_gpus": "true",
                "monitor.logprob_difference_limit": "1.0", "weights.verify_tolerance": "1.0",
            }  # fmt: skip
            words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
            options = ("--config", f"fake-{fake}.toml", "--run", f"fake-{fake}", "--rollout-external", endpoints)
            rltool("train", *options, "--gpus", "0", *words)
            lines = (work / "runs" / f"fake-{fake}" / "metrics.jsonl").read_text().splitlines()
            kl = [step["train/mismatch_kl"] for step in map(json.loads, lines) if "train/loss" in step]
            assert len(kl) == 3
            found[fake] = sum(kl) / len(kl)
    finally:
        next(engines, None)
    print(found)
    assert found["true"] < 0.75 * found["false"]


SGLANG = (
    "--mem-fraction-static", "0.9", "--max-total-tokens", "65536", "--max-running-requests", "64",
    "--attention-backend", "triton", "--sampling-backend", "pytorch", "--disable-cuda-graph",
    "--mm-feature-transport", "cpu",
)  # fmt: skip
"""Kernels that need no FlashInfer; the cache has a set size, and others may have most of the GPU."""
SAME_KERNELS = 1e-3
"""Largest difference of log-probabilities of two engines with the same bytes, which are given the same texts one by
one: the same kernels run in the same shapes, so 0 is expected; one rounding of a bf16 logit is 16 times as much."""


def sglang(work: Path, rltool: Rltool, model: Path, runs: str, *options: str) -> Iterator[str]:
    """runs: for two engines on one GPU, a directory of runs for each, which do not know of each other."""
    words = ("serve-engines", str(model), "--engine", "sglang", "--engine-python", str(sglang_python()), "--run", "fp8")
    more = ("--max-model-len", "128", "--dtype", "bfloat16", "--no-join", "--detach", *options, "--", *SGLANG)
    rltool(*words, *more, runs=runs)
    try:
        yield f"@{work}/{runs}/fp8/endpoints.json"
    finally:
        rltool("stop", "--run", "fp8", runs=runs)


def scores(endpoints: str) -> list[float]:
    """Log-probabilities of tokens that the engine is given."""

    async def ask() -> list[float]:
        async with EngineClient() as client:
            [engine] = resolve([endpoints]).engines
            engine = engine.probed(await client.probe(engine))
            texts = [[(7 * i + 13 * k) % 60 + 2 for i in range(40)] for k in range(6)]
            found = [await client.score(engine, text, timeout=120.0) for text in texts]
            return [value for each in found for value in each]

    return asyncio.run(ask())


TO_SGLANG = {
    # where the engine is, and what reaches it there
    "gloo": ("0", {"trainer.share_gpus": "true"}),
    "disk": ("0", {"trainer.share_gpus": "true"}),
    "nccl": ("1", {}),
}


@pytest.mark.parametrize(
    ("model", "transport"),
    [
        pytest.param("0.5B", "gloo", id="gloo"),
        pytest.param("0.5B", "disk", id="disk"),
        pytest.param("0.5B", "nccl", id="nccl", marks=on_two_gpus),
        pytest.param("30B-A3B", "gloo", id="experts"),
    ],
    indirect=["model"],
)
def test_an_sglang_in_fp8_computes_as_one_that_loads_what_convert_ckpt_writes(
    work, rltool, model, transport, monkeypatch
):
    """serve-engines --quantization fp8 on the bfloat16 model, three steps, and a fresh engine on the last weights."""
    gpu, more = TO_SGLANG[transport]
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")  # as SGLang sets it for itself
    synced, loaded = (f"{what}-{model.name}-{transport}" for what in ("synced", "loaded"))
    serving = sglang(work, rltool, model, synced, "--quantization", "fp8", "--gpus", gpu)
    endpoints = next(serving)
    try:
        [copy] = (work / f"{synced}/fp8/quantized").glob("[!.]*")
        assert (copy / "tokenizer.json").exists()
        before, name = scores(endpoints), f"to-sglang-{model.name}-{transport}"
        rltool("init", f"{name}.toml")
        settings = {
            "model.path": f'"{model}"', "data.train": f'["{make_prompts(work / "prompts.jsonl")}"]', "steps": "3",
            "rollout.prompts_per_step": "8", "sampling.max_prompt_tokens": "32", "sampling.max_response_tokens": "32",
            "reward.function": '"benchmarks.rewards:letter_share"', "weights.transport": f'"{transport}"',
            "optimizer.lr": "1e-3", "engines.quantization": '"fp8"', "monitor.logprob_difference_limit": "1.0",
            "weights.verify_tolerance": "1.0",
        } | more  # fmt: skip
        words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        options = ("--config", f"{name}.toml", "--run", name, "--rollout-external", endpoints, "--gpus", "0")
        rltool("train", *options, *words)
        after, run = scores(endpoints), work / "runs" / name
        steps = [r for r in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "train/loss" in r]
        print([{key: step[key] for key in step if "mismatch" in key or "abs_diff" in key} for step in steps])
        assert len(steps) == 3 and len({step["weight_version"] for step in steps[:-1]}) == 2
        assert all(math.isfinite(step["train/mismatch_kl"]) for step in steps)
        assert max(step["train/mismatch_kl"] for step in steps) < 0.02
        (checkpoint,), written = (run / "checkpoints").glob("step_*"), work / f"written-{model.name}-{transport}"
        rltool("convert-ckpt", str(checkpoint), str(written), "--to", "hf", "--quantization", "fp8", "--no-verify")
        other = sglang(work, rltool, written, loaded, "--gpus", gpu)
        fresh = next(other)
        try:
            expected = scores(fresh)
            said = rltool("debug", "weights", endpoints, "--engine", fresh)
        finally:
            next(other, None)
    finally:
        next(serving, None)
    print(said, "largest difference:", largest(after, expected), "of the weights before:", largest(before, expected))
    assert largest(after, expected) <= SAME_KERNELS < 0.05 < largest(before, expected)
    # Of matrices in FP8 SGLang's digests are of what they are as bfloat16.
    equal, compared = map(int, re.search(r"(\d+) of (\d+) parameters are bit-equal", said).groups())
    layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    assert "the same weights as" in said and equal == compared >= layers * 6


def largest(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))
