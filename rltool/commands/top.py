"""`rltool top`: a run that is training, or a served trainer, live."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from rltool.commands.options import NamedRun, one_name
from rltool.commands.top_view import frame, served_frame
from rltool.engines.run_client import DRIVER_ROLE, SERVED_ROLE, choose_driver, driver_of
from rltool.errors import EngineUnreachable
from rltool.processes.state import read_state
from rltool.terminal import Console

if TYPE_CHECKING:
    from rltool.engines.run_client import Driver


def top(
    run: Annotated[str | None, typer.Argument(help="Name of the run; default: the only one that is training.")] = None,
    named: NamedRun = None,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two frames.")] = 1.0,
) -> None:
    """Watch a run that is training: engines, queue, throughput, staleness, rewards; or a served trainer: calls, models,
    samples. Ctrl-C ends it, not the run."""
    directory, driver = choose_driver(one_name(run, named), roles=(DRIVER_ROLE, SERVED_ROLE))
    console = Console()
    if once:
        console.print(_frame(directory.name, driver))
        return
    shown = _frame(directory.name, driver)
    try:
        with Live(shown, console=console, auto_refresh=False, screen=console.is_terminal) as live:
            while driver_of(directory, read_state(directory, driver.role), driver.role) is not None:
                time.sleep(interval)
                try:
                    shown = _frame(directory.name, driver)
                    live.update(shown, refresh=True)
                except EngineUnreachable as error:  # busy for a moment: what was seen last stays on the screen
                    late = Text(f"the driver does not answer: {error}", style="yellow")
                    live.update(Group(shown, late), refresh=True)
    except KeyboardInterrupt:
        return
    console.print(f"run {directory.name} has ended")


def _frame(run: str, driver: Driver) -> RenderableType:
    if driver.role == SERVED_ROLE:
        return served_frame(run, driver.served())
    return frame(run, driver.status(), driver.history())
