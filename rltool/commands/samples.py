"""`rltool samples`: what a run's model answered, and what it was paid for it."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from rltool.errors import RltoolError, UsageError
from rltool.processes.run_directory import RunDirectory, open_run
from rltool.report.sample_text import sample_view
from rltool.report.samples import StepSamples, ordered, read_samples, recorded_steps

if TYPE_CHECKING:
    from rltool.rollout.tokenizer import Tokenizer


class Order(StrEnum):
    REWARD = "reward"
    LENGTH = "length"
    DIFFERENCE = "difference"
    INDEX = "index"


def samples(
    run: Annotated[str | None, typer.Argument(help="Name of the run; default: the newest, which is named.")] = None,
    step: Annotated[
        int | None, typer.Option(min=1, help="Step as on the console, where the first is 1; default: the newest.")
    ] = None,
    sort: Annotated[
        Order,
        typer.Option(
            help="reward: best first; length: longest first; difference: where trainer and engine differ most first; "
            "index: as in the batch."
        ),
    ] = Order.REWARD,
    reverse: Annotated[bool, typer.Option("--reverse", help="The other way round: worst, shortest first.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="So many samples at most.")] = 5,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="List every token, not only those with the largest differences.")
    ] = False,
) -> None:
    """Show samples of one step: prompts, answers, rewards, masks, log-probability differences by token."""
    directory = open_run(run, create=False)
    found = of_step(directory, step)
    records = ordered(found.samples, sort)
    if reverse:
        records.reverse()
    console = Console()
    kept = "" if len(records) == found.of else f"; {len(records)} of its {found.of} samples are kept"
    console.print(
        f"run {directory.name}, step {found.step + 1}{kept}; by {sort}{', reversed' if reverse else ''}",
        highlight=False, markup=False, soft_wrap=True,
    )  # fmt: skip
    for number, record in enumerate(records[:limit], 1):
        title = f"{number} of {len(records)}"
        view = sample_view(record, title, all_tokens=tokens, terminal=console.is_terminal)
        console.print(view, highlight=False, soft_wrap=not console.is_terminal)


def of_step(run: RunDirectory, step: int | None) -> StepSamples:
    """All samples of the step where the run has recorded its rollouts (rollout.dump), else those that are kept of every
    step. step: counted from 1; None: the newest. Raises RltoolError."""
    kept = recorded_steps(run.samples_dir)
    dumped = recorded_steps(run.rollouts_dir)
    if not kept and not dumped:
        raise RltoolError(
            f"run {run.name} has no samples in {run.samples_dir}: monitor.samples_per_step is 0, it has not finished a "
            "rollout, or it is of an earlier release"
        )
    wanted = max([*kept, *dumped]) if step is None else step - 1
    if wanted in dumped:
        return _dumped(run, wanted, with_trainer=wanted in kept)
    if wanted in kept:
        return read_samples(run.samples_dir, wanted)
    there = sorted({*kept, *dumped})
    raise UsageError(f"--step {step}: run {run.name} has samples of steps {there[0] + 1} to {there[-1] + 1}")


def _dumped(run: RunDirectory, step: int, *, with_trainer: bool) -> StepSamples:
    """The dump has every sample; the trainer's log-probabilities stand beside the few that are kept."""
    from rltool.rollout.dump import read_dump
    from rltool.rollout.sample_records import sample_record

    tokenizer = _tokenizer(run)
    known = {(r.group, r.index): r for r in read_samples(run.samples_dir, step).samples} if with_trainer else {}
    dump = read_dump(run.rollouts_dir, step)
    records = [known.get((s.group_id, s.index)) or sample_record(s, tokenizer) for s in dump.samples]
    return StepSamples(step, len(records), tuple(records))


def _tokenizer(run: RunDirectory) -> Tokenizer | None:
    """Of the run's model; None where the run does not say which that is (debug rollout-only), so tokens stay ids."""
    from rltool.rollout.tokenizer import load_tokenizer

    if not run.config_file.exists():
        return None
    model = json.loads(run.config_file.read_text())["config"]["model"]
    return load_tokenizer(Path(model["path"]), trust_remote_code=model.get("trust_remote_code", False))
