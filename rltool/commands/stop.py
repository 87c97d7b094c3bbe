"""`rltool stop`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from rltool.processes.run_directory import list_runs, open_run
from rltool.processes.stop import GRACE_SECONDS
from rltool.processes.stop_run import stop_run
from rltool.router.launch import ROLE, forget_router


def stop(
    roles: Annotated[
        list[str] | None, typer.Argument(help="Processes such as engine-0 or router; default: all of the run.")
    ] = None,
    run: Annotated[str | None, typer.Option("--run", help="Run to stop; default: the newest, which is named.")] = None,
    all_runs: Annotated[bool, typer.Option("--all", help="Every run.")] = False,
    grace: Annotated[float, typer.Option(help="Seconds between TERM and KILL.")] = GRACE_SECONDS,
) -> None:
    """Stop processes that rltool started, with everything that they started: first asked, then killed."""
    console = Console()
    for directory in list_runs() if all_runs else [open_run(run, create=False)]:
        console.print(f"run {directory.name}: {directory.path}", highlight=False, markup=False, soft_wrap=True)
        stopped = stop_run(directory, roles or (), grace=grace, report=console.print)
        for state in stopped:
            console.print(f"stopped {state.role} (pid {state.pid})")
            if state.role == ROLE and state.url is not None:
                forget_router(directory.endpoints_file, state.url)
        if not stopped:
            console.print("nothing was running")
