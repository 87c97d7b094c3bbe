"""`rltool report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rltool.commands.options import NamedRun
from rltool.errors import UsageError
from rltool.processes.run_directory import open_run
from rltool.report.page import write_report
from rltool.terminal import Console


def report(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN]...", help="Runs on the page, compared; default: the newest, which is named."),
    ] = None,
    run: NamedRun = None,
    out: Annotated[Path | None, typer.Option(help="File to write; default: report.html in the (first) run.")] = None,
    title: Annotated[str, typer.Option(help="Heading of the page; default: the names of the runs.")] = "",
    note: Annotated[str, typer.Option(help="A sentence below the heading: what was trained, and what for.")] = "",
) -> None:
    """Write curves, answers, metrics and configuration of one or several runs into one HTML page. They may be going
    on."""
    if runs and run:
        raise UsageError("name the runs either as arguments or with --run")
    directories = [open_run(name, create=False) for name in (runs or [run])]
    path = write_report([directory.path for directory in directories], out, title=title, note=note)
    names = ", ".join(directory.name for directory in directories)
    what = "run" if len(directories) == 1 else "runs"
    Console().print(f"report of {what} {names}: {path}")
