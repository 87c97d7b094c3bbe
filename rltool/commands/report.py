"""`rltool report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rltool.processes.run_directory import open_run
from rltool.report.page import write_report


def report(
    run: Annotated[str | None, typer.Option("--run", help="Run; default: the newest, which is named.")] = None,
    out: Annotated[Path | None, typer.Option(help="File to write; default: report.html in the run.")] = None,
) -> None:
    """Write a training run's curves, metrics and configuration into one HTML page. The run may be going on."""
    directory = open_run(run, create=False)
    path = write_report(directory.path, out)
    Console().print(f"report of run {directory.name}: {path}", highlight=False, markup=False, soft_wrap=True)
