"""The routers of a plan: those that `serve-engines --config` and `train` start in front of their engines, and start
again at their address when they die."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from rltool.config.router import RouterConfig
from rltool.engines.endpoints import Endpoints, EngineEndpoint, ModelEndpoints
from rltool.engines.fleet.joining import users_of_router
from rltool.engines.fleet.liveness import serves
from rltool.engines.launch.plan import planned_routers
from rltool.engines.launch.start import Order
from rltool.engines.sync_client import send
from rltool.engines.types import HttpRequest
from rltool.errors import EngineError, RltoolError
from rltool.processes.relaunch import Relaunch
from rltool.processes.restarts import RestartPolicy
from rltool.processes.run_directory import RunDirectory
from rltool.processes.spawn import RunningProcess
from rltool.processes.supervise import ProcessGroup
from rltool.router.launch import RouterLaunch, forget_router, start_router
from rltool.router.workers import ask_to_add, find_worker, list_workers

LOOK_SECONDS = 1.0
"""How often a router that was started again is asked whom it has."""
CALL_SECONDS = 1.0
"""For it to listen; its watcher has other processes to watch."""

Log = Callable[[str], None]


def start_planned_routers(
    order: Order, engines: Mapping[str, Sequence[EngineEndpoint]], group: ProcessGroup, *, required: bool = True,
    report: Log = lambda _: None,
) -> dict[str, str]:  # fmt: skip
    """A router for each model that the order wants one for, its address written into the run's endpoints.json; URLs by
    model. engines: those that serve, by model. Whoever supervises the group has them started again. required: where
    restarts are off (engines.max_restarts = 0), the death of one ends the group. Raises as `start_router`."""
    urls = {}
    relaunch = RouterRelaunch(group, order.restarts, report, required=required)
    group.restarts.append(relaunch)
    for router in planned_routers(order.groups, order.models):
        model = ModelEndpoints(engines=tuple(engines[router.model]))
        urls[router.model] = start_router(
            RouterConfig(), model, group, name=router.model, endpoints_file=group.run.endpoints_file,
            started=relaunch.watch, report=report,
        )  # fmt: skip
        report(f"router of {router.model} ready: {urls[router.model]}")
    return urls


class RouterRelaunch(Relaunch[RouterLaunch]):
    """`Restarts` of the routers in a group. log: one line for the user.

    Engines outlive a router that is not restarted: they took minutes to load, and serve directly. Its address is
    taken out of endpoints.json; a run that trains through it ends by itself (rollout/serving/guard.py).
    """

    vital = False

    def __init__(self, group: ProcessGroup, policy: RestartPolicy, log: Log, *, required: bool = True) -> None:
        super().__init__(group, policy)
        self._log, self._required = log, required

    def owns(self, process: RunningProcess) -> bool:
        return process.role in self._launches and (not self._required or super().owns(process))

    def end(self, process: RunningProcess) -> None:
        super().end(process)
        launch, run = self._launches[process.role], self._group.run
        forget_router(run.endpoints_file, launch.endpoint.url)
        self._log(
            f"the engines of {launch.name} serve on without a router; `rltool router --run {run.name} --model "
            f"{launch.name} --port {launch.config.port}` starts another where it was"
        )

    def start(self, process: RunningProcess) -> RunningProcess:
        super().end(process)
        launch = self._launches[process.role]
        started = launch.start(self._group, log=process.log)
        self._group.checks[process.role] = WorkersFromStart(
            launch, self._group.run, on_serving=lambda: self._budget.started(process.role), log=self._log
        )
        return started


class WorkersFromStart:
    """Of a router that was restarted with an empty list; idempotent: it registers the engines of
    its model in endpoints.json as soon as they serve, until all of them are there once. Until the router listens,
    nothing is wrong with it but that it takes too long.

    Where a run on this host trains through it, that is left to the run: it knows which engines hold its weights.
    """

    def __init__(
        self, launch: RouterLaunch, run: RunDirectory, *, on_serving: Callable[[], None], log: Log,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._launch, self._run, self._on_serving, self._log, self._clock = launch, run, on_serving, log, clock
        self._router = launch.endpoint
        self._started = clock()
        self._look_at = self._started
        self._listens = self._done = False
        self._asked: dict[str, float] = {}

    def __call__(self) -> str | None:
        """What is wrong, as words after the router's name, or None."""
        if self._done or self._clock() < self._look_at:
            return None
        if not self._listens:
            seconds = self._launch.config.ready_timeout
            if not _listens(self._router.url):
                late = self._clock() - self._started > seconds
                return f"did not serve within {seconds:g} s" if late else None
            self._listens = True
            self._on_serving()
        with suppress(RltoolError, OSError):  # once more at the next look; a router that has died is seen by its exit
            self._done = self._leave_to_a_run() or self._all_registered()
        self._look_at = self._clock() + LOOK_SECONDS
        return None

    def _leave_to_a_run(self) -> bool:
        users = ", ".join(user.run.name for user in users_of_router(self._run, self._router.url))
        if users:
            self._log(f"router of {self._launch.name} serves again: {self._router.url}; run {users} registers engines")
        return bool(users)

    def _all_registered(self) -> bool:
        model = Endpoints.load(self._run.endpoints_file).models.get(self._launch.name, ModelEndpoints())
        workers = list_workers(self._router)
        missing = [engine for engine in model.engines if find_worker(workers, engine.url) is None]
        for engine in missing:
            asked = self._asked.get(engine.url)
            if (asked is None or self._clock() - asked > self._launch.config.ready_timeout) and serves(engine.url):
                self._asked[engine.url] = self._clock()
                ask_to_add(self._router, engine)
        if not missing:
            self._log(f"router of {self._launch.name} serves again: {self._router.url}, {len(model.engines)} worker(s)")
        return not missing


def _listens(url: str) -> bool:
    try:
        send(url, HttpRequest("GET", "/liveness"), timeout=CALL_SECONDS)
    except EngineError:
        return False
    return True
