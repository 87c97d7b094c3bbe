"""`rltool eval`: evaluation sets against engines that run, or against a checkpoint."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rltool.commands.options import Config, External, Router, Sets, rollout_flags
from rltool.errors import RltoolError, UsageError


def evaluate(
    config: Config = None,
    rollout_external: External = None,
    router: Router = None,
    set_: Sets = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Hugging Face directory: engines are started on it for this evaluation, and stopped."),
    ] = None,
    serve_flags: Annotated[
        str, typer.Option(help='With --checkpoint: options of serve-engines, such as "--device cpu --num-engines 2".')
    ] = "",
    seed: Annotated[int | None, typer.Option(help="In place of eval.seed.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the results as JSON to this file.")] = None,
    dump: Annotated[
        Path | None, typer.Option(help="Write every sample to DIRECTORY/SET, as rollouts are recorded.")
    ] = None,
) -> None:
    """Evaluate the sets of [eval] with engines as they are, or with a checkpoint. No trainer, no Ray."""
    from rltool.config.loader import load_config
    from rltool.config.train import TrainConfig
    from rltool.report.eval_table import result, result_table
    from rltool.rollout.evaluation import write_evaluated
    from rltool.training.evaluate import evaluate_alone
    from rltool.training.preflight import check_fleet, check_router, describe_fleet, probe_fleet, resolve_endpoints
    from rltool.training.rollout_engines import Engines
    from rltool.training.side_models import check_all_there, probe_models, running_models
    from rltool.training.validate import check_model_directory

    if (checkpoint is None) == (not rollout_external):
        raise UsageError("say what to evaluate: --rollout-external HOST:PORT, or --checkpoint DIRECTORY")
    if serve_flags and checkpoint is None:
        raise UsageError("--serve-flags are of the engines that --checkpoint starts")
    console = Console()

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    with _engines(checkpoint, serve_flags, rollout_external) as external:
        flags = {
            **rollout_flags(external, router),
            "eval.seed": ("--seed", seed),
            "model.path": ("--checkpoint", checkpoint),
        }
        settings = load_config(TrainConfig, config or [], set_ or [], flags).config
        check_model_directory(settings.model.path)
        fleet = probe_fleet(resolve_endpoints(settings), settings.deadlines.preflight)
        check_fleet(fleet, settings, trainer_device=None)
        check_router(fleet, settings)
        beside = running_models(settings)
        check_all_there(settings, beside)
        say(describe_fleet(fleet))
        engines = Engines(
            fleet.endpoints.engines, fleet.infos, router=fleet.endpoints.data_endpoint(),
            models=probe_models(settings, beside),
        )  # fmt: skip
        found = evaluate_alone(settings, engines, say=say)
    console.print(result_table(found.metrics))
    say("intervals: a bootstrap over prompts; Wilson's where all of them are 0, or all 1")
    if out is not None:
        about = {
            "model": str(settings.model.path),
            "weight_versions": sorted({str(info.weight_version) for info in fleet.infos.values()}),
            "eval": settings.eval.model_dump(mode="json"),
        }
        _write(out, json.dumps(result(found.metrics, about), indent=2) + "\n")
        say(f"results: {out}")
    if dump is not None:
        write_evaluated(dump, found, step=0, seed=settings.eval.seed)
        say(f"samples: {dump}")


@contextmanager
def _engines(checkpoint: Path | None, serve_flags: str, external: list[str] | None) -> Iterator[list[str] | None]:
    """The addresses that were given, or those of engines that serve the checkpoint while the block runs."""
    from rltool.processes.run_directory import open_run
    from rltool.processes.stop_run import stop_run

    if checkpoint is None:
        yield external
        return
    if not (checkpoint / "config.json").is_file() or (checkpoint / "manifest.json").exists():
        raise UsageError(
            f"--checkpoint {checkpoint} is no Hugging Face directory; `rltool convert-ckpt {checkpoint} NEW --to hf` "
            "makes one of a checkpoint of rltool"
        )
    run = open_run(None, create=True)
    command = [sys.executable, "-m", "rltool", "serve-engines", str(checkpoint), "--run", run.name, "--detach"]
    try:
        if subprocess.run([*command, *shlex.split(serve_flags)], check=False).returncode != 0:
            raise RltoolError(f"the engines did not start (see above, and `rltool logs --run {run.name}`)")
        yield [f"@{run.endpoints_file}"]
    finally:
        stop_run(run)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RltoolError(f"cannot write the results to {path}: {error.strerror}; choose another --out") from error
