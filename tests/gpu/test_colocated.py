"""The whole loop on one GPU: `rltool init`'s defaults, engines on the trainer's GPU, weights over CUDA IPC."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from benchmarks.gpu_memory import gpu_memory_gib
from benchmarks.trainer_speed import SHAPES
from benchmarks.whole_step import make_model, make_prompts

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

STEPS = 4


def test_a_run_with_the_defaults_of_init_trains_on_the_engines_gpu(tmp_path, monkeypatch):
    """vLLM sleeps while the trainer works; every step's log-probabilities agree; nothing stays on the GPU."""
    monkeypatch.setitem(SHAPES, "test", SHAPES["0.5B"] | {"num_hidden_layers": 4, "vocab_size": 8192})
    model, data = make_model(tmp_path / "model", "test", 256), make_prompts(tmp_path / "prompts.jsonl")
    environment = {**os.environ, "RLTOOL_RUNS": str(tmp_path / "runs"), "HF_HUB_OFFLINE": "1"}

    def rltool(*words: str) -> str:
        command = [sys.executable, "-m", "rltool", *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=800)
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
        return done.stdout

    rltool("init", "run.toml")
    settings = {
        "model.path": f'"{model}"', "data.train": f'["{data}"]', "steps": str(STEPS), "engines.mode": '"colocate"',
        "engines.groups": "[{}]", "rollout.prompts_per_step": "32", "sampling.max_prompt_tokens": "32",
        "sampling.max_response_tokens": "64", "reward.function": '"benchmarks.rewards:letter_share"',
        "checkpoint.save_at_end": "false",
    }  # fmt: skip
    before = gpu_memory_gib("0")
    words = (word for key, value in settings.items() for word in ("--set", f"{key}={value}"))
    rltool("train", "--config", "run.toml", "--run", "one", *words)
    lines = (tmp_path / "runs/one/metrics.jsonl").read_text().splitlines()
    steps = [record for record in map(json.loads, lines) if "train/loss" in record]
    assert len(steps) == STEPS
    assert json.loads((tmp_path / "runs/one/config.json").read_text())["config"]["model"]["dtype"] == "bfloat16"
    assert max(record["train/mismatch_kl"] for record in steps) < 2e-3
    assert max(record["train/logprob_abs_diff_mean"] for record in steps) < 0.03
    # Engines that end with the run do not get the last weights.
    assert len({record["weight_version"] for record in steps[:-1]}) == STEPS - 1
    assert gpu_memory_gib("0") < before + 1.0
