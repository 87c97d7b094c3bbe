"""`rltool train`: parse, load the configuration, prepare, execute, print."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from rltool.commands.options import (
    Config,
    External,
    MemorySnapshot,
    ProfileSteps,
    Router,
    Run,
    Sets,
    recording_flags,
    rollout_flags,
)

if TYPE_CHECKING:
    from rltool.training.session import Prepared


def train(
    config: Config = None,
    rollout_external: External = None,
    router: Router = None,
    set_: Sets = None,
    run: Run = None,
    ray_address: Annotated[str | None, typer.Option(help="Address of a running Ray cluster; without it a local one is started.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of data order, sampling and dropout.")] = None,
    steps: Annotated[int | None, typer.Option(help="Number of rollouts, each followed by its optimizer steps.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest complete checkpoint of the run.")] = False,
    profile_steps: ProfileSteps = None,
    memory_snapshot: MemorySnapshot = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, print configuration and placement, start nothing.")] = False,
) -> None:
    """Train against running engines: GRPO and its family, or supervised (algorithm.loss = "sft")."""
    from rltool.config.loader import load_config
    from rltool.config.train import TrainConfig
    from rltool.processes.run_directory import open_run, plan_run
    from rltool.training.report import print_plan
    from rltool.training.session import prepare

    flags = {**rollout_flags(rollout_external, router), **recording_flags(profile_steps, memory_snapshot), "ray.address": ("--ray-address", ray_address), "seed": ("--seed", seed), "steps": ("--steps", steps)}
    loaded = load_config(TrainConfig, config or [], set_ or [], flags)
    directory = plan_run(run) if run is not None else open_run(None, create=False)
    prepared = prepare(loaded, directory, resume=resume)
    if dry_run:
        print_plan(prepared, Console())
        return
    finish(prepared)


def finish(prepared: Prepared) -> None:
    """Execute what was prepared, print how it ended, and leave with its exit code."""
    from rltool.training.report import print_outcome
    from rltool.training.session import execute
    from rltool.training.stopping import StopSignal

    console = Console()
    with StopSignal().installed() as stop:
        outcome = execute(prepared, console, stop)
    print_outcome(prepared, outcome, console)
    raise typer.Exit(outcome.exit_code)
