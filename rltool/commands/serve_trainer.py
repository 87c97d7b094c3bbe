"""`rltool serve-trainer`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rltool.commands.options import Config, External, Sets, rollout_flags
from rltool.config.loader import load_config
from rltool.config.serve_trainer import ServeTrainerConfig
from rltool.config.train import TrainConfig
from rltool.engines.endpoints import files_in
from rltool.errors import UsageError
from rltool.models.hub import with_local_models
from rltool.processes.files import starting
from rltool.processes.hosts import is_loopback
from rltool.processes.run_directory import RunDirectory, open_run, plan_run
from rltool.processes.stop_run import end_left_behind
from rltool.processes.supervise import ProcessGroup, run_command
from rltool.terminal import Console

console = Console()

ORDERLY_SECONDS = 60.0
"""`rltool stop` waits so long for the call that the trainer carries out, and for Ray to end."""


def serve_trainer(
    model: Annotated[
        str | None,
        typer.Argument(help="Hugging Face model directory or a name of the hub; with --config the file may name it."),
    ] = None,
    config: Config = None,
    rollout_external: External = None,
    set_: Sets = None,
    run: Annotated[
        str | None, typer.Option("--run", help="Name of the run (default: that of the given endpoints.json, or new).")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on (default: 127.0.0.1).")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on (default: 8300).")] = None,
    keys: Annotated[
        Path | None,
        typer.Option(help="Directory with a key file for each client (default: the run's state/clients, made)."),
    ] = None,
    checkpoints: Annotated[
        Path | None,
        typer.Option(help="Directory whose checkpoints of `train` clients load, as tinker://shared/weights/NAME."),
    ] = None,
    served_name: Annotated[
        str | None, typer.Option(help="What clients name as the base model (default: MODEL as it is given).")
    ] = None,
    lora_rank: Annotated[
        int | None,
        typer.Option(help="The largest rank that a client may ask for; 0: clients train all weights (default: 32)."),
    ] = None,
    max_in_flight: Annotated[
        int | None, typer.Option(help="Calls of one client that wait for the trainer (default: 256).")
    ] = None,
    max_samples: Annotated[
        int | None, typer.Option(help="Sampling requests of one client in flight (default: 4096).")
    ] = None,
    max_queued_bytes: Annotated[
        int | None,
        typer.Option(help="Bytes of one client's calls and samples that have not ended, or results (default: 1 GiB)."),
    ] = None,
    max_models: Annotated[int | None, typer.Option(help="Models of one client (default: 16).")] = None,
    session_timeout: Annotated[
        float | None,
        typer.Option(help="Seconds after which an idle session's models may be evicted for others (default: 600)."),
    ] = None,
    max_checkpoints: Annotated[int | None, typer.Option(help="Checkpoints of one client (default: 100).")] = None,
    max_body_bytes: Annotated[int | None, typer.Option(help="Of one request (default: 64 MiB).")] = None,
    snapshot_every: Annotated[
        int | None, typer.Option(help="So many calls at most are carried out again after a restart (default: 100).")
    ] = None,
    max_restarts: Annotated[
        int | None, typer.Option(help="How often it is started again when it dies, or a rank (default: 5).")
    ] = None,
    ready_timeout: Annotated[float | None, typer.Option(help="Seconds until it must serve (default: 900).")] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return when it serves; it lives on until `rltool stop`.")
    ] = False,
) -> None:
    """Serve the trainer to loops of your own, in Tinker's API: clients train adapters and sample from the engines."""
    from rltool.tinker.launch import Parts, check_engines, keys_of, probed, start_server

    given = {
        "host": host, "port": port, "keys": keys, "checkpoints": checkpoints, "served_name": served_name,
        "lora_rank": lora_rank,
        "max_in_flight": max_in_flight, "max_samples": max_samples, "max_models": max_models,
        "max_queued_bytes": max_queued_bytes, "session_timeout": session_timeout,
        "max_checkpoints": max_checkpoints, "max_body_bytes": max_body_bytes, "snapshot_every": snapshot_every,
        "max_restarts": max_restarts, "ready_timeout": ready_timeout,
    }  # fmt: skip
    serving = load_config(
        ServeTrainerConfig, flags={name: (f"--{name.replace('_', '-')}", value) for name, value in given.items()}
    ).config
    flags = {"model.path": ("MODEL", model), **rollout_flags(rollout_external, None)}
    named = load_config(TrainConfig, config or [], set_ or [], flags, rules=()).config
    settings = with_local_models(named)
    if serving.checkpoints is not None:
        if not serving.checkpoints.is_dir():
            raise UsageError(f"--checkpoints {serving.checkpoints} is no directory")
        serving = serving.model_copy(update={"checkpoints": serving.checkpoints.absolute()})
    if settings.lora.rank:
        raise UsageError("lora.rank: clients choose the rank of their adapters; --lora-rank bounds it")
    if settings.trainer.fake_quantization:
        raise UsageError("trainer.fake_quantization is not implemented for serve-trainer; leave it out")
    if settings.trainer.router_bias_update_rate:
        raise UsageError("trainer.router_bias_update_rate moves the model's routers, and here calls of clients train")
    directory = _run(run, settings)
    fleet = probed(settings) if settings.engines.external else None
    if fleet is not None:
        check_engines(fleet, settings, serving, directory)
    path = named.model.path
    name = serving.served_name or str(path.absolute() if path.exists() else path)
    with starting("serve-trainer", directory.path):
        directory = open_run(directory.name, create=True, root=directory.path.parent)
        keys_directory = keys_of(serving, directory)
    file = directory.path / "serve-trainer.json"
    parts = Parts(run=directory.path, config=file, served_name=name, keys=keys_directory)

    def bring_up(group: ProcessGroup) -> None:
        url = start_server(settings, serving, parts, group, report=console.print)
        if not is_loopback(serving.host):
            where = f"listening on {serving.host}: reachable from other hosts, guarded by keys, not encrypted"
            console.print(where, style="yellow")
        engines = f"{len(fleet.infos)} engine(s)" if fleet is not None else "no engines: nothing is sampled"
        console.print(f"trainer ready: {url}, base model {name}, {engines}, run {directory.name}")
        key = next(iter(sorted(parts.keys.iterdir())))
        console.print(f'for clients: TINKER_BASE_URL={url} TINKER_API_KEY="$(cat {key})"')
        console.print(f"detached; end it with: rltool stop --run {directory.name}" if detach else "Ctrl-C ends it")

    try:
        with starting("serve-trainer", directory.path):
            code = run_command(
                "serve-trainer-command", directory, bring_up, detach=detach, note=console.print,
                orderly_seconds=ORDERLY_SECONDS,
            )  # fmt: skip
    finally:
        end_left_behind(directory)
    raise typer.Exit(code)


def _run(name: str | None, settings: TrainConfig) -> RunDirectory:
    """That of the command line, or of the engines. Nothing is made."""
    files = files_in(settings.engines.external)
    if name is None and len(files) == 1 and (of_file := RunDirectory(files[0].absolute().parent)).is_made:
        return of_file
    return plan_run(name)
