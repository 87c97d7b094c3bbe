"""Options that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rltool.errors import UsageError

Config = Annotated[
    list[Path] | None,
    typer.Option(
        "--config", "-c", help="TOML file; repeatable, later files win key by key. `rltool init` writes a template."
    ),
]
External = Annotated[
    list[str] | None,
    typer.Option(
        "--rollout-external",
        help="HOST:PORT or @endpoints.json of engines that are running; repeatable, or comma-separated.",
    ),
]
Router = Annotated[
    str | None, typer.Option("--router", help="URL that generation goes through; endpoints.json may name it already.")
]
Sets = Annotated[
    list[str] | None, typer.Option("--set", help="section.key=value (a TOML value); repeatable, wins over --config.")
]
TrainRun = Annotated[
    str | None,
    typer.Option(
        "--run",
        help="Name of the run directory. Without it: that of the given endpoints.json if it was never trained, else a "
        "new one; with --resume the newest that has a checkpoint.",
    ),
]
ReplayRun = Annotated[
    str | None,
    typer.Option(
        "--run",
        help="Name of the run directory. Without it a new one; with --resume the newest that has a checkpoint.",
    ),
]
FreshRun = Annotated[
    str | None, typer.Option("--run", help="Name of the run directory; without it a new one is made.")
]
NamedRun = Annotated[str | None, typer.Option("--run", help="The same for one run, as other verbs have it.")]

Steal = Annotated[
    bool,
    typer.Option("--steal", help="Take engines over that another run has leased; that run ends when it notices."),
]

ProfileSteps = Annotated[
    str | None,
    typer.Option(
        "--profile-steps",
        metavar="A:B",
        help="Write a profiler trace of steps A to B - 1 (the first is 0), of every rank, to the run's profile/.",
    ),
]
MemorySnapshot = Annotated[
    int | None,
    typer.Option(
        "--memory-snapshot",
        metavar="STEP",
        help="Record that step's allocations on the GPU, on every rank, to the run's profile/.",
    ),
]


def one_name(argument: str | None, option: str | None) -> str | None:
    """The run of a verb that takes its name as an argument, or with --run. UsageError for both."""
    if argument is not None and option is not None:
        raise UsageError("name the run either as an argument or with --run")
    return option if argument is None else argument


def recording_flags(profile_steps: str | None, memory_snapshot: int | None) -> dict[str, tuple[str, Any]]:
    return {
        "monitor.profile_steps": ("--profile-steps", profile_steps),
        "monitor.memory_snapshot": ("--memory-snapshot", memory_snapshot),
    }


def rollout_flags(external: list[str] | None, router: str | None) -> dict[str, tuple[str, Any]]:
    """The flags above as load_config wants them."""
    return {
        "engines.external": ("--rollout-external", tuple(external) if external else None),
        "engines.router": ("--router", router),
    }
