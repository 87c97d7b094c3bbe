"""The engines of a run on one host, for a run that starts its engines itself: started, watched, started again, ended.

Plain and blocking; rltool/training/cluster/engine_host.py puts it into a Ray actor. What it starts is recorded in the
run directory as `serve-engines` would, so that `rltool status`, `logs` and `stop` find it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from rltool.config.serve import EngineLaunch
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet.liveness import Liveness, LivenessFromStart
from rltool.engines.launch.engine_process import engine_spec
from rltool.engines.launch.plan import PortNeeds, Ports, start_order
from rltool.engines.launch.ready import process_role, wait_for_all
from rltool.engines.launch.start import Release, check_processes, held_ports, start_here
from rltool.engines.launch.startup import Phase
from rltool.errors import UsageError
from rltool.processes.run_directory import RunDirectory
from rltool.processes.spawn import RunningProcess, describe_exit
from rltool.processes.supervise import SETTLE_SECONDS, Check, ProcessGroup


@dataclass
class _Running:
    launch: EngineLaunch
    process: RunningProcess
    check: Check | None = None
    """None: of a part of an engine that serves from another host."""
    reported: bool = False


class HostEngines:
    """run: its directory on this host. Called from several threads: what starts or ends processes takes turns."""

    def __init__(self, run: RunDirectory) -> None:
        self._group = ProcessGroup(run, replaces_other_hosts=True)
        self._turn = threading.Lock()
        self._closed = False
        self._running: dict[int, _Running] = {}
        self._ports = ExitStack()
        self._release: Release = lambda _: None
        self._starting: Mapping[str, Phase] = {}
        self._later: list[list[EngineLaunch]] = []
        self._waited: list[RunningProcess] = []

    def hold(self, needs: PortNeeds) -> Mapping[tuple[str, str], Sequence[int]]:
        """Free ports for the engines that `start` will be given, held until then. UsageError for one that is taken."""
        ports, self._release = self._ports.enter_context(held_ports(needs))
        return {(node, address): _drawn(ports, node, address, count) for (node, address), count in needs.free.items()}

    def start(self, launches: Sequence[EngineLaunch]) -> None:
        """Start them; `ready` waits, and starts those that must load after others (plan.start_order). Raises UsageError
        for a model or an interpreter that is not as it must be on this host."""
        check_processes(launches)
        first, *self._later = start_order(launches) or [[]]
        self._begin(first)

    def _begin(self, launches: Sequence[EngineLaunch]) -> None:
        with self._turn:
            self._refuse_closed()
            processes = start_here(launches, self._group, release=self._release)
            self._running |= {x.index: _running(x, process) for x, process in zip(launches, processes, strict=True)}

    async def ready(self, report: Callable[[str], None] = print) -> list[EngineEndpoint]:
        """The endpoints of those that serve from this host, once all do. ProcessFailed for one that died or is late."""
        found = await self._serving(report)
        while self._later:
            await asyncio.to_thread(self._begin, self._later.pop(0))
            found += await self._serving(report)
        self._starting = {}
        return found

    async def _serving(self, report: Callable[[str], None]) -> list[EngineEndpoint]:
        """Of those that have been begun and are not waited for yet."""
        mine = [x for x in self._running.values() if x.launch.node_rank == 0 and x.process not in self._waited]
        self._waited += [running.process for running in mine]
        endpoints = await wait_for_all([x.launch for x in mine], [x.process for x in mine], report, self._see)
        for running, endpoint in zip(mine, endpoints, strict=True):
            running.check = Liveness(running.process.state.pid, endpoint.url)
        return endpoints

    def starting(self) -> Mapping[str, Phase]:
        """What those that `ready` waits for are doing, by role."""
        return self._starting

    def _see(self, phases: Mapping[str, Phase]) -> None:
        self._starting = phases

    def exits(self) -> dict[int, str]:
        """Numbers of engines whose process here has ended, or lost what generates, since the last call; and how."""
        found = {}
        for index, running in list(self._running.items()):
            if running.reported:
                continue
            wrong = self._wrong(running)
            if wrong is not None:
                running.reported = True
                found[index] = f"{process_role(running.launch)} {wrong}"
        return found

    def _wrong(self, running: _Running) -> str | None:
        code = running.process.exit_code()
        if code is not None:
            return describe_exit(code)
        wrong = running.check() if running.check is not None else None
        if wrong is not None and (code := running.process.wait(SETTLE_SECONDS)) is not None:
            wrong = f"{wrong}; since then it {describe_exit(code)}"
        return wrong

    def stop_engine(self, index: int) -> None:
        """End what is left of it here: before it is started again, on every host that has a part of it."""
        with self._turn:
            running = self._running[index]
            running.reported = True
            self._group.stop([running.process])

    def start_engine(self, index: int, boot_id: str) -> None:
        """Start it again under its old address; its log goes on. boot_id: of the new process. UsageError where it runs
        here already."""
        with self._turn:
            self._refuse_closed()
            running = self._running[index]
            launch = running.launch.model_copy(update={"boot_id": boot_id})
            process = self._group.start(engine_spec(launch), log=running.process.log)
            self._running[index] = _running(launch, process)

    def close(self) -> None:
        """End them all; nothing is started any more. May be called twice."""
        with self._turn:
            self._closed = True
            self._ports.close()
            self._group.stop(list(self._group.processes))

    def _refuse_closed(self) -> None:
        if self._closed:
            raise UsageError("the run is ending: no engine is started any more")


def _drawn(ports: Ports, node: str, address: str, count: int) -> tuple[int, ...]:
    return tuple(ports(node, address) for _ in range(count))


def _running(launch: EngineLaunch, process: RunningProcess) -> _Running:
    url = process.state.url
    return _Running(launch, process, LivenessFromStart(process.state.pid, url) if url is not None else None)
