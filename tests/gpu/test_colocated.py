"""The whole loop on one GPU: `rltool init`'s defaults, engines on the trainer's GPU, weights over CUDA IPC."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu_memory import gpu_memory_gib
from benchmarks.trainer_speed import SHAPES
from benchmarks.whole_step import make_model, make_prompts
from tests.e2e.engines import sglang_python
from tests.gpu.test_weights import SGLANG, on_two_gpus

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

STEPS = 4
PARTS = ("wait", "sleep", "onload", "train", "samples", "reference", "offload", "sync", "eval")
"""time/NAME_seconds that are together the whole step (docs/metrics.md)."""
DIFFERENCES = {"train/mismatch_kl": 2e-3, "train/logprob_abs_diff_mean": 0.03}
"""Of engine and trainer in bf16, at most."""
END_SECONDS = 30.0
"""From SIGTERM after the last step to the end of the command: 3 s, and room for an engine that is slow to go."""


FAMILIES = {
    "30B-A3B": {"num_hidden_layers": 2, "hidden_size": 512, "num_experts": 16},
    "moonlight": {"num_hidden_layers": 3, "n_routed_experts": 16},
    "gpt-oss-20b": {"num_hidden_layers": 2, "num_local_experts": 8},
    "olmo3-7B": {"num_hidden_layers": 4, "hidden_size": 2048, "intermediate_size": 5504, "num_attention_heads": 16}
    | {"num_key_value_heads": 16, "sliding_window": 64},
}
"""Shape -> what of it is smaller here: heads and experts have their sizes."""
PARAMETERS = {"30B-A3B": 20, "moonlight": 44, "gpt-oss-20b": 29, "olmo3-7B": 35}
"""Of these in vLLM: what it fuses is one, and latent attention has two more a layer that it makes itself."""


class Job:
    """A run of a small model with the defaults of `init`, in a directory of its own. engines: how many on its own GPU,
    or an endpoints file of others."""

    def __init__(self, root: Path, engines: int | str, **more: str) -> None:
        model, data = make_model(root / "model", "test", 256), make_prompts(root / "prompts.jsonl")
        self.root = root
        self.environment = {**os.environ, "RLTOOL_RUNS": str(root / "runs"), "HF_HUB_OFFLINE": "1"}
        own = {
            "engines.mode": '"colocate"', "engines.groups": f"[{{count={engines},engines_per_gpu={engines}}}]"
        }  # fmt: skip
        settings = (own if isinstance(engines, int) else {}) | {
            "model.path": f'"{model}"', "data.train": f'["{data}"]', "steps": str(STEPS),
            "rollout.prompts_per_step": "32", "sampling.max_prompt_tokens": "32", "sampling.max_response_tokens": "64",
            "reward.function": '"benchmarks.rewards:letter_share"', "checkpoint.save_at_end": "false",
        } | more  # fmt: skip
        self.words = ["train", "--config", "run.toml", "--run", "one"]
        self.words += [] if isinstance(engines, int) else ["--rollout-external", engines, "--gpus", "0"]
        self.words += (word for key, value in settings.items() for word in ("--set", f"{key}={value}"))
        self.start("init", "run.toml").wait(120)
        self.output = root / "out"

    def start(self, *words: str) -> subprocess.Popen[str]:
        """In a process group of its own; what it says goes to `output`."""
        with (self.root / "out").open("w") as out:
            return subprocess.Popen(
                [sys.executable, "-m", "rltool", *words], cwd=self.root, env=self.environment, stdout=out,
                stderr=subprocess.STDOUT, text=True, process_group=0,
            )  # fmt: skip

    def steps(self) -> list[dict]:
        file = self.root / "runs/one/metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [record for record in map(json.loads, lines) if "train/loss" in record]


@pytest.fixture
def small_model(monkeypatch):
    monkeypatch.setitem(SHAPES, "test", SHAPES["0.5B"] | {"num_hidden_layers": 4, "vocab_size": 8192})


@pytest.mark.parametrize("engines", [1, 2])
def test_a_run_with_the_defaults_of_init_trains_on_the_engines_gpu(tmp_path, small_model, engines):
    """vLLM sleeps while the trainer works; every step's log-probabilities agree; nothing stays on the GPU."""
    job, before = Job(tmp_path, engines), gpu_memory_gib("0")
    assert job.start(*job.words).wait(800) == 0, job.output.read_text()[-6000:]
    steps, said = job.steps(), job.output.read_text()
    assert len(steps) == STEPS
    assert json.loads((tmp_path / "runs/one/config.json").read_text())["config"]["model"]["dtype"] == "bfloat16"
    assert all(max(record[name] for record in steps) < limit for name, limit in DIFFERENCES.items())
    assert len({record["weight_version"] for record in steps[:-1]}) == STEPS - 1, "the last one nobody reads"
    assert {record["rollout/engines_serving"] for record in steps} == {engines}
    assert "a KV cache of " in said
    for record in steps:
        parts = sum(record.get(f"time/{part}_seconds", 0.0) for part in PARTS)
        assert parts == pytest.approx(record["time/step_seconds"], rel=0.02)
    assert gpu_memory_gib("0") < before + 1.0


