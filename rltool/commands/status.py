"""`rltool status`."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from rltool.engines.run_status import ProcessStatus, run_status
from rltool.processes.run_directory import RunDirectory, list_runs, open_run


def status(
    run: Annotated[str | None, typer.Option("--run", help="Run to show; default: the newest.")] = None,
    all_runs: Annotated[bool, typer.Option("--all", help="Every run.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs: one JSON object.")] = False,
) -> None:
    """Show what a run's processes are doing."""
    runs = list_runs() if all_runs else [open_run(run, create=False)]
    found = [(directory, asyncio.run(run_status(directory))) for directory in runs]
    if as_json:
        print(json.dumps({"runs": [_as_json(directory, rows) for directory, rows in found]}, indent=2))
        return
    for directory, rows in found:
        _print(directory, rows)


def _as_json(run: RunDirectory, rows: list[ProcessStatus]) -> dict:
    return {"name": run.name, "path": str(run.path), "processes": [row.model_dump(mode="json") for row in rows]}


def _print(run: RunDirectory, rows: list[ProcessStatus]) -> None:
    console = Console()
    if not rows:
        console.print(f"run {run.name} ({run.path}): no process", soft_wrap=True)
        return
    table = Table(title=f"run {run.name}")
    for name in ("role", "pid", "alive", "url"):
        table.add_column(name, no_wrap=True)
    for name in ("health", "weight version", "GPUs"):
        table.add_column(name, overflow="fold")
    for row in rows:
        alive = {True: "yes", False: "[red]no[/red]", None: "-"}[row.alive]
        gpus = ",".join(map(str, row.gpus)) or "-"
        table.add_row(row.role, str(row.pid or "-"), alive, row.url or "-", row.health or "-", row.weight_version or "-", gpus)
    console.print(table)
    for row in rows:
        if row.log is not None:
            console.print(f"{row.role}: {row.log}", soft_wrap=True, highlight=False)
