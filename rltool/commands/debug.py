"""`rltool debug`: one half of the loop at a time, joined by recorded rollouts; and what weights an engine holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from rltool.commands.options import (
    Config,
    External,
    FreshRun,
    MemorySnapshot,
    ProfileSteps,
    ReplayRun,
    Router,
    Sets,
    recording_flags,
    rollout_flags,
)
from rltool.terminal import Console

ANSWER_SECONDS = 120.0
"""For an engine to sample, score or read all its weights."""
ComparedRow = tuple[str, str, bool, list[str]]
"""(URL, what it was compared with, equal, lines of what was found)"""

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Look at the data, only roll out (no trainer), only train (no engine), or compare weights.",
)


@app.callback()
def _debug() -> None:
    """Look at the data, only roll out (no trainer), only train (no engine), or compare weights."""


@app.command("rollout-only")
def rollout_only(
    config: Config = None,
    rollout_external: External = None,
    router: Router = None,
    set_: Sets = None,
    run: FreshRun = None,
    steps: Annotated[
        int | None, typer.Option(help="Number of rollouts; without it `steps` of the configuration.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of data order and sampling.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory for the rollouts; without it that of a run, runs/NAME/rollouts.")
    ] = None,
    simulate_sync: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Pause the engines this many seconds between two rollouts, as a weight sync would, and send nothing.",
        ),
    ] = None,
) -> None:
    """Generate, score and record rollouts with the engines as they are. No trainer, no Ray."""
    from rltool.config.loader import load_config
    from rltool.config.rules import RULES_OF_GENERATION
    from rltool.config.train import TrainConfig
    from rltool.errors import UsageError
    from rltool.models.hub import with_local_models
    from rltool.rollout.measure.record import check_directory, check_settings
    from rltool.training.checks.preflight import (
        check_fleet,
        check_router,
        describe_fleet,
        probe_fleet,
        resolve_endpoints,
        uncompared,
    )
    from rltool.training.checks.routing_replay import check_rollout_engines
    from rltool.training.checks.side_models import check_all_there, probe_models, running_models
    from rltool.training.checks.validate import check_addresses, check_files
    from rltool.training.manager.rollout_engines import Engines
    from rltool.training.record import record_rollouts

    flags = {**rollout_flags(rollout_external, router), "steps": ("--steps", steps), "seed": ("--seed", seed)}
    loaded = load_config(TrainConfig, config or [], set_ or [], flags, rules=RULES_OF_GENERATION)
    settings = with_local_models(loaded.config)
    notes = check_settings(loaded.origins)
    check_files(settings)
    check_addresses(settings.engines)
    if settings.engines.mode != "external":
        raise UsageError(
            "debug rollout-only samples from engines that run already: start them with `rltool serve-engines --config`,"
            ' leave engines.mode at "external", and give --rollout-external'
        )
    if out is not None:
        check_directory(out)
    fleet = probe_fleet(resolve_endpoints(settings), settings.deadlines.preflight)
    check_fleet(fleet, settings, trainer_device=None)
    check_rollout_engines(settings, fleet.infos, router=fleet.endpoints.data_url)
    check_router(fleet, settings)
    beside = running_models(settings)
    check_all_there(settings, beside)
    models = probe_models(settings, beside)

    console = Console()
    for line in (*notes, describe_fleet(fleet), *uncompared(fleet)):
        console.print(line)
    with _destination(out, run) as directory:
        check_directory(directory)
        engines = Engines(
            fleet.endpoints.engines, fleet.infos, router=fleet.endpoints.data_endpoint(), models=models
        )
        record_rollouts(settings, engines, directory, simulated_sync=simulate_sync, log=console.print)
    console.print(f"rollouts are in {directory}\nnext: rltool debug train-only --config ... --rollouts {directory}")


@contextmanager
def _destination(out: Path | None, run: str | None) -> Iterator[Path]:
    """Where the rollouts go: a directory of the user's, or that of a run, which no other process writes meanwhile."""
    from rltool.processes.run_directory import open_run
    from rltool.processes.run_lock import RunLock

    if out is not None:
        yield out
        return
    opened = open_run(run, create=True)
    with RunLock(opened):
        yield opened.rollouts_dir