def test_sigterm_to_the_process_group_after_the_last_step_gives_the_memory_back(tmp_path, small_model):
    job, before = Job(tmp_path, 1), gpu_memory_gib("0")
    process = job.start(*job.words)
    try:
        ends = time.monotonic() + 800
        while len(job.steps()) < STEPS:
            assert process.poll() is None and time.monotonic() < ends, job.output.read_text()[-6000:]
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(END_SECONDS) == 0, job.output.read_text()[-6000:]
    finally:
        if process.poll() is None:
            process.kill()
    assert gpu_memory_gib("0") < before + 1.0
    assert "SIGTERM: all steps are done" in job.output.read_text()


@pytest.mark.parametrize("shape", FAMILIES)
def test_a_familys_engine_has_the_trainers_bytes_after_two_syncs_over_ipc(tmp_path, monkeypatch, shape):
    """`debug weights --run` beside the run: digests of every parameter, experts as vLLM stacks them included, and none
    left out."""
    monkeypatch.setitem(SHAPES, "test", SHAPES[shape] | FAMILIES[shape] | {"vocab_size": 8192})
    groups = '[{count=1,engines_per_gpu=1,flags=["--enforce-eager"]}]'
    more = {"steps": "100000", "engines.groups": groups, "weights.transport": '"ipc"', "optimizer.lr": "1e-4"}
    assert compare_beside(Job(tmp_path, 1, **more)) == (PARAMETERS[shape], 0)


SHARDED = {
    # engine's group; the trainer's layout; the largest part of one copy of the weights that a rank may have sent
    "tp 2 to tp 2": ("0.5B", "count=1,tp=2", {"trainer.tensor_parallel": "2"}, 0.55),
    "tp 2 to two of tp 1": ("0.5B", "count=2,tp=1", {"trainer.tensor_parallel": "2"}, 1.1),
    "ep 2 to tp 2": ("30B-A3B", "count=1,tp=2", {"trainer.expert_parallel": "2"}, 0.65),
}
SMALLER = FAMILIES | {"0.5B": {"num_hidden_layers": 4}}


@on_two_gpus
@pytest.mark.parametrize("case", SHARDED)
def test_workers_read_what_they_store_out_of_the_memory_of_ranks_on_both_gpus(tmp_path, monkeypatch, case):
    """weights.sharded over CUDA IPC: no rank gathers, and engines have the trainer's bytes."""
    shape, group, layout, most = SHARDED[case]
    monkeypatch.setitem(SHAPES, "test", SHAPES[shape] | SMALLER[shape] | {"vocab_size": 8192})
    groups = f'[{{{group},engines_per_gpu=1,flags=["--enforce-eager"]}}]'
    more = {
        "steps": "100000", "engines.groups": groups, "weights.transport": '"ipc"', "weights.sharded": "true",
        "weights.bucket_bytes": "16777216", "optimizer.lr": "1e-4", "trainer.world_size": "2", **layout,
    }  # fmt: skip
    job = Job(tmp_path, 1, **more)
    job.words += ["--gpus", "0,1"]
    compared, left_out = compare_beside(job)
    syncs = [step for step in job.steps() if "weights/rank_bytes" in step]
    print(compared, left_out, [{name: value for name, value in s.items() if "weights/" in name} for s in syncs[:3]])
    assert compared >= 20 and left_out == 0 and len(syncs) >= 3
    for step in syncs:
        assert 0 < step["weights/rank_bytes"] < most * step["weights/sync_bytes"]
        assert step["weights/failed_engines"] == 0


