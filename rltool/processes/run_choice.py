"""Which run `train` means without --run. The decision is pure; the facts are gathered apart."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rltool.errors import UsageError
from rltool.processes.run_directory import RUNS_VARIABLE, RunDirectory, check_writable, list_runs, plan_run
from rltool.processes.state import is_alive, read_state


@dataclass(frozen=True)
class Choice:
    """run None: a new one. `why`: for the line that names the run, after its name."""

    run: RunDirectory | None
    why: str


def choose_run(
    *, resume: bool, trained: Callable[[RunDirectory], bool], resumable: Callable[[RunDirectory], bool],
    of_engines: Sequence[RunDirectory], runs: Sequence[RunDirectory],
) -> Choice:  # fmt: skip
    """of_engines: runs whose endpoints.json was given; runs: all, oldest first.

    With `resume` the newest run that has a checkpoint. Else the run of the engines, if it is one and was never trained:
    engines and trainer then share a directory, and a second training on the same engines gets its own. Raises
    UsageError where there is nothing to resume.
    """
    if resume:
        for run in reversed(runs):
            if resumable(run):
                return Choice(run, "the newest run with a checkpoint")
        raise UsageError(
            "--resume: no run has a complete checkpoint; name the run with --run, or leave --resume out to start one"
        )
    if len(of_engines) != 1:
        return Choice(None, "a new run")
    if trained(of_engines[0]):
        return Choice(None, f"a new run: {of_engines[0].name}, that of the given engines, was trained already")
    return Choice(of_engines[0], "the run of the given engines")


def run_to_train(
    name: str | None,
    *,
    resume: bool,
    endpoints_files: Iterable[Path],
    resumable: Callable[[RunDirectory], bool],
    root: Path | None = None,
) -> tuple[RunDirectory, str]:
    """(run, why it is this one); nothing is made. `resumable`: it holds a complete checkpoint.

    Raises UsageError, also for a run that cannot be written: it would fail after minutes of loading.
    """
    if name is not None:
        run, why = plan_run(name, root=root), "named by --run"
    else:
        choice = choose_run(
            resume=resume, trained=is_trained, resumable=resumable, of_engines=runs_of(endpoints_files),
            runs=list_runs(root),
        )  # fmt: skip
        run, why = choice.run or plan_run(None, root=root), choice.why
    check_writable(run)
    return run, why


def train_command(file: Path) -> str:
    """The line to paste that trains with the engines of this endpoints.json, in their run unless it was trained.

    It names the run and, where the shell's environment sets it, the directory of runs: another shell or a second fleet
    must not lead it elsewhere.
    """
    words = ["rltool", "train", "--config", "run.toml", "--rollout-external", f"@{file}"]
    for run in runs_of([file]):
        if not is_trained(run):
            words += ["--run", run.name]
        if os.environ.get(RUNS_VARIABLE):
            words = ["env", f"{RUNS_VARIABLE}={run.path.parent}", *words]
    return shlex.join(words)


def is_trained(run: RunDirectory) -> bool:
    """It holds metrics or checkpoints, or a trainer works in it that has not finished its first step."""
    state = read_state(run, "train")
    return run.is_used or (state is not None and is_alive(state))


def runs_of(endpoints_files: Iterable[Path]) -> list[RunDirectory]:
    """The runs that these files lie in, each once; a file elsewhere belongs to none."""
    directories = {file.absolute().parent.resolve(): None for file in endpoints_files if file.name == "endpoints.json"}
    return [run for run in map(RunDirectory, directories) if run.is_made]