@app.command("train-only")
def train_only(
    rollouts: Annotated[
        Path | None, typer.Option(help="Directory with recorded rollouts (step_*.safetensors and .json).")
    ] = None,
    fake_data: Annotated[
        bool, typer.Option("--fake-data", help="In place of --rollouts: synthetic samples with long-tailed lengths.")
    ] = False,
    record: Annotated[
        Path | None, typer.Option(help="With --fake-data: write the samples to this directory, for --rollouts.")
    ] = None,
    recorded_steps: Annotated[
        str | None,
        typer.Option(
            metavar="A:B",
            help="With --rollouts: only recorded steps A to B - 1, or 3,7,9; counted from 0 as in the files' names.",
        ),
    ] = None,
    subsample: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="With --rollouts: only this share of each step's prompt groups.")
    ] = 1.0,
    config: Config = None,
    set_: Sets = None,
    run: ReplayRun = None,
    steps: Annotated[
        int | None, typer.Option(help="Number of steps; without it all recorded ones, or `steps` of the configuration.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest complete checkpoint of the run.")
    ] = False,
    profile_steps: ProfileSteps = None,
    memory_snapshot: MemorySnapshot = None,
) -> None:
    """Train on recorded or synthetic rollouts. No engine takes part; log-probability differences are measured, and stop
    nothing."""
    from rltool.commands.train import finish, log, log_run, named_run
    from rltool.config.loader import load_config
    from rltool.config.train import TrainConfig
    from rltool.errors import UsageError
    from rltool.processes.run_lock import RunLock
    from rltool.rollout.measure.dump import dumped_steps
    from rltool.rollout.measure.record import check_directory
    from rltool.rollout.measure.replay_choice import chosen_steps

    if rollouts is not None and fake_data:
        raise UsageError("--rollouts and --fake-data: give one of them")
    if rollouts is None and not fake_data:
        raise UsageError("no source of rollouts: give --rollouts DIRECTORY or --fake-data")
    if record is not None:
        if rollouts is not None:
            raise UsageError("--record writes what --fake-data makes; --rollouts is recorded already")
        if not resume:
            check_directory(record, "--record")
    if rollouts is None and (recorded_steps is not None or subsample != 1.0):
        raise UsageError("--recorded-steps and --subsample choose from --rollouts; synthetic samples are not recorded")
    if subsample == 0.0:
        raise UsageError("--subsample 0 leaves nothing to train on; give a share above 0")
    there = dumped_steps(rollouts) if rollouts is not None and rollouts.is_dir() else []
    chosen = None if recorded_steps is None else tuple(chosen_steps(recorded_steps, there))
    recorded = len(there if chosen is None else chosen)
    flags = {
        **recording_flags(profile_steps, memory_snapshot),
        "steps": ("--steps", steps if steps is not None else recorded or None),
    }
    loaded = load_config(TrainConfig, config or [], set_ or [], flags)
    if rollouts is not None and steps is not None and steps > recorded:
        of = "holds" if chosen is None else "has with --recorded-steps"
        raise UsageError(f"--steps {steps}: {rollouts} {of} {recorded} recorded steps")
    directory, why = named_run(run, resume=resume)
    with RunLock(directory) as lock:
        # Ray and torch: not before what is quickly found to be wrong.
        from rltool.training.prepare import Replay, nothing_left, prepare

        log_run(directory, why)
        if resume and (done := nothing_left(loaded.config, directory)) is not None:
            log(done)
            return
        finish(prepare(loaded, directory, resume=resume, replay=Replay(rollouts, record, chosen, subsample)), lock)


