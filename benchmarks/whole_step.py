"""Seconds of a whole RL step and where they go, on GPUs: real engines, router-less, the real trainer, random weights.

    python -m benchmarks.whole_step --shape 0.5B --engine-gpus 0 --trainer-gpus 1 --work runs/whole-step

A model of one of trainer_speed's shapes answers every prompt with exactly --response-tokens tokens: its vocabulary has
one end-of-sequence token among 152,000. Each --staleness is a run of --steps steps on the same engines; the first
--exclude are left out. Prints a table of medians and one line of JSON. generate is the engines' time for the batch,
wait what the trainer waited for it; longer half is the longer of generate, and training with the weight sync.

    python -m benchmarks.whole_step --shape 0.5B --colocate --engines-per-gpu 2 --steps 5 --exclude 2

--colocate puts engines and trainer on --trainer-gpus, in turns, and adds what the turns cost; starting is the command
less its steps.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_memory import gpu_memory_gib
from benchmarks.trainer_speed import SHAPES
from rltool.quickstart.tiny_model import make_tokenizer

ENDING_SECONDS = 120.0
"""For a run that is ended to write its checkpoint."""
PHASES = ("step", "wait", "generate", "reward", "logprobs", "train", "sync")
TURNS = ("sleep", "onload", "offload", "wake")
"""Further phases of colocated engines; the last is a part of sync."""


def make_model(directory: Path, shape: str, longest: int) -> Path:
    """Random bf16 weights of the shape, with the quickstart's tokenizer of characters; one that is there is kept."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    if (directory / "model.safetensors").exists() or (directory / "model.safetensors.index.json").exists():
        return directory
    tokenizer = make_tokenizer()
    stop, pad = (int(tokenizer.convert_tokens_to_ids(token)) for token in (tokenizer.eos_token, tokenizer.pad_token))  # pyright: ignore[reportArgumentType]
    config = AutoConfig.for_model(
        **({"model_type": "qwen2"} | SHAPES[shape]),
        max_position_embeddings=longest,
        eos_token_id=stop,
        pad_token_id=pad,
        bos_token_id=None,
        dtype="bfloat16",
    )
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16)
        model = AutoModelForCausalLM.from_config(config)
        torch.set_default_dtype(torch.float32)
    model.generation_config = GenerationConfig(eos_token_id=stop, pad_token_id=pad)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def make_prompts(path: Path) -> Path:
    """4,096 rows of rltool's data format, of 26 different prompts."""
    rows = ({"prompt": f"question {chr(97 + i % 26)}", "label": ""} for i in range(4096))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def configuration(args: argparse.Namespace, model: Path, data: Path, staleness: int) -> str:
    ranks = len(args.trainer_gpus.split(","))
    return f"""
steps = {args.steps}
[model]
path = "{model}"
dtype = "bfloat16"
[algorithm]
loss = "policy"
old_logprobs = "{args.old_logprobs}"
[optimizer]
lr = 1e-6
[trainer]
world_size = {ranks}
max_tokens_per_micro_batch = {args.tokens}
distributed_optimizer = {str(ranks > 1).lower()}
[data]
train = ["{data}"]
[rollout]
prompts_per_step = {args.prompts}
samples_per_prompt = {args.samples}
max_staleness = {staleness}
requests_per_engine = {args.prompts}
[sampling]
max_prompt_tokens = 64
max_response_tokens = {args.response_tokens}
[reward]
function = "benchmarks.rewards:letter_share"
workers = 8
[weights]
verify_tolerance = {args.verify_tolerance}
[checkpoint]
every_steps = 0
save_at_end = false
[monitor]
tensorboard = false
logprob_difference_limit = 1.0
"""


def colocated(args: argparse.Namespace) -> str:
    """The engines of a run that starts them on its own GPUs."""
    flags = json.dumps(["--max-num-seqs", "1024", *args.engine_args.split()])
    engines = len(args.trainer_gpus.split(",")) * args.engines_per_gpu
    return f"""
[engines]
mode = "colocate"
[[engines.groups]]
count = {engines}
engines_per_gpu = {args.engines_per_gpu}
max_model_len = {64 + args.response_tokens + 16}
flags = {flags}
"""


