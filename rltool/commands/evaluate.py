"""`rltool eval`: evaluation sets against engines that run, or against a checkpoint."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rltool.commands.options import Config, External, Router, Sets, rollout_flags
from rltool.errors import RltoolError, UsageError
from rltool.terminal import Console, write_line

if TYPE_CHECKING:
    from rltool.processes.run_directory import RunDirectory


def evaluate(
    config: Config = None,
    rollout_external: External = None,
    router: Router = None,
    set_: Sets = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="Hugging Face directory, or a name of the hub: engines are started on it for this evaluation, and "
            "stopped."
        ),
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
    from rltool.models.hub import local_model, with_local_models
    from rltool.report.eval_table import result, result_table
    from rltool.rollout.measure.evaluation import write_evaluated
    from rltool.training.checks.preflight import (
        check_fleet,
        check_router,
        describe_fleet,
        probe_fleet,
        resolve_endpoints,
    )
    from rltool.training.checks.side_models import check_all_there, probe_models, running_models
    from rltool.training.evaluate import check_alone, evaluate_alone
    from rltool.training.manager.rollout_engines import Engines

    if checkpoint is not None and rollout_external:
        raise UsageError("--rollout-external and --checkpoint: give one of them, for it is one model that is evaluated")
    if checkpoint is None and not rollout_external:
        raise UsageError("nothing to evaluate: give --rollout-external HOST:PORT or --checkpoint DIRECTORY")
    if serve_flags and checkpoint is None:
        raise UsageError("--serve-flags are of the engines that --checkpoint starts")
    words = _words(serve_flags)
    if out is not None and not out.absolute().parent.is_dir():
        raise UsageError(f"--out {out}: {out.absolute().parent} is no directory; make it, or choose another file")
    if checkpoint is not None:
        checkpoint = local_model(checkpoint, setting="--checkpoint")
        _check_checkpoint(checkpoint)
    console = Console()

    def log(line: str) -> None:
        console.print(line)

    def configured(external: list[str] | None) -> TrainConfig:
        flags = {
            **rollout_flags(external, router),
            "eval.seed": ("--seed", seed),
            "model.path": ("--checkpoint", checkpoint),
        }
        loaded = load_config(TrainConfig, config or [], set_ or [], flags, rules=())
        return with_local_models(loaded.config, trains=False)

    # All of it before engines are started, which takes half a minute and more.
    settings = configured(rollout_external)
    check_alone(settings)
    with _engines(checkpoint, words, log) as started:
        if started is not None:
            settings = configured(started)
        fleet = probe_fleet(resolve_endpoints(settings), settings.deadlines.preflight)
        check_fleet(fleet, settings, trainer_device=None)
        check_router(fleet, settings)
        beside = running_models(settings)
        check_all_there(settings, beside)
        log(describe_fleet(fleet))
        engines = Engines(
            fleet.endpoints.engines, fleet.infos, router=fleet.endpoints.data_endpoint(),
            models=probe_models(settings, beside),
        )  # fmt: skip
        found = evaluate_alone(settings, engines, log=log)
    console.print(result_table(found.metrics))
    log("intervals: a bootstrap over prompts; Wilson's where all of them are 0, or all 1")
    if out is not None:
        about = {
            "model": str(settings.model.path),
            "weight_versions": sorted({str(info.weight_version) for info in fleet.infos.values()}),
            "eval": settings.eval.shown(),
        }
        _write(out, json.dumps(result(found.metrics, about), indent=2) + "\n")
        log(f"results: {out}")
    if dump is not None:
        write_evaluated(dump, found, settings, step=0)
        log(f"samples: {dump}")


def _words(serve_flags: str) -> list[str]:
    try:
        return shlex.split(serve_flags)
    except ValueError as error:
        raise UsageError(f"--serve-flags {serve_flags!r}: {error}; quote it as for a shell") from error


def _check_checkpoint(checkpoint: Path) -> None:
    if not (checkpoint / "config.json").is_file() or (checkpoint / "manifest.json").exists():
        raise UsageError(
            f"--checkpoint {checkpoint} is no Hugging Face directory; `rltool convert-ckpt {checkpoint} NEW --to hf` "
            "makes one of a checkpoint of rltool"
        )


@contextmanager
def _engines(checkpoint: Path | None, words: list[str], log: Callable[[str], None]) -> Iterator[list[str] | None]:
    """Engines that serve the checkpoint while the block runs; yields their addresses, None without a checkpoint.

    They have a run of their own, whose GPUs other commands see to be taken. It goes with them: the newest run shall be
    the user's. It stays, and is named, where an engine or the evaluation failed, for it has the logs. SIGTERM ends them
    as Ctrl-C does.
    """
    from rltool.processes.run_directory import open_run
    from rltool.processes.signals import termination_interrupts
    from rltool.processes.stop_run import stop_run

    if checkpoint is None:
        yield None
        return
    run = open_run(None, create=True)
    keep = False
    with termination_interrupts():
        try:
            log(f"engines are starting on {checkpoint}: logs in {run.logs_dir}")
            _serve(run, checkpoint, words)
            yield [f"@{run.endpoints_file}"]
        except UsageError:
            raise
        except RltoolError as error:
            keep = True
            raise error.with_context(after=f"\nThe engines' logs: rltool logs --run {run.name}") from error
        except Exception:
            keep = True
            raise
        finally:
            stop_run(run)
            if not keep:
                shutil.rmtree(run.path, ignore_errors=True)


def _serve(run: RunDirectory, checkpoint: Path, words: list[str]) -> None:
    """serve-engines, detached. Its output is for engines that stay: it goes into a log, which is shown
    where it failed. (Not into a pipe: that would be at its end only when the last process that inherited it is.)"""
    command = [sys.executable, "-m", "rltool", "serve-engines", str(checkpoint), "--run", run.name, "--detach", *words]
    log = run.new_log("eval")
    with log.open("w") as output:
        returncode = subprocess.run(command, check=False, stdout=output, stderr=subprocess.STDOUT).returncode
    if returncode == 0:
        return
    write_line(log.read_text(errors="replace").rstrip("\n"))
    kind = UsageError if returncode == UsageError.exit_code else RltoolError
    raise kind("--checkpoint: the engines did not start (see above)")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RltoolError(f"cannot write the results to {path}: {error.strerror}; choose another --out") from error