@app.command()
def data(
    config: Config = None,
    set_: Sets = None,
    show: Annotated[int, typer.Option(min=0, help="So many prompts are printed, as the model reads them.")] = 2,
) -> None:
    """Read the data as a run would, and print what it holds and what its prompts look like. Starts nothing."""
    from rltool.config.loader import load_config
    from rltool.config.train import TrainConfig
    from rltool.models.hub import with_local_models
    from rltool.training.checks.validate import check_files
    from rltool.training.show_data import describe_data

    settings = with_local_models(load_config(TrainConfig, config or [], set_ or [], rules=()).config)
    check_files(settings)
    console = Console()
    for line in describe_data(settings, show=show):
        console.print(line)


@app.command()
def weights(
    engines: Annotated[
        list[str] | None,
        typer.Argument(help="HOST:PORT or @endpoints.json of the engines to look at; with --run none means all."),
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Hugging Face or torch_dist directory that they should hold.")
    ] = None,
    engine: Annotated[str | None, typer.Option(help="In place of it: HOST:PORT of an engine to compare with.")] = None,
    run: Annotated[
        str | None, typer.Option(help="In place of it: a run that is training, which compares its engines with itself.")
    ] = None,
    key_file: Annotated[Path | None, typer.Option(help="File with the key of engines given as HOST:PORT.")] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(help="Mean log-probability difference that counts as equal; without it by what both compute in."),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(help=f"Seconds for each answer of an engine, {ANSWER_SECONDS:g} if not given.")
    ] = None,
) -> None:
    """Compare the weights of engines with a checkpoint, another engine or the trainer of a run: exit code 1 where one
    differs."""
    from rltool.errors import UsageError

    if [checkpoint, engine, run].count(None) != 2:
        raise UsageError("nothing to compare with: give one of --checkpoint DIRECTORY, --engine HOST:PORT, --run NAME")
    if run is not None:
        if (key_file, tolerance, timeout) != (None, None, None):
            raise UsageError("with --run the run's own keys, tolerance and deadlines hold: leave the others out")
        rows = _compared_by_run(run, engines or [])
    elif not engines:
        raise UsageError("no engines given: HOST:PORT or @endpoints.json")
    else:
        rows = _compared(engines, checkpoint, engine, key_file, tolerance, timeout or ANSWER_SECONDS)
    console, all_equal = Console(), True
    for url, other, equal, lines in rows:
        all_equal = all_equal and equal
        found = "the same weights as" if equal else "other weights than"
        for line in (f"{url}: {found} {other}", *(f"  {line}" for line in lines)):
            console.print(line)
    raise typer.Exit(0 if all_equal else 1)


def _compared_by_run(name: str, engines: list[str]) -> Iterator[ComparedRow]:
    from rltool.engines.endpoints import resolve
    from rltool.engines.run_client import choose_driver

    directory, driver = choose_driver(name)
    urls = [endpoint.url for endpoint in resolve(engines).engines] if engines else []
    found = driver.compare_weights(urls)
    other = f"the trainer of run {directory.name} ({found['weight_version']})"
    for row in found["engines"]:
        yield row["url"], other, row["equal"], row["lines"]


def _compared(
    engines: list[str], checkpoint: Path | None, engine: str | None, key_file: Path | None, tolerance: float | None,
    timeout: float,
) -> Iterator[ComparedRow]:  # fmt: skip
    """With a checkpoint, or with another engine."""
    from rltool.engines.endpoints import resolve
    from rltool.training.manager.compare_weights import compare_with_checkpoint, compare_with_engine

    def keyed(*addresses: str):
        found = resolve(addresses).engines
        return [one if one.key_file else one.model_copy(update={"key_file": key_file}) for one in found]

    for endpoint in keyed(*engines):
        if checkpoint is not None:
            verdict = compare_with_checkpoint(endpoint, checkpoint, tolerance=tolerance, timeout=timeout)
            other = str(checkpoint)
        else:
            [reference] = keyed(engine or "")
            verdict = compare_with_engine(endpoint, reference, tolerance=tolerance, timeout=timeout)
            other = reference.url
        yield endpoint.url, other, verdict.equal, verdict.lines
