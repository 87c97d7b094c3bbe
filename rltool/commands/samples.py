"""`rltool samples`: what a run's model answered, and what it was paid for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rltool.commands.options import NamedRun, one_name
from rltool.errors import RltoolError, UsageError
from rltool.processes.run_directory import RunDirectory, list_runs, open_run
from rltool.report.sample_text import sample_view
from rltool.report.samples import StepSamples, ordered, read_samples, recorded_steps
from rltool.terminal import Console

if TYPE_CHECKING:
    from rltool.rollout.tokenizer import Tokenizer


class Order(StrEnum):
    REWARD = "reward"
    LENGTH = "length"
    DIFFERENCE = "difference"
    INDEX = "index"


def samples(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN|DIRECTORY]",
            help="Name of the run, or a directory: a run's, or one of recorded rollouts; default: the newest run.",
        ),
    ] = None,
    named: NamedRun = None,
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
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code",
            help="Run code that comes with the tokenizer of the recording's model; without it such tokens are ids.",
        ),
    ] = False,
) -> None:
    """Show samples of one step: prompts, answers, rewards, masks, log-probability differences by token."""
    source = find_samples(one_name(run, named))
    console = Console()
    found = of_step(source, step, trust_remote_code=trust_remote_code, log=console.print)
    records = ordered(found.samples, sort)
    if reverse:
        records.reverse()
    kept = "" if len(records) == found.of else f"; {len(records)} of its {found.of} samples are kept"
    console.print(f"{source.name}, step {found.step + 1}{kept}; by {sort}{', reversed' if reverse else ''}")
    for number, record in enumerate(records[:limit], 1):
        title = f"{number} of {len(records)}"
        view = sample_view(record, title, all_tokens=tokens, terminal=console.is_terminal)
        console.print(view, soft_wrap=not console.is_terminal)


@dataclass(frozen=True)
class SampleSource:
    """Where samples lie. kept: the few that a trainer keeps of each step; recorded: dumps with all of them; config: of
    the run, which names the model. None: there is no such file or directory here."""

    name: str
    kept: Path | None = None
    recorded: Path | None = None
    config: Path | None = None

    def kept_steps(self) -> list[int]:
        return [] if self.kept is None else recorded_steps(self.kept)

    def dumped_steps(self) -> list[int]:
        return [] if self.recorded is None else recorded_steps(self.recorded)


def find_samples(name: str | None) -> SampleSource:
    """A run by its name, the newest for None, or a directory: a run's, one of recorded rollouts, or one with exactly
    one such directory in it, as `eval --dump` writes for one set. Raises UsageError."""
    if name is None or name in (run.name for run in list_runs()) or not Path(name).is_dir():
        return _of_run(open_run(name, create=False))
    directory = Path(name)
    run = RunDirectory(directory.absolute())
    if run.is_made:
        return _of_run(run)
    if _is_recorded(directory):
        return SampleSource(str(directory), recorded=directory)
    sets = sorted(inner for inner in directory.iterdir() if inner.is_dir() and _is_recorded(inner))
    if len(sets) == 1:
        return SampleSource(str(sets[0]), recorded=sets[0])
    several = f"; give one of {', '.join(map(str, sets))}" if sets else ""
    raise UsageError(f"{directory} is no run's directory, and holds no recorded rollouts{several}")


def _of_run(run: RunDirectory) -> SampleSource:
    return SampleSource(f"run {run.name}", run.samples_dir, run.rollouts_dir, run.config_file)


def _is_recorded(directory: Path) -> bool:
    return next(directory.glob("step_[0-9]*.safetensors"), None) is not None


def of_step(
    source: SampleSource, step: int | None, *, trust_remote_code: bool, log: Callable[[str], None]
) -> StepSamples:
    """All samples of the step where they were recorded (rollout.dump), else those that are kept of every step. step:
    counted from 1; None: the newest. log(line): why tokens are ids. Raises RltoolError."""
    kept, dumped = source.kept_steps(), source.dumped_steps()
    if not kept and not dumped:
        raise RltoolError(
            f"{source.name} has no samples in {source.kept}: monitor.samples_per_step is 0, it has not finished a "
            "rollout, or it is of an earlier release"
        )
    wanted = max([*kept, *dumped]) if step is None else step - 1
    if wanted in dumped:
        return _dumped(source, wanted, wanted in kept, trust_remote_code, log)
    if wanted in kept and source.kept is not None:
        return read_samples(source.kept, wanted)
    there = sorted({*kept, *dumped})
    raise UsageError(f"--step {step}: {source.name} has samples of steps {there[0] + 1} to {there[-1] + 1}")


def _dumped(
    source: SampleSource, step: int, with_trainer: bool, trust_remote_code: bool, log: Callable[[str], None]
) -> StepSamples:
    """The dump has every sample; the trainer's log-probabilities stand beside the few that are kept."""
    from rltool.rollout.measure.dump import read_dump
    from rltool.rollout.measure.sample_records import sample_record
    from rltool.rollout.tokenizer import TokenizerIsCode

    assert source.recorded is not None
    dump = read_dump(source.recorded, step)
    try:
        tokenizer = _tokenizer(dump.info.get("model"), source.config, trust_remote_code)
    except TokenizerIsCode as error:
        log(f"tokens are shown as ids: {error}")
        tokenizer = None
    beside = read_samples(source.kept, step).samples if with_trainer and source.kept is not None else ()
    known = {(r.group, r.index): r for r in beside}
    records = [known.get((s.group_id, s.index)) or sample_record(s, tokenizer) for s in dump.samples]
    return StepSamples(step, len(records), tuple(records))


def _tokenizer(recorded: dict[str, Any] | None, config: Path | None, trust_remote_code: bool) -> Tokenizer | None:
    """Of the model that the recording names, else the run's configuration. None where neither does (recordings of an
    earlier release), or the model's directory is gone: tokens stay ids. Either file may be another's: it names a
    directory, and never allows that code of it runs."""
    from rltool.rollout.tokenizer import load_tokenizer

    model = recorded
    if model is None and config is not None and config.exists():
        model = json.loads(config.read_text())["config"]["model"]
    if model is None or not Path(model["path"]).is_dir():
        return None
    return load_tokenizer(Path(model["path"]), trust_remote_code=trust_remote_code, allowed_by="--trust-remote-code")
