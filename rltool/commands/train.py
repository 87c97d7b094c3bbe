"""`rltool train`: parse, load the configuration, prepare, execute, print."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from rltool.commands.options import (
    Config,
    External,
    MemorySnapshot,
    ProfileSteps,
    Router,
    Sets,
    Steal,
    TrainRun,
    recording_flags,
    rollout_flags,
)

if TYPE_CHECKING:
    from rltool.processes.run_directory import RunDirectory
    from rltool.training.session import Prepared


def train(
    config: Config = None,
    rollout_external: External = None,
    router: Router = None,
    set_: Sets = None,
    run: TrainRun = None,
    ray_address: Annotated[
        str | None, typer.Option(help="Address of a running Ray cluster; without it a local one is started.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of data order, sampling and dropout.")] = None,
    steps: Annotated[int | None, typer.Option(help="Number of rollouts, each followed by its optimizer steps.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest complete checkpoint of the run.")
    ] = False,
    steal: Steal = False,
    profile_steps: ProfileSteps = None,
    memory_snapshot: MemorySnapshot = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print configuration and placement, start nothing.")
    ] = False,
) -> None:
    """Train against running engines: GRPO and its family, or supervised (algorithm.loss = "sft")."""
    from rltool.config.loader import load_config
    from rltool.config.train import TrainConfig
    from rltool.engines.endpoints import files_in

    flags = {
        **rollout_flags(rollout_external, router),
        **recording_flags(profile_steps, memory_snapshot),
        "ray.address": ("--ray-address", ray_address),
        "seed": ("--seed", seed),
        "steps": ("--steps", steps),
    }
    loaded = load_config(TrainConfig, config or [], set_ or [], flags)
    directory = named_run(run, resume=resume, endpoints_files=files_in(loaded.config.engines.external))
    # Ray and torch take seconds to import: not before what is quickly found to be wrong.
    from rltool.training.report import print_plan
    from rltool.training.session import prepare

    prepared = prepare(loaded, directory, resume=resume, steal=steal)
    if dry_run:
        print_plan(prepared, Console())
        return
    finish(prepared)


def named_run(name: str | None, *, resume: bool, endpoints_files: Sequence[Path] = ()) -> RunDirectory:
    """The run that the command line means, named on the screen. Nothing is made. Raises UsageError."""
    from rltool.checkpoints.directory import latest_checkpoint
    from rltool.processes.run_choice import run_to_train

    def resumable(run: RunDirectory) -> bool:
        return latest_checkpoint(run.checkpoints_dir) is not None

    directory, why = run_to_train(name, resume=resume, endpoints_files=endpoints_files, resumable=resumable)
    Console().print(f"run {directory.name} ({why}): {directory.path}", highlight=False, markup=False, soft_wrap=True)
    return directory


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
