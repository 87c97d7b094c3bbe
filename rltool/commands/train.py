"""`rltool train`: parse, load the configuration, prepare, execute, print."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

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
from rltool.errors import RltoolError, RunFault
from rltool.processes.attempts import ENDED_FOR_GOOD, Attempts
from rltool.terminal import Console

if TYPE_CHECKING:
    from rltool.processes.run_directory import RunDirectory
    from rltool.processes.run_lock import RunLock
    from rltool.training.prepare import Prepared


def train(
    config: Config = None,
    rollout_external: External = None,
    router: Router = None,
    set_: Sets = None,
    run: TrainRun = None,
    ray_address: Annotated[
        str | None, typer.Option(help="Address of a running Ray cluster; without it a local one is started.")
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            help="GPUs of this host, for the ranks and then for managed engines: 0,1,2,3 or 0-3 (default: the first "
            "that no engine and no live run holds)."
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of data order, sampling and dropout.")] = None,
    steps: Annotated[int | None, typer.Option(help="Number of rollouts, each followed by its optimizer steps.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest complete checkpoint of the run.")
    ] = False,
    steal: Steal = False,
    restarts: Annotated[
        int,
        typer.Option(
            min=0,
            help="So many times at most start again from the newest checkpoint when a fault ends the run: a rank, the "
            "rollout manager, Ray or the driver that died or hangs.",
        ),
    ] = 0,
    attempt: Annotated[int, typer.Option(min=0, hidden=True, help="Set by --restarts for its children.")] = 0,
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
    from rltool.engines.launch.start import parse_gpus
    from rltool.processes.run_lock import RunLock

    flags = {
        **rollout_flags(rollout_external, router),
        **recording_flags(profile_steps, memory_snapshot),
        "ray.address": ("--ray-address", ray_address),
        "trainer.gpus": ("--gpus", None if gpus is None else parse_gpus(gpus)),
        "seed": ("--seed", seed),
        "steps": ("--steps", steps),
    }
    loaded = load_config(TrainConfig, config or [], set_ or [], flags)
    directory, why = named_run(run, resume=resume, endpoints_files=files_in(loaded.config.engines.external))
    known = run is not None or directory.is_made
    if (known and not attempt) or (restarts and not dry_run):
        log_run(directory, why)
    if restarts and not dry_run:
        raise typer.Exit(with_restarts(directory, restarts))
    with RunLock(directory) as lock, _marking_final_exit(attempt):
        # Torch and Ray take seconds to import: the name of a living run is refused before.
        from rltool.training.observe.report import print_plan
        from rltool.training.prepare import nothing_left, prepare

        if (resume or attempt > 1) and (done := nothing_left(loaded.config, directory)) is not None:
            log(done)
            return
        prepared = prepare(loaded, directory, resume=resume, steal=steal, restarted=attempt > 1)
        if dry_run:
            print_plan(prepared, Console())
            return
        if not known and not attempt:  # made from here on: what failed a check has left nothing
            log_run(directory, why)
        finish(prepared, lock, attempt=attempt)


def with_restarts(run: RunDirectory, restarts: int) -> int:
    """This command as a child process, again after each fault. Returns the exit code."""
    from rltool.checkpoints.directory import latest_checkpoint
    from rltool.processes.marks import TRAINER_ROLE
    from rltool.processes.state import read_state, remove_state, state_of_this_process, write_state

    own = state_of_this_process(f"{TRAINER_ROLE}-restarts", argv=sys.argv)

    def command(number: int) -> list[str]:
        again = ["--restarts", "0", "--attempt", str(number), "--run", run.name]
        return [sys.executable, "-m", "rltool", *sys.argv[1:], *again]

    def stopped(pid: int) -> bool:
        # A killed trainer cannot remove its state: who did was `rltool stop`, or is about to.
        state = read_state(run, TRAINER_ROLE)
        return state is None or state.pid != pid or state.stopping

    def on_fault() -> str:
        # So far `rltool stop` ended the attempt, and that was all; from now on there may be none when it comes.
        if run.state_dir.is_dir():
            write_state(run, own)
        newest = latest_checkpoint(run.checkpoints_dir)
        return "the beginning: there is no checkpoint" if newest is None else f"checkpoint {newest.name}"

    attempts = Attempts(command, restarts=restarts, log=log, stopped=stopped, on_fault=on_fault)
    try:
        return attempts.run()
    finally:
        remove_state(run, own)


@contextmanager
def _marking_final_exit(attempt: int) -> Iterator[None]:
    """For an attempt of --restarts: an end that another attempt would not change has an exit code of its own."""
    try:
        yield
    except RltoolError as error:
        if attempt and error.exit_code == 1 and not isinstance(error, RunFault):
            error.exit_code = ENDED_FOR_GOOD
        raise


def named_run(name: str | None, *, resume: bool, endpoints_files: Sequence[Path] = ()) -> tuple[RunDirectory, str]:
    """(the run that the command line means, why it is this one). Nothing is made. Raises UsageError."""
    from rltool.checkpoints.directory import latest_checkpoint
    from rltool.processes.run_choice import run_to_train

    def resumable(run: RunDirectory) -> bool:
        return latest_checkpoint(run.checkpoints_dir) is not None

    return run_to_train(name, resume=resume, endpoints_files=endpoints_files, resumable=resumable)


def log_run(run: RunDirectory, why: str) -> None:
    log(f"run {run.name} ({why}): {run.path}")


def log(line: str) -> None:
    Console().print(line)


def finish(prepared: Prepared, lock: RunLock, *, attempt: int = 0) -> None:
    """Execute what was prepared, print the outcome, and leave with its exit code. attempt: as in
    `_marking_final_exit`."""
    from rltool.training.observe.report import print_outcome
    from rltool.training.session import execute
    from rltool.training.stopping import StopSignal

    console = Console()
    with StopSignal().installed() as stop:
        try:
            outcome = execute(prepared, lock, console, stop)
        except RunFault as error:
            if attempt and stop.requested:  # it failed as it was about to end: no restart
                error.exit_code = ENDED_FOR_GOOD
            raise
    print_outcome(prepared, outcome, console)
    raise typer.Exit(outcome.exit_code)
