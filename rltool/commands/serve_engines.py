"""`rltool serve-engines`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from rltool.config.loader import load_config
from rltool.config.serve import EngineLaunch, ServeConfig
from rltool.engines.joining import join, leave, users_of_engines
from rltool.engines.launch import check_launch, dry_run, engine_flags, engine_spec, launch_engines, parse_gpus
from rltool.processes.hosts import http_url, is_loopback
from rltool.processes.run_choice import train_command
from rltool.processes.run_directory import RunDirectory, open_run, runs_root
from rltool.processes.state import free_role
from rltool.processes.supervise import ProcessGroup, run_in_foreground

console = Console()

ORDERLY_SECONDS = 300.0
"""`rltool stop` waits so long for a run that trains to let go of the engines (its deadlines.drain), and for their
end."""


def serve_engines(
    model: Annotated[Path, typer.Argument(help="Hugging Face model directory.")],
    engine_args: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ENGINE FLAGS]", help="Passed to each engine untouched.")
    ] = None,
    engine: Annotated[str | None, typer.Option(help="vllm or sglang (default: vllm).")] = None,
    num_engines: Annotated[int | None, typer.Option(help="How many engines (default: 1).")] = None,
    gpus: Annotated[
        str | None, typer.Option(help="GPUs of this host, given to engines in order: 0,1,2,3 or 0-3 (default: from 0).")
    ] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel size: GPUs per engine (default: 1).")] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu (default: cuda).")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on (default: 127.0.0.1).")] = None,
    port: Annotated[
        int | None, typer.Option(help="Port of the first engine, the others follow (default: free ones).")
    ] = None,
    engine_python: Annotated[
        Path | None, typer.Option(help="Python of the environment that has the engine (default: this one).")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest sequence in tokens (default: the model's).")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Engine dtype (default: the model's; float32 on the CPU).")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the first engine; the others count up (default: 0).")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
    ] = False,
    weight_backend: Annotated[
        str | None, typer.Option(help="rltool (the plugin's: nccl, gloo or disk; the default) or nccl (vLLM's own).")
    ] = None,
    ready_timeout: Annotated[float | None, typer.Option(help="Seconds until all must serve (default: 600).")] = None,
    run: Annotated[str | None, typer.Option(help="Name of the run (default: a fresh one).")] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return when they serve; they live on until `rltool stop`.")
    ] = False,
    no_join: Annotated[
        bool, typer.Option("--no-join", help="Do not join a run that is training with this run's engines.")
    ] = False,
    dry: Annotated[bool, typer.Option("--dry-run", help="Show what would be started, and start nothing.")] = False,
) -> None:
    """Start inference engines, wait until each one serves, and write their addresses to the run's endpoints.json."""
    flags = {
        "model": ("MODEL", model),
        "engine": ("--engine", engine),
        "num_engines": ("--num-engines", num_engines),
        "gpus": ("--gpus", None if gpus is None else parse_gpus(gpus)),
        "tp": ("--tp", tp),
        "device": ("--device", device),
        "host": ("--host", host),
        "port": ("--port", port),
        "engine_python": ("--engine-python", engine_python),
        "max_model_len": ("--max-model-len", max_model_len),
        "dtype": ("--dtype", dtype),
        "seed": ("--seed", seed),
        "trust_remote_code": ("--trust-remote-code", trust_remote_code or None),
        "weight_backend": ("--weight-backend", weight_backend),
        "ready_timeout": ("--ready-timeout", ready_timeout),
        "extra_args": ("--", engine_flags(engine_args or [])),
    }
    config = load_config(ServeConfig, flags=flags).config
    if dry:
        _print_dry_run(config, RunDirectory(runs_root() / (run or "NEW-RUN")))
        return
    check_launch(config)
    directory = open_run(run, create=True)

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    def bring_up(group: ProcessGroup) -> None:
        console.print(
            f"run {directory.name}: {config.num_engines} x {config.engine} on {config.device}, logs in "
            f"{directory.logs_dir}/latest",
            soft_wrap=True,
        )
        if not is_loopback(config.host):
            console.print(
                f"[yellow]listening on {config.host}: reachable from other hosts, guarded by the key, not "
                "encrypted[/yellow]"
            )
        endpoints = launch_engines(config, group, report=console.print)
        table = Table("engine", "url", "GPUs", "world size", "weights")
        for process, endpoint in zip(group.processes, endpoints, strict=True):
            where = ",".join(map(str, endpoint.gpus)) or config.device
            table.add_row(process.role, endpoint.url, where, str(endpoint.tp), endpoint.weight_backend)
        console.print(table)
        if not no_join:
            join(users_of_engines(directory), endpoints, say)
            group.before_stop = lambda: leave(users_of_engines(directory), [e.url for e in endpoints], say)
        console.print(train_command(directory.endpoints_file), highlight=False, markup=False, soft_wrap=True)
        console.print(f"detached; end them with: rltool stop --run {directory.name}" if detach else "Ctrl-C ends them")

    role = free_role("serve-engines", directory)
    code = run_in_foreground(
        role, directory, bring_up, detach=detach, note=console.print, orderly_seconds=ORDERLY_SECONDS
    )
    raise typer.Exit(code)


def _print_dry_run(config: ServeConfig, run: RunDirectory) -> None:
    launches, warnings = dry_run(config, run)
    for launch in launches:
        _print_launch(config, launch)
    for warning in warnings:
        console.print(f"[yellow]warning: {warning}[/yellow]", soft_wrap=True)
    console.print("dry run: nothing was started")


def _print_launch(config: ServeConfig, launch: EngineLaunch) -> None:
    spec = engine_spec(config, launch)
    gpus = ",".join(map(str, launch.gpus)) or "none"
    console.print(f"[bold]{spec.role}[/bold]  {http_url(launch.host, launch.port)}  port {launch.port}  GPUs {gpus}")
    for name, value in sorted(spec.environment.items()):
        console.print(f"  {name}={shlex.quote(value)}", soft_wrap=True, markup=False, highlight=False)
    console.print(f"  {shlex.join(spec.argv)}", soft_wrap=True, markup=False, highlight=False)
