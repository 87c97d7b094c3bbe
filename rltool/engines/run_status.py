"""What the processes of a run are doing: what is recorded of them, and what they answer when asked."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pydantic import BaseModel

from rltool.engines.dialects.table import dialect
from rltool.engines.endpoints import Endpoints, EngineEndpoint
from rltool.engines.fleet.liveness import reports_dead
from rltool.engines.launch.plan import is_router
from rltool.engines.run_client import SERVED_ROLE, Driver, RunStatus, ServedStatus, driver_of
from rltool.engines.sync_client import probe, send
from rltool.engines.types import HttpRequest
from rltool.errors import EngineUnreachable, RltoolError
from rltool.processes.run_directory import RunDirectory
from rltool.processes.state import ProcessState, is_alive, is_elsewhere, read_states

ASK_SECONDS = 5.0
_ASKED_SIDE_BY_SIDE = 32


class ProcessStatus(BaseModel):
    """One row. pid and alive are None for an engine of endpoints.json without a recorded process: external, or
    stopped. alive is None for a process of another host, which health names.

    health is "ok", "paused", "unreachable" or the server's message. A server that lives on after what generates in it
    has died is not alive; see its health.
    """

    role: str
    pid: int | None
    alive: bool | None
    url: str | None
    health: str | None
    weight_version: str | None
    gpus: tuple[int, ...]
    log: Path | None


@dataclass(frozen=True)
class RunReport:
    """training: the driver's status of its run; None where none lives or none answered (then its row has why).
    served: that of the run's served trainer, likewise."""

    processes: list[ProcessStatus]
    training: RunStatus | None
    served: ServedStatus | None = None


def run_status(run: RunDirectory) -> RunReport:
    """Every process of the run, and engines in its endpoints.json that it did not start; all are asked side by side.

    A server that does not answer costs ASK_SECONDS, and twice that if it is slow to everything.
    """
    states = read_states(run)
    engines = _engines(run)
    statuses: list[RunStatus] = []
    served: list[ServedStatus] = []
    rows: list[Callable[[], ProcessStatus]] = []
    for state in states:
        driver = driver_of(run, state)
        if driver is not None:
            rows.append(partial(_driver_row, state, driver, statuses))
        elif state.role == SERVED_ROLE and state.url is not None:
            rows.append(partial(_served_row, state, Driver(state.url, run.key_file), served))
        else:
            rows.append(partial(_row, state, engines.get(state.url or "")))
    started = {state.url for state in states}
    foreign = [engine for url, engine in engines.items() if url not in started]
    rows += [partial(_foreign_row, index, engine) for index, engine in enumerate(foreign)]
    with ThreadPoolExecutor(_ASKED_SIDE_BY_SIDE) as pool:
        processes = list(pool.map(lambda row: row(), rows))
    return RunReport(processes, statuses[0] if statuses else None, served[0] if served else None)


def _engines(run: RunDirectory) -> dict[str, EngineEndpoint]:
    if not run.endpoints_file.exists():
        return {}
    return {
        engine.url: engine for model in Endpoints.load(run.endpoints_file).models.values() for engine in model.engines
    }


def _row(state: ProcessState, engine: EngineEndpoint | None) -> ProcessStatus:
    alive = None if is_elsewhere(state) else is_alive(state)
    health = None if alive is not None else f"on host {state.host}"
    version: str | None = None
    if alive and engine is not None and _reports_death(engine) and reports_dead(engine.url):
        alive, health = False, f"its engine has died; what is left of the server (pid {state.pid}) answers 503"
    elif alive and engine is not None:
        health, version = _ask_engine(engine)
    elif alive and state.url is not None:
        health = _ask(state.url, "/readiness" if is_router(state.role) else "/health")
    return ProcessStatus(
        role=state.role,
        pid=state.pid,
        alive=alive,
        url=state.url,
        health=health,
        weight_version=version,
        gpus=state.gpus,
        log=state.log,
    )


def _reports_death(engine: EngineEndpoint) -> bool:
    return engine.dialect is not None and dialect(engine.dialect).health_reports_death


def _driver_row(state: ProcessState, driver: Driver, statuses: list[RunStatus]) -> ProcessStatus:
    """The living driver; its status of the run goes into `statuses`."""
    health, version = "ok", None
    try:
        status = driver.status()
    except EngineUnreachable as error:
        health = f"does not answer: {error}"
    except RltoolError as error:
        health = str(error)
    else:
        version = status.get("weight_version")
        statuses.append(status)
    return ProcessStatus(
        role=state.role,
        pid=state.pid,
        alive=True,
        url=state.url,
        health=health,
        weight_version=version,
        gpus=state.gpus,
        log=state.log,
    )


def _served_row(state: ProcessState, server: Driver, statuses: list[ServedStatus]) -> ProcessStatus:
    """The trainer's server; its status goes into `statuses`."""
    row = _row(state, None)
    if row.health == "ok":
        try:
            statuses.append(server.served())
        except RltoolError as error:
            row = row.model_copy(update={"health": str(error)})
    return row


def _foreign_row(index: int, engine: EngineEndpoint) -> ProcessStatus:
    health, version = _ask_engine(engine)
    return ProcessStatus(
        role=f"endpoint-{index}",
        pid=None,
        alive=None,
        url=engine.url,
        health=health,
        weight_version=version,
        gpus=engine.gpus,
        log=None,
    )


def _ask_engine(engine: EngineEndpoint) -> tuple[str, str | None]:
    try:
        info = probe(engine, timeout=ASK_SECONDS)
    except EngineUnreachable:
        return "unreachable", None
    except RltoolError as error:
        return str(error), None
    if info.paused:
        return "paused", info.weight_version
    try:
        send(engine.url, dialect(info.dialect).health(), key=engine.read_key(), timeout=ASK_SECONDS)
    except RltoolError as error:
        return str(error), info.weight_version
    return "ok", info.weight_version


def _ask(url: str, path: str) -> str:
    try:
        send(url, HttpRequest("GET", path), timeout=ASK_SECONDS)
    except EngineUnreachable:
        return "unreachable"
    except RltoolError as error:
        return str(error)
    return "ok"
