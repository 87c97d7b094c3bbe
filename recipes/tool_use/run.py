"""All of this recipe, as a user would type it: model and data, warm start, an engine, GRPO, a report.

    python -m recipes.tool_use.run
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from recipes.tool_use.task import make_data, make_model
from rltool.processes.run_directory import RunDirectory, open_run
from rltool.processes.signals import termination_interrupts
from rltool.processes.stop_run import stop_run
from rltool.processes.supervise import ProcessGroup
from rltool.quickstart.stages import Stages
from rltool.report.page import write_report
from rltool.terminal import Console

HERE = Path(__file__).parent
MAX_MODEL_LEN = 128


def run_recipe(
    console: Console, *, name: str | None, how: str, seed: int, steps: int, warm_up_steps: int
) -> RunDirectory:
    """how: environment, agent or framework. Nothing that it started is left running. Raises ProcessFailed with the
    failed verb's log."""
    run = open_run(name, create=True)
    warm_up = open_run("warmup", create=True, root=run.path)
    console.print(f"run {run.name}: everything goes to {run.path}")
    with ProcessGroup(run) as group:
        try:
            _stages(Stages(run, group, console, 5), run, warm_up, how, seed, steps, warm_up_steps)
        finally:
            for directory in (run, warm_up):
                stop_run(directory)
    return run


def _stages(
    stages: Stages, run: RunDirectory, warm_up: RunDirectory, how: str, seed: int, steps: int, warm_up_steps: int
) -> None:
    model, data = run.path / "model", run.path / "data"
    with stages.stage("a task and a tiny model"):
        make_data(data, seed=seed)
        make_model(model, seed=seed)
    common = ("--set", f"seed={seed}")
    with stages.stage(f"supervised warm start, {warm_up_steps} steps; an engine starts meanwhile"):
        serving = stages.begin(
            "serve-engines", "serve-engines", str(model), "--device", "cpu", "--max-model-len", str(MAX_MODEL_LEN),
            "--run", run.name, "--detach",
        )  # fmt: skip
        stages.train(
            "warm-up", warm_up_steps, "train", "--config", str(HERE / "warm_start.toml"), "--run", warm_up.name,
            "--set", f'model.path="{model}"', "--set", f'data.train=["{data}/warm_start.jsonl"]',
            "--set", f"steps={warm_up_steps}", *common,
            metrics=warm_up.metrics_file, shown_every=100, root=run.path,
        )  # fmt: skip
    with stages.stage("the engine is ready"):
        stages.finish(serving, note="the engine is starting")
    with stages.stage(f"GRPO by the {how}, {steps} rollouts of 32 prompts x 8 episodes"):
        start = warm_up.path / "hf" / f"step_{warm_up_steps}"
        stages.train(
            "grpo", steps, "train", "--config", str(HERE / "grpo.toml"), "--config", str(HERE / f"{how}.toml"),
            "--run", run.name, "--rollout-external", f"@{run.endpoints_file}", "--set", f'model.path="{start}"',
            "--set", f'data.train=["{data}/train.jsonl"]', "--set", f'eval.sets.heldout="{data}/heldout.jsonl"',
            "--set", f"steps={steps}", *common, metrics=run.metrics_file,
        )  # fmt: skip
    with stages.stage("report"):
        write_report([run.path], stages=stages.timings)


def success(run: RunDirectory) -> list[tuple[int, float]]:
    """(training steps, share of held-out episodes that end well), of each evaluation."""
    records = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
    return [(r["step"] + 1, r["eval/heldout/accuracy"]) for r in records if "eval/heldout/accuracy" in r]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--how", choices=("environment", "agent", "framework"), default="environment")
    parser.add_argument("--run", help="name of the run; default: a fresh one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warm-up-steps", type=int, default=300)
    chosen = parser.parse_args()
    console = Console()
    with termination_interrupts():
        run = run_recipe(
            console, name=chosen.run, how=chosen.how, seed=chosen.seed, steps=chosen.steps,
            warm_up_steps=chosen.warm_up_steps,
        )  # fmt: skip
    for step, share in success(run):
        console.print(f"step {step:3}  {share:.3f}  {'#' * round(50 * share)}")
    console.print(f"report: {run.report_file}")


if __name__ == "__main__":
    main()
