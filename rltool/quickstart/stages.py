"""Runs rltool's own verbs as child processes and shows what they do: the quickstart types what a user would type."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from rltool.processes.run_directory import RUNS_VARIABLE, RunDirectory
from rltool.processes.spawn import ProcessSpec, RunningProcess, describe_exit
from rltool.processes.supervise import ProcessGroup
from rltool.quickstart.metrics_tail import MetricsTail, finished_step, headline, numbers
from rltool.terminal import Console
from rltool.training.observe.metrics import step_line

STEP_LINE = "step "
"""How the trainer's own line of a step begins; each step is shown from its metrics instead."""
POLL_SECONDS = 0.1

Watch = Callable[[str], None]
"""Gets each new line of a verb's output."""


@dataclass
class Stages:
    """One after the other, each with its name, a spinner and its seconds; or in the background, to be waited for
    later."""

    run: RunDirectory
    group: ProcessGroup
    console: Console
    total: int
    timings: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, title: str) -> Iterator[None]:
        """Print a stage's name and duration. A failure inside is left to the caller."""
        number = len(self.timings) + 1
        started = time.monotonic()
        self.console.print(Text.assemble((f"{number}/{self.total}", "bold cyan"), " ", (title, "bold")))
        yield
        self.timings[title] = time.monotonic() - started
        self.console.print(f"    {self.timings[title]:.1f} s", style="dim")

    def begin(self, role: str, *arguments: str, root: Path | None = None) -> RunningProcess:
        """Start `rltool ARGUMENTS` in the background; its output goes to the log of `role`. root: where its --run is,
        if elsewhere."""
        elsewhere = f"{RUNS_VARIABLE}={root} " if root else ""
        self.console.print(f"    $ {elsewhere}rltool {' '.join(arguments)}", style="dim")
        environment = {"PYTHONUNBUFFERED": "1", "COLUMNS": "200", RUNS_VARIABLE: str(root or self.run.path.parent)}
        return self.group.start(
            ProcessSpec(role=role, argv=(sys.executable, "-m", "rltool", *arguments), environment=environment)
        )

    def finish(self, process: RunningProcess, *, watch: Watch | None = None, note: str = "") -> None:
        """Wait for a verb begun before. Raises ProcessFailed, with the end of its log, unless it ends with exit code
        0."""
        with Progress(
            SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn(), console=self.console,
            transient=True,
        ) as bar:
            bar.add_task(f"   {note or process.role}")
            self._follow(process, watch or (lambda line: None))

    def do(self, role: str, *arguments: str, watch: Watch | None = None, note: str = "") -> None:
        """begin and finish."""
        self.finish(self.begin(role, *arguments), watch=watch, note=note)

    def train(
        self, role: str, steps: int, *arguments: str, metrics: Path, shown_every: int = 10, root: Path | None = None
    ) -> None:
        """A training verb: a bar over its steps with the newest figures, and now and then a line kept on the screen.

        Steps are read from `metrics`, the run's metrics.jsonl; what the verb prints besides its step lines is shown as
        it comes.
        """
        tail = MetricsTail(metrics)
        process = self.begin(role, *arguments, root=root)
        columns = (
            SpinnerColumn(),
            TextColumn("   {task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self.console, transient=True) as bar:
            task = bar.add_task("starting", total=steps)

            def show(line: str) -> None:
                self.console.print(f"    {line}")

            def watch(line: str) -> None:
                if not line.startswith(STEP_LINE):
                    show(line)

            def look() -> None:
                for record in tail.new_records():
                    done = finished_step(record)
                    if done is None:
                        continue
                    measured = numbers(record)
                    bar.update(task, completed=done, description=headline(measured))
                    if done == 1 or done % shown_every == 0:
                        show(step_line(done - 1, steps, measured))

            self._follow(process, watch, look)

    def _follow(self, process: RunningProcess, watch: Watch, look: Callable[[], None] = lambda: None) -> None:
        """Until it has ended: `watch` gets each line of its log, and `look` is called after every look at the log."""
        with process.log.open(encoding="utf-8", errors="replace") as log:
            pending = ""
            while True:
                code = process.exit_code()
                pending += log.read()
                *lines, pending = pending.split("\n")
                for line in lines:
                    if line.strip():
                        watch(line.rstrip())
                look()
                if code == 0:
                    return
                if code is not None:
                    raise process.failure(describe_exit(code))
                time.sleep(POLL_SECONDS)
