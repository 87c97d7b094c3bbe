"""`rltool engines resume`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rltool.engines.endpoints import resolve
from rltool.engines.resume import resume_engines
from rltool.processes.run_directory import open_run

app = typer.Typer(add_completion=False, help="Engines that are already running.", no_args_is_help=True)


@app.callback()
def _engines() -> None:
    pass


@app.command()
def resume(
    addresses: Annotated[list[str] | None, typer.Argument(help="@endpoints.json or HOST:PORT; default: the run's engines.")] = None,
    run: Annotated[str | None, typer.Option("--run", help="Run whose engines are meant; default: the newest.")] = None,
    key_file: Annotated[Path | None, typer.Option(help="File with the key of engines given as HOST:PORT.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for each step.")] = 30.0,
) -> None:
    """Unpause engines that a dead trainer left paused, and shut its transfer group down. Preflight of train does the same."""
    console = Console()
    engines = resolve(addresses or [f"@{open_run(run, create=False).endpoints_file}"]).engines
    keyed = [engine if engine.key_file else engine.model_copy(update={"key_file": key_file}) for engine in engines]
    results = asyncio.run(resume_engines(keyed, timeout=timeout))
    for result in results:
        if result.error is not None:
            console.print(f"[red]{result.url}: {result.error}[/red]", soft_wrap=True)
        else:
            was = {True: "was paused, resumed", False: "was not paused", None: "resumed"}[result.was_paused]
            console.print(f"{result.url}: {was}; {result.transfer}", soft_wrap=True)
    raise typer.Exit(1 if any(result.error for result in results) else 0)
