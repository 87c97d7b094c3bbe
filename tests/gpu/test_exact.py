"""algorithm.exact: the trainer's log-probabilities are vLLM's bit for bit, and its gradients those of the usual
kernels."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.trainer_speed import SHAPES
from benchmarks.whole_step import make_model
from tests.e2e.engines import free_port
from tests.e2e.megatron_models import make_trainer, policy_batch
from tests.gpu.test_colocated import STEPS, Job

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

MODELS = {
    "qwen3": SHAPES["qwen3-0.6B"],
    "qwen2, with biases": SHAPES["1.5B"],
    "llama, heads of 64": SHAPES["0.5B"] | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
}
SMALL = {"num_hidden_layers": 6, "vocab_size": 8192}
LEARNS = {"algorithm.exact": "true", "optimizer.lr": "1e-4"}


def on_path(*more: Path) -> dict[str, str]:
    """The variable by which processes in another directory find rltool, benchmarks and `more`."""
    here = str(Path(__file__).resolve().parents[2])
    before = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {"PYTHONPATH": os.pathsep.join([*map(str, more), here, *map(os.path.abspath, before)])}


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
    words += ("--engine", '{"gpu_memory_utilization": 0.15, "kv_cache_memory_bytes": 4294967296}')
    command = [sys.executable, "-m", "benchmarks.agreement", str(model), "--exact", *words]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | on_path(), capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"')]
    found = {row["pair"]: row["max"] for row in map(json.loads, lines) if "pair" in row}
    assert found["trainer, exact, vLLM as it sampled"] == found["trainer, exact, vLLM as prompts"] == 0.0
    assert found["trainer, vLLM as it sampled"] > 1e-3


def gradients_into(file: Path, model: Path, exact: bool) -> None:
    from safetensors.torch import save_file

    batch, place = policy_batch([70, 33, 200], seed=3), SimpleNamespace(rank=0, world_size=1, port=free_port())
    options = {"algorithm": {"loss": "sft", "exact": exact}}
    with closing(make_trainer(place, model, dtype="bfloat16", **options)) as trainer:
        trainer.forward_backward([batch], global_loss_tokens=batch.num_loss_tokens)
        save_file({name: p.main_grad.cpu().contiguous() for name, p in trainer.gpt.named_parameters()}, file)


def test_gradients_are_those_of_the_usual_kernels(model, tmp_path):
    """Relative to the norm of each parameter's, as far apart as two ways to round in bf16 are. Each kind of trainer in
    a process of its own: what an exact one replaces stays replaced."""
    from safetensors.torch import load_file

    for exact in (False, True):
        process = get_context("spawn").Process(target=gradients_into, args=(tmp_path / str(exact), model, exact))
        process.start()
        process.join(300)
        assert process.exitcode == 0
    usual, found = load_file(tmp_path / "False"), load_file(tmp_path / "True")
    assert found.keys() == usual.keys() and len(usual) > 6 * 6
    for name, gradient in usual.items():
        assert float((found[name] - gradient).norm() / gradient.norm()) < 0.05, name


def test_a_colocated_run_stays_exact_while_it_learns(tmp_path, monkeypatch):
    monkeypatch.setitem(SHAPES, "test", SHAPES["qwen3-0.6B"] | SMALL)
    job = Job(tmp_path, 2, **LEARNS | {"trainer.recompute": '"selective"'})
    stays_exact(job)


def stays_exact(job: Job) -> None:
    assert run(job) == 0, job.output.read_text()[-6000:]
    steps = job.steps()
    assert [step["train/logprob_abs_diff_max"] for step in steps] == [0.0] * STEPS
    assert all(step["train/grad_norm"] > 0 and step["train/logprob_compared_tokens"] > 500 for step in steps)


def run(job: Job) -> int:
    """Its exit code. It is ended, with its engines, where the test is."""
    process = job.start(*job.words)
    try:
        return process.wait(800)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)


def test_a_run_with_engines_that_were_started_exactly_on_its_gpu_stays_exact(tmp_path, monkeypatch):
    """`serve-engines --exact`, awake beside the trainer, which sends them weights over gloo."""
    monkeypatch.setitem(SHAPES, "test", SHAPES["qwen3-0.6B"] | SMALL)
    more = {"trainer.share_gpus": "true", "weights.transport": '"gloo"'}
    job = Job(tmp_path, "@runs/engines/endpoints.json", **LEARNS | more)
    options = ("--exact", "--gpus", "0", "--run", "engines", "--detach")
    memory = ("--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", "4294967296")
    try:
        started = job.start("serve-engines", "model", *options, "--", *memory).wait(400)
        assert started == 0, job.output.read_text()[-6000:]
        stays_exact(job)
    finally:
        job.start("stop", "--run", "engines").wait(120)


SPOILT = 4
"""The layer of the trainer alone that is spoilt below."""

SPOILS = f"""
import sys
from importlib.machinery import PathFinder

class Spoils:
    def find_spec(self, name, path=None, target=None):
        if name != "rltool.megatron.exact":
            return None
        spec = PathFinder.find_spec(name, path)
        usual = spec.loader.exec_module
        def exec_module(module):
            usual(module)
            replace_layers = module.replace_layers
            def and_spoil(model, hf_path):
                replace_layers(model, hf_path)
                norm = model.decoder.layers[{SPOILT}].pre_mlp_layernorm
                forward = norm.forward
                def spoilt(x):
                    out = forward(x)
                    factors = out.new_ones(out.size(-1))
                    factors[7] += 2.0**-7
                    return out * factors
                norm.forward = spoilt
            module.replace_layers = and_spoil
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Spoils())
"""


def test_one_rounding_in_one_layer_ends_the_run_before_a_step_with_the_name_of_that_layer(tmp_path, monkeypatch):
    """One number of each vector, in the trainer's processes, one bit off: in a colocated run whose engines sleep while
    a vLLM of the same weights is asked."""
    monkeypatch.setitem(SHAPES, "test", SHAPES["qwen3-0.6B"] | SMALL)
    (tmp_path / "spoils").mkdir()
    (tmp_path / "spoils/sitecustomize.py").write_text(SPOILS)
    job = Job(tmp_path, 1, **LEARNS)
    job.environment |= on_path(tmp_path / "spoils")
    assert run(job) == 1
    said = " ".join(job.output.read_text().split())
    assert "algorithm.exact: looking for the layer" in said, said[-6000:]
    named = f"model.layers.{SPOILT}.post_attention_layernorm (layers are numbered 0 to 5)"
    assert f"the first part that differs is {named}" in said, said[-6000:]
    assert "no optimizer step was made on this rollout. Step 0, sample " in said and job.steps() == []
    [found] = (tmp_path / "runs/one/exact").iterdir()
    assert not (found / "model").exists() and (found / "row.json").exists()
