"""`rltool stop`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from rltool.commands.tables import log_no_run
from rltool.engines.fleet.joining import leave, users_of_engines
from rltool.engines.launch.plan import is_router
from rltool.engines.run_client import DRIVER_ROLE
from rltool.processes.run_directory import RunDirectory, list_runs, open_run
from rltool.processes.state import is_elsewhere, read_states
from rltool.processes.stop import GRACE_SECONDS
from rltool.processes.stop_run import stop_run
from rltool.router.launch import forget_router
from rltool.terminal import Console


def stop(
    roles: Annotated[
        list[str] | None, typer.Argument(help="Processes such as engine-0 or router; default: all of the run.")
    ] = None,
    run: Annotated[str | None, typer.Option("--run", help="Run to stop; default: the newest, which is named.")] = None,
    all_runs: Annotated[bool, typer.Option("--all", help="Every run.")] = False,
    grace: Annotated[float, typer.Option(min=0.0, help="Seconds between TERM and KILL.")] = GRACE_SECONDS,
) -> None:
    """Stop processes that rltool started, with everything that they started: first asked, then killed."""
    console = Console()
    runs = list_runs() if all_runs else [open_run(run, create=False)]
    if not runs:
        log_no_run()
    for directory in runs:
        console.print(f"run {directory.name}: {directory.path}")
        if not all_runs:
            _leave_living_runs(directory, roles or (), console)
        stopped = stop_run(directory, roles or (), grace=grace, report=console.print)
        for state in stopped:
            console.print(f"stopped {state.role} (pid {state.pid})")
            if is_router(state.role) and state.url is not None:
                forget_router(directory.endpoints_file, state.url)
        if not stopped:
            console.print("nothing was running on this host")


def _leave_living_runs(directory: RunDirectory, roles: Sequence[str], console: Console) -> None:
    """Engines that are to be stopped first leave, in order, the runs that train with them and live on."""
    recorded = [state for state in read_states(directory) if not is_elsewhere(state)]
    chosen = [state for state in recorded if not roles or state.role in roles]
    engines = [state.url for state in chosen if state.role.startswith("engine-") and state.url is not None]
    if not engines:
        return
    users = users_of_engines(directory)
    if any(state.role == DRIVER_ROLE for state in chosen):  # it is stopped as well, before its engines
        users = [user for user in users if user.run.path != directory.path]
    leave(users, engines, console.print)
