"""Adapters against full training: the quickstart's task from the same warm starts, with the same number of rollouts.

    python -m benchmarks.lora_learning --run lora-learning                             rank 4 at ten times the rate
    python -m benchmarks.lora_learning --run lora-learning --lora-lr 1e-3 --alpha 16   another rate: the rest is kept
    python -m benchmarks.lora_learning --run seed-1 --seeds 1 --gpu 0                  a run for each seed, on one GPU

Every seed has a task, a model and a warm start of its own, from which each arm trains (`rltool train`, two vLLM engines
on the CPU, or one on a GPU). Held out: 1,024 words, four samples each at temperature 1. Prints JSON: by arm the
accuracy of each seed before and after, and their means. What a run of this name has finished is not done again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
from pathlib import Path
from typing import Any

from rltool.processes.run_directory import RunDirectory, open_run
from rltool.processes.signals import termination_interrupts
from rltool.processes.stop_run import stop_run
from rltool.processes.supervise import ProcessGroup
from rltool.quickstart.compose import MAX_PROMPT_TOKENS, MAX_RESPONSE_TOKENS, WARM_UP_STEPS, grpo_toml, warm_up_toml
from rltool.quickstart.stages import Stages
from rltool.quickstart.task import make_task
from rltool.quickstart.tiny_model import make_tiny_model
from rltool.terminal import Console

HELD_OUT = 1024
ACCURACY = "eval/heldout/accuracy"
GPU_ENGINE = ("--dtype", "float32", "--gpu-memory-utilization", "0.04", "--kv-cache-memory-bytes", "1073741824")
"""Several runs fit beside each other."""


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--alpha", type=float, default=32.0)
    parser.add_argument("--lora-lr", type=float, nargs="+", default=[3e-3], help="several: an arm each; full has 3e-4")
    parser.add_argument("--lora-min-lr", type=float, help="at the end of the run; default: a tenth of --lora-lr")
    parser.add_argument("--gpu", help="of engines and trainer; default: none, all on the CPU")
    return parser.parse_args()


class Comparison:
    def __init__(self, run: RunDirectory, group: ProcessGroup, console: Console, args: argparse.Namespace) -> None:
        self.run, self.args = run, args
        self.root = run.path / "trainings"
        self.gpus = [] if args.gpu is None else ["--gpus", args.gpu]
        self.arms: dict[str, dict[str, float]] = {"full": {}}
        for rate in args.lora_lr:
            least = rate / 10 if args.lora_min_lr is None else args.lora_min_lr
            self.arms[f"rank {args.rank} alpha {args.alpha:g} lr {rate:g} to {least:g}"] = {
                "lora.rank": args.rank, "lora.alpha": args.alpha, "optimizer.lr": rate, "optimizer.min_lr": least,
            }  # fmt: skip
        self.stages = Stages(run, group, console, 1 + (1 + len(self.arms)) * len(args.seeds))

    def all_of_it(self) -> dict[str, Any]:
        with self.stages.stage("engines"):
            model = self._model(self.args.seeds[0])
            longest = str(MAX_PROMPT_TOKENS + MAX_RESPONSE_TOKENS + 16)  # room for the value check's tokens
            on = ["--num-engines", "2", "--device", "cpu"] if not self.gpus else ["--num-engines", "1", *self.gpus]
            self.stages.do(
                "serve-engines", "serve-engines", str(model), *on, "--max-model-len", longest, "--run", self.run.name,
                "--detach", *(["--", *GPU_ENGINE] if self.gpus else []), note="engines are starting",
            )  # fmt: skip
        times = {"before": -1, "step 20": 19, "after": self.args.steps - 1}
        found: dict[str, dict[str, list[float]]] = {arm: {when: [] for when in times} for arm in self.arms}
        for seed in self.args.seeds:
            self._warm_start(seed)
            for arm, settings in self.arms.items():
                accuracies = self._train(seed, arm, settings)
                for when, at in times.items():
                    if at in accuracies:
                        found[arm][when].append(accuracies[at])
        means = {arm: statistics.mean(of["after"]) for arm, of in found.items()}
        return {"accuracy": found, "mean_after": means, "seeds": self.args.seeds, "steps": self.args.steps}

    # -- the rest is private

    def _model(self, seed: int) -> Path:
        directory = self.run.path / f"seed-{seed}" / "model"
        return directory if directory.exists() else make_tiny_model(directory, seed=seed)

    def _start(self, seed: int) -> Path:
        return self.root / f"warmup-{seed}" / "hf" / f"step_{WARM_UP_STEPS}"

    def _warm_start(self, seed: int) -> None:
        directory, run = self.run.path / f"seed-{seed}", self.root / f"warmup-{seed}"
        task = make_task(directory / "task", seed=seed, num_heldout=HELD_OUT)
        (directory / "warmup.toml").write_text(warm_up_toml(self._model(seed), task, seed, WARM_UP_STEPS))
        (directory / "grpo.toml").write_text(grpo_toml(self._start(seed), task, seed, self.args.steps))
        with self.stages.stage(f"seed {seed}: supervised warm start"):
            if self._start(seed).exists():
                return
            shutil.rmtree(run, ignore_errors=True)
            self.stages.train(
                run.name, WARM_UP_STEPS, "train", "--config", str(directory / "warmup.toml"), "--run", run.name,
                *self.gpus, metrics=run / "metrics.jsonl", shown_every=100, root=self.root,
            )  # fmt: skip

    def _train(self, seed: int, arm: str, settings: dict[str, float]) -> dict[int, float]:
        """Accuracy by the step after which it was measured."""
        run = self.root / f"seed-{seed}-{arm.replace(' ', '-')}"
        last = self.args.steps - 1
        with self.stages.stage(f"seed {seed}: {arm}"):
            found = accuracies(run / "metrics.jsonl")
            if last in found:
                return found
            shutil.rmtree(run, ignore_errors=True)
            given: dict[str, float | str] = {"eval.samples_per_prompt": 4, "eval.every_steps": 20, **settings}
            if self.gpus:
                given |= {"trainer.share_gpus": "true", "weights.transport": '"gloo"'}
            words = [word for key, value in given.items() for word in ("--set", f"{key}={value}")]
            words += self.gpus
            self.stages.train(
                run.name, self.args.steps, "train", "--config", str(self.run.path / f"seed-{seed}" / "grpo.toml"),
                "--run", run.name, "--rollout-external", f"@{self.run.endpoints_file}", *words,
                metrics=run / "metrics.jsonl", root=self.root,
            )  # fmt: skip
        return accuracies(run / "metrics.jsonl")


def accuracies(metrics: Path) -> dict[int, float]:
    if not metrics.exists():
        return {}
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return {row["step"]: row[ACCURACY] for row in rows if ACCURACY in row}


def main() -> None:
    args = options()
    run = open_run(args.run, create=True)
    with termination_interrupts(), ProcessGroup(run) as group:
        try:
            result = Comparison(run, group, Console(), args).all_of_it()
        finally:
            stop_run(run)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
