"""Starting the trainer's server: which run, engines and keys, and that it serves. Raises UsageError for engines that
it cannot sample with, before anything starts."""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rltool.config.base import Config
from rltool.config.serve_trainer import ServeTrainerConfig
from rltool.config.train import TrainConfig
from rltool.engines.fleet.disaggregation import samples_alone
from rltool.engines.run_client import SERVED_ROLE
from rltool.engines.sync_client import send
from rltool.engines.types import EngineInfo, HttpRequest
from rltool.errors import DiskFull, EngineError, UsageError
from rltool.processes.files import starting, write_text_atomic
from rltool.processes.hosts import http_url
from rltool.processes.ports import reserved_ports
from rltool.processes.readiness import NotReady, wait_until_ready
from rltool.processes.relaunch import Relaunch
from rltool.processes.restarts import RestartPolicy
from rltool.processes.run_directory import RunDirectory
from rltool.processes.spawn import ProcessSpec, RunningProcess
from rltool.processes.supervise import ProcessGroup
from rltool.processes.waiting import waiting
from rltool.training.checks.preflight import ProbedFleet, check_fleet, check_leases, probe_fleet, resolve_endpoints
from rltool.training.prepare import trainer_device

ROLE = SERVED_ROLE
LEAST_SLOTS = 2
"""One adapter that requests run with, and the next."""
_CALL_SECONDS = 5.0
FULL_SECONDS = 5.0
"""Between two attempts to start the server again on a full disk."""


class Parts(Config):
    """What the command passes to the server's process. Paths, no keys: it travels in argv. config: the whole one, in a
    file that nobody else reads, for it may hold secrets."""

    run: Path
    config: Path
    served_name: str
    keys: Path


def probed(config: TrainConfig, needed: int | None = None) -> ProbedFleet:
    """The engines of engines.external. needed: this many are enough; None: all. UsageError where too few answer."""
    return probe_fleet(resolve_endpoints(config), config.deadlines.preflight, needed=needed)


def check_engines(fleet: ProbedFleet, config: TrainConfig, serving: ServeTrainerConfig, run: RunDirectory) -> None:
    """UsageError with all that is wrong: another model, no adapters, another run's engines."""
    # The lengths of a run's data, which there are none of.
    short = config.sampling.model_copy(update={"max_prompt_tokens": 1, "max_response_tokens": 1})
    full = serving.lora_rank == 0
    check_fleet(
        fleet, config.model_copy(update={"sampling": short}), trainer_device=trainer_device(config) if full else None
    )  # fmt: skip
    halves = [engine.url for engine in fleet.endpoints.engines if not samples_alone(engine)]
    if halves:
        raise UsageError(f"{', '.join(halves)}: prefill and decode engines of SGLang do not sample alone")
    problems = [] if full else [(url, adapter_problem(info, serving.lora_rank)) for url, info in fleet.infos.items()]
    found = [f"{url}: {problem}" for url, problem in problems if problem is not None]
    if found:
        raise UsageError("these engines cannot serve this trainer:\n" + "\n".join(found))
    check_leases(fleet, run.run_id if run.is_made else None)


def adapter_problem(info: EngineInfo, rank: int) -> str | None:
    """Why an engine cannot serve adapters of this rank; None: it can."""
    start = f"start it with `rltool serve-engines --lora-rank {rank} --lora-slots N`"
    if info.lora_rank == 0 or (info.plugin and info.lora_rank is None):
        return f"takes no adapters: {start}"
    if info.lora_rank is not None and info.lora_rank < rank:
        return f"takes adapters up to rank {info.lora_rank}, and --lora-rank is {rank}: {start}, or lower --lora-rank"
    if info.lora_slots is not None and info.lora_slots < LEAST_SLOTS:
        return f"holds {info.lora_slots} adapter at a time, {LEAST_SLOTS} are the least: {start}"
    return None


def keys_of(serving: ServeTrainerConfig, run: RunDirectory) -> Path:
    """The directory of the clients' keys; the run's own is made, with a key for one client."""
    if serving.keys is not None:
        if not serving.keys.is_dir():
            raise UsageError(f"--keys {serving.keys} is no directory; make it, with a file of mode 600 for each client")
        return serving.keys.absolute()
    directory = run.state_dir / "clients"
    directory.mkdir(mode=0o700, exist_ok=True)
    if not any(directory.iterdir()):
        write_text_atomic(directory / "default", f"tml-{secrets.token_urlsafe(32)}\n", mode=0o600)
    return directory


class ServerRelaunch(Relaunch[ProcessSpec]):
    """`Restarts` of the one server: it goes on from its last snapshot and what its journal has since. On a full disk
    it is tried until there is room."""

    vital = True

    def __init__(
        self, group: ProcessGroup, policy: RestartPolicy, report: Callable[[str], None] = lambda _: None
    ) -> None:  # fmt: skip
        super().__init__(group, policy)
        self._report = report

    def start(self, process: RunningProcess) -> RunningProcess:
        super().end(process)
        said = False
        while (started := self._started(process, quiet=said)) is None:
            said = True
            time.sleep(FULL_SECONDS)
        self._budget.started(process.role)
        return started

    def _started(self, process: RunningProcess, *, quiet: bool) -> RunningProcess | None:
        """None: there is no room for it."""
        try:
            with starting("the server", process.run.path):
                return self._group.start(self._launches[process.role], log=process.log)
        except DiskFull as error:
            if not quiet:
                with suppress(OSError):  # of the log
                    self._report(f"{error}; it is tried again every {FULL_SECONDS:g} s")
            return None


def start_server(
    config: TrainConfig, serving: ServeTrainerConfig, parts: Parts, group: ProcessGroup,
    report: Callable[[str], None] = lambda _: None,
) -> str:  # fmt: skip
    """Start the server in `group`, which starts it again when it dies, and wait until it serves; returns its URL.
    ProcessFailed if it dies or is not ready in time."""
    with reserved_ports(1, host=serving.host, first=serving.port) as reserved:
        port = reserved.ports[0]
        url = http_url(serving.host, port)
        write_text_atomic(parts.config, config.model_dump_json(), mode=0o600)
        # -P: it runs in the user's directory, whose modules it must not pick up.
        argv = (
            sys.executable, "-P", "-m", "rltool.tinker.main", "--serving",
            serving.model_copy(update={"port": port}).model_dump_json(), "--parts", parts.model_dump_json(),
        )  # fmt: skip
        reserved.release()
        spec = ProcessSpec(role=ROLE, argv=argv, url=url)
        process = group.start(spec)

    async def serves() -> None:
        try:
            await asyncio.to_thread(send, url, HttpRequest("GET", "/health"), timeout=_CALL_SECONDS)
        except EngineError as error:
            raise NotReady(str(error)) from error

    with waiting(f"starting ranks and server (--ready-timeout = {serving.ready_timeout:g} s)", report):
        asyncio.run(wait_until_ready(process, serves, timeout=serving.ready_timeout))
    relaunch = ServerRelaunch(group, RestartPolicy(serving.max_restarts), report)
    relaunch.watch(process, spec)
    group.restarts.append(relaunch)
    return url
