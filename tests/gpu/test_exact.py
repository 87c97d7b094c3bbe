"""algorithm.exact: the trainer's log-probabilities are vLLM's bit for bit, and its gradients those of the usual
kernels."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.trainer_speed import SHAPES
from benchmarks.whole_step import make_model
from tests.e2e.engines import free_port
from tests.e2e.megatron_models import make_trainer, policy_batch
from tests.gpu.test_colocated import Job

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

MODELS = {"qwen3": SHAPES["qwen3-0.6B"], "qwen2, with biases": SHAPES["1.5B"]}
SMALL = {"num_hidden_layers": 6, "vocab_size": 8192}


@pytest.fixture(params=MODELS)
def model(request, tmp_path, monkeypatch) -> Path:
    monkeypatch.setitem(SHAPES, "test", MODELS[request.param] | SMALL)
    return spread(make_model(tmp_path / "model", "test", 1024))


def spread(directory: Path) -> Path:
    """Norms and biases are not all alike, and logits are far apart."""
    from safetensors.torch import load_file, save_file

    [file] = directory.glob("*.safetensors")
    weights, generator = load_file(file), torch.Generator().manual_seed(1)
    for name, tensor in weights.items():
        noise = torch.randn(tensor.shape, generator=generator)
        if "norm" in name or name.endswith("bias"):
            weights[name] = (tensor.float() + 0.2 * noise).to(tensor.dtype)
        elif "embed" in name:
            weights[name] = tensor * 4
    save_file(weights, file, metadata={"format": "pt"})
    return directory


def test_every_log_probability_is_vllms_as_it_sampled_and_as_a_prompt(model, tmp_path):
    """With CUDA graphs; without `exact` the same comparison shows bf16's rounding."""
    rows = ({"prompt": "a few words " * n} for n in (1, 3, 8, 20, 33) * 5)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("--data", "prompts.jsonl", "--samples", "25", "--tokens", "150", "--streams", "0", "--no-transformers")
    command = [sys.executable, "-m", "benchmarks.agreement", str(model), "--exact", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"')]
    found = {row["pair"]: row["max"] for row in map(json.loads, lines) if "pair" in row}
    assert found["trainer, exact, vLLM as it sampled"] == found["trainer, exact, vLLM as prompts"] == 0.0
    assert found["trainer, vLLM as it sampled"] > 1e-3


def test_gradients_are_those_of_the_usual_kernels(model):
    """Relative to the norm of each parameter's, as far apart as two ways to round in bf16 are."""
    batch, found = policy_batch([70, 33, 200], seed=3), {}
    for exact in (False, True):
        place = SimpleNamespace(rank=0, world_size=1, port=free_port())
        options = {"algorithm": {"loss": "sft"} if not exact else {"loss": "sft", "exact": True}}
        with closing(make_trainer(place, model, dtype="bfloat16", **options)) as trainer:
            trainer.forward_backward([batch], global_loss_tokens=batch.num_loss_tokens)
            found[exact] = {name: p.main_grad.clone() for name, p in trainer.gpt.named_parameters()}
    for name, usual in found[False].items():
        assert float((found[True][name] - usual).norm() / usual.norm()) < 0.05, name


def test_a_colocated_run_stays_exact_while_it_learns(tmp_path, monkeypatch):
    monkeypatch.setitem(SHAPES, "test", SHAPES["qwen3-0.6B"] | SMALL)
    job = Job(tmp_path, 2, **{"algorithm.exact": "true", "optimizer.lr": "1e-4", "trainer.recompute": '"selective"'})
    assert job.start(*job.words).wait(800) == 0, job.output.read_text()[-6000:]
    steps = job.steps()
    assert [step["train/logprob_abs_diff_max"] for step in steps] == [0.0] * len(steps) != []
    assert all(step["train/grad_norm"] > 0 and step["train/logprob_compared_tokens"] > 500 for step in steps)
