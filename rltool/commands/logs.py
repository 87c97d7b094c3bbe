"""`rltool logs`."""

from __future__ import annotations

from typing import Annotated

import typer

from rltool.processes.logs import choose_logs, follow, last_lines
from rltool.processes.run_directory import open_run
from rltool.terminal import write_line


def logs(
    role: Annotated[
        str | None, typer.Argument(help="One process, such as engine-0, router or train; default: all.")
    ] = None,
    follow_: Annotated[bool, typer.Option("--follow", "-f", help="Go on as they grow, until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("-n", "--lines", min=0, help="How many of the last lines of each.")] = 20,
    run: Annotated[str | None, typer.Option("--run", help="Run to use; default: the newest.")] = None,
) -> None:
    """Show the last lines of a run's logs, or follow them."""
    files = choose_logs(open_run(run, create=False).logs_dir, role)
    width = max(map(len, files))
    if follow_:
        for name, line in follow(files, lines=lines):
            _print(name if len(files) > 1 else None, width, line)
        return
    for name, file in files.items():
        for line in last_lines(file, lines):
            _print(name if len(files) > 1 else None, width, line)


def _print(role: str | None, width: int, line: str) -> None:
    write_line(line if role is None else f"{role:<{width}} | {line}")
