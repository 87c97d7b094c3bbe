"""Adapters alone into a vLLM that generates: over NCCL from another GPU; of experts, also into a stock server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from benchmarks.trainer_speed import SHAPES
from benchmarks.whole_step import make_model
from rltool.config.sections import LoraConfig
from rltool.engines.endpoints import Endpoints, EngineEndpoint
from tests.e2e.adapters import play
from tests.e2e.engines import free_port
from tests.gpu.test_colocated import Job, compare_beside

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
on_two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="NCCL joins no two ranks on one GPU: it needs two GPUs"
)

RANK = 8
LORA = LoraConfig(rank=RANK, alpha=RANK)
SMALLER = {
    "0.5B": {"num_hidden_layers": 4, "vocab_size": 8192},
    "30B-A3B": {"num_hidden_layers": 2, "vocab_size": 8192, "hidden_size": 512, "num_experts": 16},
}
START_SECONDS = 400.0
FLAGS = ("--gpu-memory-utilization", "0.3", "--compilation-config", '{"backend": "eager"}')
DIFFERENCE = 0.03
"""Of an engine in bfloat16 from transformers in float32, at most."""


def small_model(root: Path, shape: str) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SHAPES, "test", SHAPES[shape] | SMALLER[shape])
        return make_model(root / "model", "test", 512)


class Served:
    """One vLLM with rltool's plugin, CUDA graphs and places for four adapters."""

    def __init__(self, root: Path, shape: str, gpu: str) -> None:
        self.root, self.model = root, small_model(root, shape)
        self.endpoints = root / "runs/engines/endpoints.json"
        options = ("--max-model-len", "512", "--lora-rank", str(RANK), "--lora-slots", "4", "--gpus", gpu)
        self.say("serve-engines", str(self.model), *options, "--run", "engines", "--detach", "--", *FLAGS)

    def say(self, *words: str) -> str:
        environment = {**os.environ, "RLTOOL_RUNS": str(self.root / "runs"), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "rltool", *words]
        done = subprocess.run(
            command, cwd=self.root, env=environment, capture_output=True, text=True, timeout=START_SECONDS
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
        return done.stdout + done.stderr

    @property
    def engine(self) -> EngineEndpoint:
        [engine] = Endpoints.load(self.endpoints).models["policy"].engines
        return engine


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(tmp_path_factory.mktemp("adapters"), "0.5B", "1")
    try:
        yield made
    finally:
        made.say("stop", "--run", "engines")


@on_two_gpus
def test_each_sequence_is_sampled_with_the_adapter_that_it_named_while_others_come_over_nccl(served, tmp_path):
    """Six of them; against transformers on GPU 0."""
    sizes = {"versions": 6, "load": 8, "tokens": 384}
    found = play(served.engine, served.model, LORA, tmp_path, transport="nccl", device="cuda:0", **sizes)
    print(found)
    assert found.own < DIFFERENCE and found.others > 5 * found.own


@on_two_gpus
def test_a_run_sends_its_adapters_over_nccl_and_the_engine_samples_with_those_bits(served):
    """`debug weights --run` beside it, of A and B of seven products of each of four layers."""
    more = {
        "steps": "100000", "rollout.max_staleness": "2", "weights.transport": '"nccl"', "lora.rank": str(RANK),
        "weights.lora_sync": '"adapter"', "sampling.max_response_tokens": "256", "optimizer.lr": "1e-3",
        "eval.sets": "{}", "rollout.dump": "true",
    }  # fmt: skip
    job = Job(served.root, f"@{served.endpoints}", **more)
    assert compare_beside(job, after=12)[0] == 2 * 7 * 4
    steps, late = job.steps(), 0
    print([{name: value for name, value in step.items() if "sync" in name or "mismatch" in name} for step in steps])
    assert all(record["weights/paused_seconds"] == 0 for record in steps if "weights/paused_seconds" in record)
    for step, record in enumerate(steps[:12]):
        dump = json.loads((served.root / f"runs/one/rollouts/step_{step:06d}.json").read_text())
        of_samples = [{span[0] for span in sample["versions"]} for sample in dump["samples"]]
        assert all(len(versions) == 1 for versions in of_samples)
        late += min(int(version.rsplit(":", 1)[1]) for [version] in of_samples) < record["step"]
    assert late > 3, "requests were in flight over syncs"


@pytest.mark.parametrize("transport", ["gloo", pytest.param("nccl", marks=on_two_gpus)])
def test_experts_are_sampled_with_the_adapters_that_each_sequence_named_while_others_come(tmp_path, transport):
    made = Served(tmp_path, "30B-A3B", "1" if transport == "nccl" else "0")
    try:
        found = play(made.engine, made.model, LORA, tmp_path, transport=transport, device="cuda:0", tokens=256)
    finally:
        made.say("stop", "--run", "engines")
    print(found)
    assert found.own < DIFFERENCE and found.others > 5 * found.own


def test_a_stock_vllm_samples_with_adapters_of_experts_out_of_directories(tmp_path):
    model, port, log = small_model(tmp_path, "30B-A3B"), free_port(), tmp_path / "vllm.log"
    url = f"http://127.0.0.1:{port}"
    flags = f"""--model {model} --served-model-name policy --host 127.0.0.1 --port {port} --enable-lora
        --max-lora-rank {RANK} --max-loras 4 --max-cpu-loras 4 --enable-scale-out --logprobs-mode processed_logprobs
        --max-model-len 512"""
    stock = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_SERVER_DEV_MODE": "1", "VLLM_PLUGINS": ""}
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags.split(), *FLAGS]
    with log.open("wb") as file:
        server = subprocess.Popen(
            argv, env=os.environ | stock | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "0"}, stdout=file,
            stderr=file, cwd=tmp_path, start_new_session=True,
        )  # fmt: skip
    try:
        ends = time.monotonic() + START_SECONDS
        while not healthy(url):
            assert server.poll() is None and time.monotonic() < ends, log.read_text()[-6000:]
            time.sleep(0.5)
        engine = EngineEndpoint(url=url, dialect="vllm")
        found = play(engine, model, LORA, tmp_path, transport="adapters", device="cuda:0", tokens=256)
    finally:
        os.killpg(server.pid, 9)
        server.wait(60)
    print(found)
    assert found.own < DIFFERENCE and found.others > 5 * found.own


def healthy(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
        return True
    return False
