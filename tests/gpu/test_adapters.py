"""Adapters alone out of one GPU into a vLLM on another, over NCCL, while it generates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.trainer_speed import SHAPES
from benchmarks.whole_step import make_model
from rltool.config.sections import LoraConfig
from rltool.engines.endpoints import Endpoints
from tests.e2e.adapters import play
from tests.gpu.test_colocated import Job, compare_beside

pytestmark = [
    pytest.mark.gpu, pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL joins no two ranks on one GPU: it needs two GPUs"),
]  # fmt: skip

RANK = 8
SMALLER = {"0.5B": {"num_hidden_layers": 4, "vocab_size": 8192}}


class Served:
    """One vLLM on GPU 1, with CUDA graphs and places for four adapters."""

    def __init__(self, root: Path, shape: str) -> None:
        self.root = root
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(SHAPES, "test", SHAPES[shape] | SMALLER[shape])
            self.model = make_model(root / "model", "test", 512)
        self.endpoints = root / "runs/engines/endpoints.json"
        options = ("--max-model-len", "512", "--lora-rank", str(RANK), "--lora-slots", "4", "--gpus", "1")
        flags = ("--gpu-memory-utilization", "0.3", "--compilation-config", '{"backend": "eager"}')
        self.say("serve-engines", str(self.model), *options, "--run", "engines", "--detach", "--", *flags)

    def say(self, *words: str) -> str:
        environment = {**os.environ, "RLTOOL_RUNS": str(self.root / "runs"), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "rltool", *words]
        done = subprocess.run(command, cwd=self.root, env=environment, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(tmp_path_factory.mktemp("adapters"), "0.5B")
    try:
        yield made
    finally:
        made.say("stop", "--run", "engines")


def test_each_sequence_is_sampled_with_the_adapter_that_it_named_while_others_come_over_nccl(served, tmp_path):
    """Six of them; against transformers in float32 on GPU 0."""
    [engine] = Endpoints.load(served.endpoints).models["policy"].engines
    lora = LoraConfig(rank=RANK, alpha=RANK)
    found = play(
        engine, served.model, lora, tmp_path, transport="nccl", device="cuda:0", versions=6, load=8, tokens=384
    )
    print(found)
    assert found.own < 0.03, "the engine is in bfloat16"
    assert found.others > 5 * found.own


def test_a_run_sends_its_adapters_over_nccl_and_the_engine_samples_with_those_bits(served):
    """`debug weights --run` beside it, of A and B of seven products of each of four layers."""
    more = {
        "steps": "100000", "rollout.max_staleness": "2", "weights.transport": '"nccl"', "lora.rank": str(RANK),
        "weights.lora_sync": '"adapter"', "sampling.max_response_tokens": "256", "optimizer.lr": "1e-3",
        "eval.sets": "{}",
    }  # fmt: skip
    job = Job(served.root, f"@{served.endpoints}", **more)
    assert compare_beside(job, after=12) == (2 * 7 * 4, 0)
    steps, late = job.steps(), 0
    print([{name: value for name, value in step.items() if "sync" in name or "mismatch" in name} for step in steps])
    assert all(record["weights/paused_seconds"] == 0 for record in steps if "weights/paused_seconds" in record)
    for step, record in enumerate(steps[:12]):
        dump = json.loads((served.root / f"runs/one/rollouts/step_{step:06d}.json").read_text())
        of_samples = [{span[0] for span in sample["versions"]} for sample in dump["samples"]]
        assert all(len(versions) == 1 for versions in of_samples)
        late += min(int(version.rsplit(":", 1)[1]) for [version] in of_samples) < record["step"]
    assert late > 3, "requests were in flight over syncs"
