"""`rltool debug`: one half of the loop at a time, joined by recorded rollouts; and what weights an engine holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

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

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Only roll out (no trainer), only train (no engine), or compare weights.",
)


@app.callback()
def _debug() -> None:
    """Only roll out (no trainer), only train (no engine), or compare weights."""


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
) -> None:
    """Generate, score and record rollouts with the engines as they are. No trainer, no Ray."""
    from rltool.config.loader import load_config
    from rltool.config.train import TrainConfig
    from rltool.errors import UsageError
    from rltool.rollout.record import check_directory, check_settings
    from rltool.training.preflight import (
        check_fleet,
        check_router,
        describe_fleet,
        probe_fleet,
        resolve_endpoints,
        uncompared,
    )
    from rltool.training.record import record_rollouts
    from rltool.training.rollout_service import Engines
    from rltool.training.side_models import check_all_there, probe_models, running_models
    from rltool.training.validate import check_files, check_generation, check_mode

    flags = {**rollout_flags(rollout_external, router), "steps": ("--steps", steps), "seed": ("--seed", seed)}
    loaded = load_config(TrainConfig, config or [], set_ or [], flags)
    settings = loaded.config
    notes = check_settings(loaded.origins)
    check_files(settings)
    check_mode(settings)
    check_generation(settings)
    if settings.engines.mode != "external":
        raise UsageError(
            "debug rollout-only samples from engines that run already: start them with `rltool serve-engines --config`,"
            ' leave engines.mode at "external", and give --rollout-external'
        )
    if out is not None:
        check_directory(out)
    fleet = probe_fleet(resolve_endpoints(settings), settings.deadlines.preflight)
    check_fleet(fleet, settings, trainer_device=None)
    check_router(fleet, settings)
    beside = running_models(settings)
    check_all_there(settings, beside)
    models = probe_models(settings, beside)

    console = Console()
    for line in (*notes, describe_fleet(fleet), *uncompared(fleet)):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    with _destination(out, run) as directory:
        check_directory(directory)
        engines = Engines(
            fleet.endpoints.engines, fleet.infos, router=fleet.endpoints.data_endpoint(), models=models
        )
        record_rollouts(
            settings, engines, directory, say=lambda line: console.print(line, highlight=False, soft_wrap=True)
        )
    console.print(
        f"rollouts are in {directory}\nnext: rltool debug train-only --config ... --rollouts {directory}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


@contextmanager
def _destination(out: Path | None, run: str | None) -> Iterator[Path]:
    """Where the rollouts go: a directory of the user's, or that of a run, which nobody else writes meanwhile."""
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
    from rltool.commands.train import finish, named_run
    from rltool.config.loader import load_config
    from rltool.config.train import TrainConfig
    from rltool.errors import UsageError
    from rltool.processes.run_lock import RunLock
    from rltool.rollout.dump import dumped_steps
    from rltool.rollout.record import check_directory

    if (rollouts is not None) == fake_data:
        raise UsageError("say where the rollouts come from: --rollouts DIRECTORY, or --fake-data")
    if record is not None:
        if rollouts is not None:
            raise UsageError("--record writes what --fake-data makes; --rollouts is recorded already")
        if not resume:
            check_directory(record, "--record")
    recorded = len(dumped_steps(rollouts)) if rollouts is not None and rollouts.is_dir() else 0
    flags = {
        **recording_flags(profile_steps, memory_snapshot),
        "steps": ("--steps", steps if steps is not None else recorded or None),
    }
    loaded = load_config(TrainConfig, config or [], set_ or [], flags)
    if rollouts is not None and steps is not None and steps > recorded:
        raise UsageError(f"--steps {steps}: {rollouts} holds {recorded} recorded steps")
    directory = named_run(run, resume=resume)
    with RunLock(directory) as lock:
        # Ray and torch: not before what is quickly found to be wrong.
        from rltool.training.prepare import Replay, prepare

        finish(prepare(loaded, directory, resume=resume, replay=Replay(rollouts, record)), lock)


@app.command()
def weights(
    engines: Annotated[list[str], typer.Argument(help="HOST:PORT or @endpoints.json of the engines to look at.")],
    checkpoint: Annotated[
        Path | None, typer.Option(help="Hugging Face or torch_dist directory that they should hold.")
    ] = None,
    engine: Annotated[str | None, typer.Option(help="In place of it: HOST:PORT of an engine to compare with.")] = None,
    key_file: Annotated[Path | None, typer.Option(help="File with the key of engines given as HOST:PORT.")] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(help="Mean log-probability difference that counts as equal; without it by what both compute in."),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for each answer of an engine.")] = 120.0,
) -> None:
    """Compare the weights of engines with a checkpoint, or with another engine: exit code 1 where one differs."""
    from rltool.engines.endpoints import resolve
    from rltool.errors import UsageError
    from rltool.training.compare_weights import compare_with_checkpoint, compare_with_engine

    def keyed(*addresses: str):
        found = resolve(addresses).engines
        return [one if one.key_file else one.model_copy(update={"key_file": key_file}) for one in found]

    if (checkpoint is None) == (engine is None):
        raise UsageError("say what to compare with: --checkpoint DIRECTORY, or --engine HOST:PORT")
    console, equal = Console(), True
    for endpoint in keyed(*engines):
        if checkpoint is not None:
            verdict = compare_with_checkpoint(endpoint, checkpoint, tolerance=tolerance, timeout=timeout)
            other = str(checkpoint)
        else:
            [reference] = keyed(engine or "")
            verdict = compare_with_engine(endpoint, reference, tolerance=tolerance, timeout=timeout)
            other = reference.url
        equal = equal and verdict.equal
        found = "the same weights as" if verdict.equal else "other weights than"
        for line in (f"{endpoint.url}: {found} {other}", *(f"  {line}" for line in verdict.lines)):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(0 if equal else 1)