@pytest.mark.parametrize(("shape", "products"), [("0.5B", 7 * 4), ("30B-A3B", (4 + 3 * 16) * 2)])
def test_adapters_come_over_ipc_into_engines_that_sleep_and_keep_their_weights(tmp_path, monkeypatch, shape, products):
    """Two engines with CUDA graphs; A and B of all products, of experts too, are what they sample with."""
    monkeypatch.setitem(SHAPES, "test", SHAPES[shape] | SMALLER[shape] | {"vocab_size": 8192})
    more = {
        "steps": "100000", "weights.transport": '"ipc"', "weights.lora_sync": '"adapter"', "lora.rank": "8",
        "optimizer.lr": "1e-3",
    }  # fmt: skip
    job = Job(tmp_path, 2, **more)
    assert compare_beside(job)[0] == 2 * products
    steps = job.steps()
    print([{name: value for name, value in step.items() if "sync" in name or "wake" in name} for step in steps])
    assert {step["rollout/engines_serving"] for step in steps} == {2}


def test_an_sglang_in_fp8_sleeps_and_is_sent_it_over_ipc(tmp_path, small_model):
    """Norms, biases and embeddings are compared with the trainer's, matrices in FP8 by what they compute."""
    sglang = {"count": 1, "engines_per_gpu": 1, "engine": "sglang", "engine_python": str(sglang_python())}
    group = ",".join(f"{key}={json.dumps(value)}" for key, value in (sglang | {"flags": SGLANG}).items())
    more = {
        "steps": "100000", "engines.groups": f"[{{{group}}}]", "engines.quantization": '"fp8"', "optimizer.lr": "1e-3",
        "weights.transport": '"ipc"', "monitor.logprob_difference_limit": "1.0", "weights.verify_tolerance": "1.0",
    }  # fmt: skip
    job = Job(tmp_path, 1, **more)
    compared, left_out = compare_beside(job, limits={"train/mismatch_kl": 0.2})
    print(compared, left_out, [step["train/mismatch_kl"] for step in job.steps()])
    assert compared == 2 + 4 * 3 and left_out >= 4 * 4
    [copy] = (tmp_path / "runs/one/quantized").glob("[!.]*")
    assert json.loads((copy / "config.json").read_text())["quantization_config"]["weight_block_size"] == [128, 128]


def compare_beside(job: Job, after: int = 3, *, limits: dict[str, float] = DIFFERENCES) -> tuple[int, int]:
    """How many parameters of an engine were compared with the trainer's after so many steps, which all are bit-equal,
    and how many could not be."""
    process = job.start(*job.words)
    try:
        ends = time.monotonic() + 600
        while len(job.steps()) < after:
            assert process.poll() is None and time.monotonic() < ends, job.output.read_text()[-6000:]
            time.sleep(0.2)
        words = [sys.executable, "-m", "rltool", "debug", "weights", "--run", "one"]
        found = subprocess.run(words, cwd=job.root, env=job.environment, capture_output=True, text=True, timeout=200)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0, job.output.read_text()[-6000:]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    steps = job.steps()
    print(found.stdout, {name: max(step[name] for step in steps if name in step) for name in limits})
    assert found.returncode == 0, found.stdout + found.stderr
    pairs = [tuple(map(int, pair)) for pair in re.findall(r"(\d+) of (\d+) parameters are bit-equal", found.stdout)]
    assert pairs and all(equal == compared for equal, compared in pairs)
    assert all(max(step[name] for step in steps if name in step) < limit for name, limit in limits.items())
    assert len({step["weight_version"] for step in steps[:after]}) == after
    left_out = re.search(r"(\d+) more cannot be compared", found.stdout)
    return pairs[0][1], int(left_out[1]) if left_out else 0
