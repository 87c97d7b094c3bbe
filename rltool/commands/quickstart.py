"""`rltool quickstart`: the main job, end to end, on this machine."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from rltool.processes.signals import termination_interrupts
from rltool.quickstart.compose import WARM_UP_STEPS, Result, run_quickstart
from rltool.terminal import Console


def quickstart(
    run: Annotated[str | None, typer.Option(help="Name of the run (default: a new one).")] = None,
    seed: Annotated[int, typer.Option(help="One seed for all of it.")] = 0,
    steps: Annotated[int, typer.Option(min=12, help="GRPO rollouts.")] = 100,
    warm_up_steps: Annotated[int, typer.Option(min=1, help="Steps of the supervised warm start.")] = WARM_UP_STEPS,
) -> None:
    """Train a tiny model with GRPO against two vLLM engines behind a router, on the CPU, and see it learn."""
    console = Console()
    with termination_interrupts() as ending:
        try:
            result = run_quickstart(console, name=run, seed=seed, steps=steps, warm_up_steps=warm_up_steps)
        except KeyboardInterrupt:
            console.print("interrupted; everything that was started has been stopped")
            raise typer.Exit(ending.exit_code or 130) from None
    _print(console, result)


def _print(console: Console, result: Result) -> None:
    table = Table("", "before", "after", title="what it learned", title_justify="left")
    table.add_row("sampled reward (first 3 / last 10 steps)", f"{result.reward_first:.2f}", f"{result.reward_last:.2f}")
    table.add_row("sampled accuracy on held-out words", f"{result.accuracy_before:.2f}", f"{result.accuracy_after:.2f}")
    console.print(table)
    run = result.run
    seconds = sum(result.timings.values())
    lines = [
        f"{int(seconds) // 60} min {seconds % 60:.0f} s in all",
        f"report:       {result.report}",
        f"metrics:      {run.metrics_file}",
        f"logs:         {run.logs_dir}",
        f"checkpoint:   {result.checkpoint}",
        f"Hugging Face: {run.path / 'trained-hf'}",
        "try next:",
        f"  rltool serve-engines {run.path / 'trained-hf'} --num-engines 2 --device cpu --run mine --detach",
        "  rltool router --run mine --detach",
        f"  rltool train --config {run.path / 'grpo.toml'} --set optimizer.lr=1e-4 --run my-train --rollout-external "
        "@runs/mine/endpoints.json",
        "  rltool status --run mine; rltool logs --run mine; rltool stop --run mine",
    ]
    for line in lines:
        console.print(line)
