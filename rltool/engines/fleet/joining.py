"""Engines that this host's rltool starts and stops join and leave the runs that train with them, by themselves."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.run_client import DRIVER_ROLE, Driver, RunStatus, driver_of
from rltool.errors import RltoolError
from rltool.processes.run_directory import RunDirectory, list_runs
from rltool.processes.state import read_state

LEFT = "removed"
"""State of an engine that has left."""
_POLL_SECONDS = 0.2
_MARGIN_SECONDS = 5.0
"""Beyond the time that the run itself allows an engine for leaving."""

Log = Callable[[str], None]


@dataclass(frozen=True)
class LivingRun:
    """A run that trains now, and its status."""

    run: RunDirectory
    driver: Driver
    status: RunStatus


def living_runs(beside: RunDirectory) -> list[LivingRun]:
    """The runs that train now, of all that lie beside this one, itself included. One that does not answer is left
    out."""
    found = []
    for run in list_runs(beside.path.parent, damaged=False):
        try:
            driver = driver_of(run, read_state(run, DRIVER_ROLE))
            if driver is not None:
                found.append(LivingRun(run, driver, driver.status()))
        except RltoolError:  # it is ending, or its state is another version's: neither concerns these engines
            continue
    return found


def users_of_engines(run: RunDirectory) -> list[LivingRun]:
    """The runs that train with the engines of this one: itself, and those that were given its endpoints.json."""
    file = str(run.endpoints_file.absolute())
    return [
        user for user in living_runs(run)
        if user.run.path == run.path or file in user.status.get("endpoints_files", [])
    ]  # fmt: skip


def users_of_router(run: RunDirectory, router_url: str) -> list[LivingRun]:
    """The runs whose generation goes through this router, which is a process of `run`."""
    return [user for user in living_runs(run) if user.status.get("router") == router_url]


def join(users: Sequence[LivingRun], engines: Sequence[EngineEndpoint], log: Log) -> None:
    """Have these runs use these engines. Failures are logged; the engines serve anyway."""
    for user in users:
        for engine in engines:
            try:
                row = user.driver.add_engine(engine)
            except RltoolError as error:
                log(f"{engine.url} has not joined run {user.run.name}: {error}")
            else:
                log(f"{engine.url} joins run {user.run.name} ({row.get('state')}: {row.get('reason')})")


def leave(users: Sequence[LivingRun], urls: Collection[str], log: Log) -> None:
    """Have these runs do without these engines, and wait until they have let go of them, each within the time that it
    reports. Failures are logged."""
    waiting: list[tuple[LivingRun, str, float]] = []
    for user in users:
        for url in sorted(set(urls) & {row.get("url") for row in user.status.get("engines", [])} - {None}):
            try:
                row = user.driver.remove_engine(url)
            except RltoolError as error:
                log(f"run {user.run.name} has not released {url}: {error}")
                continue
            seconds = row.get("leaves_within_seconds", 0.0)
            if row.get("state") != LEFT:
                log(f"{url} leaves run {user.run.name}, within {seconds:.0f} s")
                waiting.append((user, url, time.monotonic() + seconds + _MARGIN_SECONDS))
    for user, url, ends in waiting:
        _wait_until_left(user, url, ends, log)


def _wait_until_left(user: LivingRun, url: str, ends: float, log: Log) -> None:
    while time.monotonic() < ends:
        try:
            if all(row.get("url") != url for row in user.driver.engines()):
                return
        except RltoolError as error:
            log(f"run {user.run.name} does not report whether {url} has left: {error}")
            return
        time.sleep(_POLL_SECONDS)
    log(f"run {user.run.name} has not released {url} in time")
