"""The main job on one machine, as a user would type it: every stage is one of rltool's own commands.

Task and tiny model -> convert-ckpt and a supervised warm start, while engines start -> router -> GRPO -> back to
Hugging Face -> report. Everything lies in one run directory; the warm start, a training run of its own, in a second one
inside it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from rltool.errors import UsageError
from rltool.processes.run_directory import RunDirectory, open_run, plan_run
from rltool.processes.stop_run import stop_run
from rltool.processes.supervise import ProcessGroup
from rltool.quickstart.stages import Stages
from rltool.quickstart.task import TaskFiles, make_task
from rltool.quickstart.tiny_model import make_tiny_model
from rltool.report.page import write_report
from rltool.terminal import Console

MAX_PROMPT_TOKENS, MAX_RESPONSE_TOKENS = 8, 8
"""A word of five letters and "=", and the same backward with the end mark, with room to ramble."""
WARM_UP_STEPS = 350
"""Enough to imitate the careless speller; more would not make it better (see task.py)."""
STAGES = 7


@dataclass(frozen=True)
class Result:
    """What the quickstart found, from the GRPO run's metrics: rewards are exact match at temperature 1."""

    reward_first: float
    """Mean over the first three steps."""
    reward_last: float
    """Mean over the last ten."""
    accuracy_before: float
    accuracy_after: float
    report: Path
    checkpoint: Path
    run: RunDirectory
    timings: dict[str, float]


def warm_up_toml(model: Path, task: TaskFiles, seed: int, steps: int) -> str:
    return f"""# The quickstart's supervised warm start.
# The model imitates a careless speller: the right form, often the wrong letters.
seed = {seed}
steps = {steps}

[model]
path = "{model}"

[algorithm]
loss = "sft"  # needs no engine

[optimizer]
lr = 2e-3
min_lr = 2e-4
warmup_steps = 10
decay_style = "linear"

[trainer]
torch_threads = 1

[data]
train = ["{task.warm_start}"]

[rollout]
prompts_per_step = 128

[sampling]
max_prompt_tokens = {MAX_PROMPT_TOKENS}
max_response_tokens = {MAX_RESPONSE_TOKENS}

[checkpoint]
save_hf_at_end = true
"""


def grpo_toml(model: Path, task: TaskFiles, seed: int, steps: int) -> str:
    return f"""\
# The quickstart's GRPO run. Try another learning rate: copy this file, and train under another --run name.
seed = {seed}
steps = {steps}
optimizer_steps_per_rollout = 2

[model]
path = "{model}"

[algorithm]
loss = "policy"
advantage.normalize_std = true

[optimizer]
lr = 3e-4
min_lr = 3e-5
decay_style = "linear"
warmup_steps = 10  # Adam's first steps are taken on a noisy second moment: without this the reward falls at once

[trainer]
torch_threads = 1

[data]
train = ["{task.train}"]

[rollout]
prompts_per_step = 32
samples_per_prompt = 8

[sampling]
temperature = 1.0
max_prompt_tokens = {MAX_PROMPT_TOKENS}
max_response_tokens = {MAX_RESPONSE_TOKENS}

[reward]
function = "rltool.rollout.rewards.shipped:exact_match"

[eval]
sets = {{ heldout = "{task.heldout}" }}

[monitor]
logprob_difference_limit = 1e-3  # float32 on both sides: 1e-6 is usual

[checkpoint]
every_steps = 25
"""


def run_quickstart(
    console: Console,
    *,
    name: str | None,
    seed: int,
    steps: int,
    warm_up_steps: int = WARM_UP_STEPS,
    num_engines: int = 2,
) -> Result:
    """All of it. Whatever happens, nothing that it started is left running. Raises ProcessFailed with the failed verb's
    log, UsageError for a run that was trained, or that an earlier quickstart has begun."""
    check_unused(plan_run(name))
    run = open_run(name, create=True)
    warm_up = open_run("warmup", create=True, root=run.path)
    console.print(Text.assemble("run ", (run.name, "bold"), f": everything goes to {run.path}"))
    with ProcessGroup(run) as group:
        try:
            return _stages(Stages(run, group, console, STAGES), run, warm_up, seed, steps, warm_up_steps, num_engines)
        finally:
            # Engines and router live on without the verbs that started them: they end with the quickstart.
            with console.status("stopping engines and router"):
                for directory in (run, warm_up):
                    stop_run(directory)


