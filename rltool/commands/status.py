"""`rltool status`."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from rltool.commands.tables import engine_table, log_no_run, progress_line, served_line, short_version
from rltool.engines.run_status import RunReport, run_status
from rltool.processes.run_directory import RunDirectory, list_runs, open_run
from rltool.terminal import Console, write_line


def status(
    run: Annotated[str | None, typer.Option("--run", help="Run to show; default: the newest, which is named.")] = None,
    all_runs: Annotated[bool, typer.Option("--all", help="Every run.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs: one JSON object.")] = False,
) -> None:
    """Show what a run's processes are doing."""
    runs = _chosen(run, all_runs=all_runs, as_json=as_json)
    found = [(directory, run_status(directory)) for directory in runs]
    if as_json:
        write_line(json.dumps({"runs": [_as_json(directory, report) for directory, report in found]}, indent=2))
        return
    if not found:
        log_no_run()
    for directory, report in found:
        _print(directory, report)


def _chosen(name: str | None, *, all_runs: bool, as_json: bool) -> list[RunDirectory]:
    """A program that asks for the newest run gets its object also where there is none; a person sees how one is
    made."""
    if all_runs:
        return list_runs()
    if as_json and name is None:
        return list_runs()[-1:]
    return [open_run(name, create=False)]


def _as_json(run: RunDirectory, report: RunReport) -> dict:
    processes = [row.model_dump(mode="json") for row in report.processes]
    of_trainer = {"training": report.training, "served": report.served}
    return {"name": run.name, "path": str(run.path), "processes": processes, **of_trainer}


def _print(run: RunDirectory, report: RunReport) -> None:
    console = Console()
    rows = report.processes
    if not rows:
        console.print(f"run {run.name}: {run.path}: no process")
        return
    console.print(f"run {run.name}: {run.path}")
    table = Table()
    for name in ("role", "pid", "alive", "url"):
        table.add_column(name, no_wrap=True)
    for name in ("health", "weight version", "GPUs"):
        table.add_column(name, overflow="fold")
    for row in rows:
        alive = {True: "yes", False: Text("no", "red"), None: "-"}[row.alive]
        gpus = ",".join(map(str, row.gpus)) or "-"
        health = row.health or "-"
        version = short_version(row.weight_version)
        table.add_row(row.role, str(row.pid or "-"), alive, row.url or "-", health, version, gpus)
    console.print(table)
    if report.training is not None:
        console.print(progress_line(report.training))
        for name, title in (("engines", "the run's engines"), ("evaluation_engines", "its engines for evaluation")):
            engines = report.training.get(name)
            if engines:
                console.print(engine_table(engines, title))
    if report.served is not None:
        console.print(served_line(report.served))
    for row in rows:
        if row.log is not None:
            console.print(f"{row.role}: {row.log}")