class Bench:
    """`rltool` verbs as child processes, their runs under --work."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.work = args, args.work.resolve()
        self.work.mkdir(parents=True, exist_ok=True)
        self.peaks: dict[str, float] = {}
        """Of any GPU of a side, by its name, since the run of `train` began."""
        self.environment = {**os.environ, "RLTOOL_RUNS": str(self.work), "COLUMNS": "200", "HF_HUB_OFFLINE": "1"}

    def rltool(self, *words: str) -> None:
        print("$ rltool", *words, file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "rltool", *words]
        with subprocess.Popen(command, env=self.environment, stdout=sys.stderr) as child:
            try:
                while (code := child.poll()) is None:
                    self._look_at_memory()
                    time.sleep(1.0)
            except BaseException:  # a signal: a run that goes on would hold the GPUs, and disturb what is measured next
                child.terminate()
                child.wait(ENDING_SECONDS)
                raise
        if code:
            raise subprocess.CalledProcessError(code, command)

    def _look_at_memory(self) -> None:
        for side, gpus in (("trainer", self.args.trainer_gpus), ("engine", self.args.engine_gpus)):
            for used in filter(None, map(gpu_memory_gib, gpus.split(","))):
                self.peaks[f"{side}_gpu_gib"] = max(self.peaks.get(f"{side}_gpu_gib", 0.0), used)

    def serve(self, model: Path) -> None:
        args = self.args
        longest = str(64 + args.response_tokens + 16)
        engines = len(args.engine_gpus.split(",")) * args.engines_per_gpu
        words = ["serve-engines", str(model), "--num-engines", str(engines), "--gpus", args.engine_gpus]
        words += ["--engines-per-gpu", str(args.engines_per_gpu), "--max-model-len", longest]
        words += ["--run", "engines", "--detach", *args.serve.split()]
        self.rltool(*words, "--", "--max-num-seqs", "1024", *args.engine_args.split())

    def train(self, model: Path, data: Path, staleness: int) -> dict[str, Any]:
        run = f"staleness-{staleness}"
        config = self.work / f"{run}.toml"
        turns = self.args.colocate
        config.write_text(configuration(self.args, model, data, staleness) + (colocated(self.args) if turns else ""))
        self.peaks.clear()
        words = ["train", "--config", str(config), "--run", run, "--gpus", self.args.trainer_gpus]
        endpoints = self.args.endpoints or self.work / "engines/endpoints.json"
        words += [] if turns else ["--rollout-external", f"@{endpoints}"]
        started = time.monotonic()
        self.rltool(*words, *(word for pair in self.args.set for word in ("--set", pair)))
        whole = time.monotonic() - started
        lines = (self.work / run / "metrics.jsonl").read_text().splitlines()
        steps = [record for record in map(json.loads, lines) if "train/loss" in record]
        # The last step of engines that end with the run has no sync.
        records = steps[self.args.exclude : -1 if turns else None]
        phases = (*PHASES, *TURNS) if turns else PHASES
        seconds = {phase: statistics.median(record[f"time/{phase}_seconds"] for record in records) for phase in phases}
        if turns:
            seconds["first step"] = steps[0]["time/step_seconds"]
            seconds["starting"] = whole - sum(record["time/step_seconds"] for record in steps)
        seconds["longer half"] = max(seconds["generate"], seconds["train"] + seconds["sync"])
        tokens = self.args.prompts * self.args.samples * self.args.response_tokens
        return seconds | {
            "step / longer half": seconds["step"] / seconds["longer half"],
            "tokens/s": tokens / seconds["step"],
            "tokens/s while generating": tokens / seconds["generate"],
            "sync GB/s": statistics.median(r["weights/sync_bytes"] / r["weights/sync_seconds"] for r in records) / 1e9,
            "mismatch KL": statistics.median(r.get("train/mismatch_kl", float("nan")) for r in records),
            **self.peaks,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.5B")
    parser.add_argument("--engine-gpus", default="0")
    parser.add_argument("--engines-per-gpu", type=int, default=1)
    parser.add_argument("--colocate", action="store_true", help="engines on the trainer's GPUs; --staleness 0")
    parser.add_argument("--endpoints", type=Path, help="endpoints.json of engines that serve the model already")
    parser.add_argument("--trainer-gpus", default="1")
    parser.add_argument("--work", type=Path, default=Path("runs/whole-step"))
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--exclude", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--response-tokens", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=16384, help="of a micro-batch")
    parser.add_argument("--old-logprobs", choices=("trainer", "rollout"), default="trainer")
    parser.add_argument("--verify-tolerance", type=float, default=0.2, help="bf16 on both sides")
    parser.add_argument("--set", nargs="*", default=[], help="KEY=VALUE of train's configuration")
    parser.add_argument("--serve", default="", metavar="WORDS", help="further words of serve-engines, as one")
    parser.add_argument("--engine-args", default="", metavar="WORDS", help="further arguments of the engine, as one")
    args = parser.parse_args()
    if args.colocate:
        args.staleness, args.engine_gpus = [0], args.trainer_gpus
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    bench = Bench(args)
    model = make_model(bench.work / f"model-{args.shape}", args.shape, 64 + args.response_tokens + 16)
    data = make_prompts(bench.work / "prompts.jsonl")
    serves = args.endpoints is None and not args.colocate
    if serves:
        bench.serve(model)
    try:
        found = {f"max_staleness {value}": bench.train(model, data, value) for value in args.staleness}
    finally:
        if serves:
            bench.rltool("stop", "--run", "engines")
    for mode, values in found.items():
        print(mode, "  ".join(f"{name} {value:.4g}" for name, value in values.items()))
    print(json.dumps({"shape": args.shape, **found}))


if __name__ == "__main__":
    main()
