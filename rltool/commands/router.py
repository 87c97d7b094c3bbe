"""`rltool router`, `rltool router add|remove|list`."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from typer.core import TyperGroup

from rltool.config.loader import load_config
from rltool.config.router import RouterConfig
from rltool.config.serve import POLICY
from rltool.engines.endpoints import resolve
from rltool.engines.fleet.joining import join, leave, users_of_router
from rltool.errors import UsageError
from rltool.processes.hosts import is_loopback
from rltool.processes.run_choice import train_command
from rltool.processes.run_directory import open_run
from rltool.processes.state import free_role
from rltool.processes.supervise import ProcessGroup, run_command
from rltool.router.launch import forget_router, plan_router, running_router, start_router
from rltool.router.workers import add_worker, list_workers, remove_worker
from rltool.terminal import Console

console = Console()
Run = Annotated[str | None, typer.Option("--run", help="Run to use; default: the newest.")]
Timeout = Annotated[float, typer.Option(help="Seconds to wait for it.")]
Model = Annotated[str, typer.Option(help="The model whose router it is, by its name in endpoints.json.")]


class StartByDefault(TyperGroup):
    """`rltool router @endpoints.json` is `rltool router start @endpoints.json`; a misspelt verb is not."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and (near := difflib.get_close_matches(args[0], self.commands, n=1)):
            raise UsageError(
                f"rltool router {args[0]}: did you mean `rltool router {near[0]}`? Engines are given as "
                "@endpoints.json or HOST:PORT"
            )
        if not args or (args[0] not in self.commands and args[0] != "--help"):
            args = ["start", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    add_completion=False,
    cls=StartByDefault,
    help="A router in front of engines. Without add, remove or list: start one (its options: rltool router start "
    "--help).",
)


@app.command()
def start(
    addresses: Annotated[
        list[str] | None, typer.Argument(help="@endpoints.json or engine URLs; default: the run's endpoints.json.")
    ] = None,
    run: Run = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return when it serves; it lives on until `rltool stop`.")
    ] = False,
    host: Annotated[str | None, typer.Option(help="Address to listen on (default: 127.0.0.1).")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on (default: a free one).")] = None,
    policy: Annotated[
        str | None,
        typer.Option(help="random, round_robin, cache_aware, power_of_two or manual (default: cache_aware)."),
    ] = None,
    key_file: Annotated[Path | None, typer.Option(help="File with the key of engines given as URLs.")] = None,
    ready_timeout: Annotated[
        float | None, typer.Option(help="Seconds until all workers must be registered (default: 120).")
    ] = None,
    model: Model = POLICY,
) -> None:
    """Start sglang-router for engines, register them, and wait until it serves."""
    flags = {"host": ("--host", host), "port": ("--port", port), "policy": ("--policy", policy)}
    flags |= {"key_file": ("--key-file", key_file), "ready_timeout": ("--ready-timeout", ready_timeout)}
    config = load_config(RouterConfig, flags=flags).config
    plan = plan_router(addresses or [], run, model)
    started: list[str] = []

    def bring_up(group: ProcessGroup) -> None:
        url = start_router(
            config, plan.model, group, name=plan.name, endpoints_file=plan.endpoints_file, report=console.print
        )
        started.append(url)
        if not is_loopback(config.host):
            console.print(
                f"listening on {config.host}: reachable from other hosts; some of its routes (health, model facts) "
                "need no key",
                style="yellow",
            )
        console.print(f"router ready: {url}, {len(plan.model.engines)} worker(s), run {plan.run.name}")
        if plan.endpoints_file is not None:
            console.print(train_command(plan.endpoints_file))
        else:
            urls = ",".join(engine.url for engine in plan.model.engines)
            console.print(f"rltool train --config run.toml --rollout-external {urls} --router {url}")

    try:
        role = free_role("router-command", plan.run)
        code = run_command(role, plan.run, bring_up, detach=detach, note=console.print)
    finally:
        if started and plan.endpoints_file is not None:
            forget_router(plan.endpoints_file, started[0])
    raise typer.Exit(code)


@app.command()
def add(
    addresses: Annotated[list[str], typer.Argument(help="Engine URLs or @endpoints.json.")],
    run: Run = None,
    key_file: Annotated[
        Path | None, typer.Option(help="File with the engines' key, where they are given as URLs.")
    ] = None,
    no_join: Annotated[
        bool,
        typer.Option(
            "--no-join",
            help="Add them to the router alone; a run that is training through it takes out what it does not know, or "
            "ends (engines.foreign_workers).",
        ),
    ] = False,
    timeout: Timeout = 120.0,
) -> None:
    """Add engines to the run's router and wait until it serves through them.

    Where a run is training through the router, they join that run: it adds each once it has the run's weights.
    """
    directory = open_run(run, create=False)
    router = running_router(directory)
    engines = [
        engine if engine.key_file else engine.model_copy(update={"key_file": key_file or router.key_file})
        for engine in resolve(addresses).engines
    ]
    users = [] if no_join else users_of_router(directory, router.url)
    join(users, engines, _log)
    if users:
        return
    for engine in engines:
        console.print(f"added {add_worker(router, engine, timeout=timeout).url}")


@app.command()
def remove(
    urls: Annotated[list[str], typer.Argument(help="Engine URLs.")], run: Run = None, timeout: Timeout = 60.0
) -> None:
    """Remove engines from the run's router and wait until they get no new request.

    Where a run is training through the router, they leave that run.
    """
    directory = open_run(run, create=False)
    router = running_router(directory)
    engines = resolve(urls).engines
    leave(users_of_router(directory, router.url), [engine.url for engine in engines], _log)
    for engine in engines:
        removed = remove_worker(router, engine.url, timeout=timeout)
        console.print(f"removed {engine.url}" if removed else f"{engine.url} was no worker")


def _log(line: str) -> None:
    console.print(line)


@app.command("list")
def list_command(run: Run = None) -> None:
    """List the workers of the run's router."""
    router = running_router(open_run(run, create=False))
    table = Table("worker", "healthy", "in flight", "model", title=f"workers of {router.url}")
    for worker in list_workers(router):
        table.add_row(worker.url, "yes" if worker.healthy else "no", str(worker.load), worker.model_id)
    console.print(table)