def check_unused(run: RunDirectory) -> None:
    """UsageError where a quickstart would meet what another has written. Nothing is made."""
    warm_up, converted = RunDirectory(run.path / "warmup"), run.path / "model-torch_dist"
    if run.is_used or warm_up.is_used or converted.exists():
        raise UsageError(
            f"run {run.name} was trained already, or a quickstart has begun in it ({run.path}): choose another name "
            "with --run, or leave --run out for a new one"
        )


def _stages(
    stages: Stages,
    run: RunDirectory,
    warm_up: RunDirectory,
    seed: int,
    steps: int,
    warm_up_steps: int,
    num_engines: int,
) -> Result:
    base, start, trained = run.path / "model", run.path / "model-torch_dist", run.path / "trained-hf"
    checkpoint = run.checkpoints_dir / f"step_{steps}"
    with stages.stage("a task and a tiny model"):
        task = make_task(run.path / "task", seed=seed)
        make_tiny_model(base, seed=seed)
        (run.path / "warmup.toml").write_text(warm_up_toml(start, task, seed, warm_up_steps))
        (run.path / "grpo.toml").write_text(grpo_toml(warm_up.path / "hf" / f"step_{warm_up_steps}", task, seed, steps))
    longest = str(MAX_PROMPT_TOKENS + MAX_RESPONSE_TOKENS + 16)  # room for the value check's 24 tokens
    engines = (
        "serve-engines",
        str(base),
        "--num-engines",
        str(num_engines),
        "--device",
        "cpu",
        "--max-model-len",
        longest,
        "--run",
        run.name,
        "--detach",
    )
    with stages.stage("the checkpoint becomes a torch_dist one, verified; engines start meanwhile"):
        serving = stages.begin("serve-engines", *engines)
        stages.do("convert-ckpt", "convert-ckpt", str(base), str(start), note="converting")
    with stages.stage(f"supervised warm start, {warm_up_steps} steps"):
        arguments = ("train", "--config", str(run.path / "warmup.toml"), "--run", warm_up.name)
        stages.train("warm-up", warm_up_steps, *arguments, metrics=warm_up.metrics_file, shown_every=50, root=run.path)
    with stages.stage("a router in front of the engines"):
        stages.finish(serving, note="engines are starting")
        stages.do("start-router", "router", f"@{run.endpoints_file}", "--run", run.name, "--detach")
    external = f"@{run.endpoints_file}"
    with stages.stage(f"GRPO, {steps} rollouts of 32 prompts x 8 samples"):
        config = str(run.path / "grpo.toml")
        arguments = ("train", "--config", config, "--run", run.name, "--rollout-external", external)
        stages.train("grpo", steps, *arguments, metrics=run.metrics_file)
    with stages.stage("the trained checkpoint, back to Hugging Face"):
        stages.do(
            "convert-back",
            "convert-ckpt",
            str(checkpoint),
            str(trained),
            "--to",
            "hf",
            note="converting",
        )
    with stages.stage("report"):
        report = write_report(
            [run.path], stages=stages.timings, title=f"Quickstart: {run.name}",
            note="A tiny model spells a word backward: the reward is 1 where the answer is exact, else 0.",
        )  # fmt: skip
    return _result(run, report, checkpoint, stages.timings)


def _result(run: RunDirectory, report: Path, checkpoint: Path, timings: dict[str, float]) -> Result:
    records = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
    rewards = [r["rollout/reward_mean"] for r in records if "rollout/reward_mean" in r]
    accuracy = [r["eval/heldout/accuracy"] for r in records if "eval/heldout/accuracy" in r]
    return Result(_mean(rewards[:3]), _mean(rewards[-10:]), accuracy[0], accuracy[-1], report, checkpoint, run, timings)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
