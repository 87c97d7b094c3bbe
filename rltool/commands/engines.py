"""`rltool engines list`, `add`, `remove` (of a living run), `resume` and `follow-weights`."""

from __future__ import annotations

import asyncio
import signal
import threading
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from rltool.commands.tables import engine_table
from rltool.engines.client import EngineClient, RetryPolicy
from rltool.engines.endpoints import EngineEndpoint, resolve
from rltool.engines.fleet.lease import holder_of_this_process
from rltool.engines.fleet.resume import Resumed, resume_engines
from rltool.engines.run_client import EngineStatus, choose_driver
from rltool.errors import UsageError
from rltool.processes.run_directory import open_run
from rltool.terminal import Console

app = typer.Typer(add_completion=False, help="Engines that are already running.", no_args_is_help=True)

LivingRun = Annotated[str | None, typer.Option("--run", help="Run that is training; default: the only one that does.")]
KeyFile = Annotated[Path | None, typer.Option(help="File with the key of engines given as HOST:PORT.")]


@app.callback()
def _engines() -> None:
    pass


@app.command("list")
def list_engines(run: LivingRun = None) -> None:
    """Show the engines of a run that is training, and which of them serve."""
    directory, driver = choose_driver(run)
    Console().print(engine_table(driver.engines(), f"engines of run {directory.name}"))


@app.command()
def add(
    addresses: Annotated[list[str], typer.Argument(help="HOST:PORT or @endpoints.json.")],
    run: LivingRun = None,
    key_file: KeyFile = None,
) -> None:
    """Have a run that is training use more engines; each serves after its first weight sync."""
    engines = resolve(addresses).engines
    frozen = [engine.url for engine in engines if not engine.takes_weights]
    if frozen:
        raise UsageError(f"{', '.join(frozen)}: update_weights is false in the file, so this is no engine of a policy")
    directory, driver = choose_driver(run)
    for engine in engines:
        engine = engine.model_copy(update={"key_file": engine.key_file or key_file})
        _print(driver.add_engine(engine), engine.url, f"added to run {directory.name}")


@app.command()
def remove(
    addresses: Annotated[list[str], typer.Argument(help="HOST:PORT or @endpoints.json.")], run: LivingRun = None
) -> None:
    """Have a run that is training leave engines: they finish what they have and get nothing new, and live on.

    Returns at once; repeat it, or use `list`, to see the progress.
    """
    engines = resolve(addresses).engines
    directory, driver = choose_driver(run)
    for engine in engines:
        _print(driver.remove_engine(engine.url), engine.url, f"leaves run {directory.name}")


@app.command("follow-weights")
def follow_weights(
    store: Annotated[str, typer.Argument(help="weights.store of the run: a directory or s3://BUCKET/PREFIX.")],
    directory: Annotated[Path, typer.Option("--to", help="Versions are rebuilt below it, on the engine's host.")],
    engine: Annotated[str, typer.Option(help="HOST:PORT of the engine that loads them, as the run has it.")],
    every: Annotated[float, typer.Option(min=0.05, help="Seconds between two looks at the store.")] = 0.5,
    deadline: Annotated[float, typer.Option(min=1.0, help="Seconds for one version to be fetched.")] = 600.0,
) -> None:
    """Rebuild the weights that a run with weights.transport = "delta" writes, for an SGLang server on this host.

    Each version appears as a directory in Hugging Face's layout, of which the newest two are kept; the run has the
    server load it. Runs until it is interrupted.
    """
    from rltool.engines.delta.follow import follow
    from rltool.engines.delta.store import open_store

    engines = resolve([engine]).engines
    if len(engines) != 1:
        raise UsageError(f"{engine} stands for {len(engines)} engines: each has a follower of its own")
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    console = Console()

    def log(line: str) -> None:
        console.print(line)

    log(f"following {store} for {engines[0].url} below {directory.absolute()}")
    follow(open_store(store), directory.absolute(), engine=engines[0].url, every=every, deadline=deadline, log=log,
           stopped=stopped.is_set)  # fmt: skip


def _print(row: EngineStatus, url: str, what: str) -> None:
    stands = ": ".join(text for text in (row.get("state"), row.get("reason")) if text)
    line = f"{url}: {what}" + (f" ({stands})" if stands else "")
    Console().print(line)


@app.command()
def resume(
    addresses: Annotated[
        list[str] | None, typer.Argument(help="@endpoints.json or HOST:PORT; default: the run's engines.")
    ] = None,
    run: Annotated[str | None, typer.Option("--run", help="Run whose engines are meant; default: the newest.")] = None,
    key_file: KeyFile = None,
    timeout: Annotated[float, typer.Option(help="Seconds for each step.")] = 30.0,
    steal: Annotated[
        bool, typer.Option("--steal", help="Also where a run that may live has leased them; it ends when it notices.")
    ] = False,
) -> None:
    """Unpause engines that a dead trainer left paused, and shut its transfer group down. Preflight of train does the
    same."""
    console = Console()
    engines = resolve(addresses or [f"@{open_run(run, create=False).endpoints_file}"]).engines
    keyed = [engine if engine.key_file else engine.model_copy(update={"key_file": key_file}) for engine in engines]
    results = asyncio.run(_resume(keyed, timeout, steal=steal))
    for result in results:
        if result.error is not None:
            console.print(f"{result.url}: {result.error}", style="red")
        else:
            was = {True: "was paused, resumed", False: "was not paused", None: "resumed"}[result.was_paused]
            console.print(f"{result.url}: {was}; {result.transfer}")
    raise typer.Exit(1 if any(result.error for result in results) else 0)


async def _resume(engines: Sequence[EngineEndpoint], timeout: float, *, steal: bool) -> list[Resumed]:
    holder = holder_of_this_process(uuid.uuid4().hex, "of `rltool engines resume`")
    async with EngineClient(retry=RetryPolicy(attempts=2), run=holder.run) as client:
        return await resume_engines(client, engines, timeout=timeout, holder=holder, steal=steal)
