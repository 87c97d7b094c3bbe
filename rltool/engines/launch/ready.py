"""When a started engine counts as ready: the right server, with the right model and size, and it generates, or
classifies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from rltool.config.serve import EngineLaunch
from rltool.engines.client import EngineClient, RetryPolicy
from rltool.engines.dialects.supported import refusal, training_refusal
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet.canary import canary
from rltool.engines.launch.plan import role_of, url_of
from rltool.engines.launch.startup import Show, StartupLogs, in_lines
from rltool.engines.types import EngineInfo
from rltool.errors import EngineError, EngineRejected, MissingLogprobs, RltoolError, UsageError
from rltool.processes.gpus import gpu_uuids
from rltool.processes.readiness import NotReady, wait_until_ready
from rltool.processes.spawn import RunningProcess
from rltool.processes.tasks import all_of, beside

PROBE_SECONDS = 60.0
"""For all probes of one engine and its first generation, which compiles or warms up things."""
LOG_SECONDS = 0.5
"""How often the logs of engines that start are read."""


async def wait_for_all(
    launches: Sequence[EngineLaunch], processes: Sequence[RunningProcess], report: Callable[[str], None],
    show: Show | None = None,
) -> list[EngineEndpoint]:  # fmt: skip
    """The endpoints of these engines once all serve, in order. Raises ProcessFailed for the first that died or is late;
    the caller ends the others. show: gets what they are doing meanwhile; None: `report` gets lines of it."""
    logs = StartupLogs({process.role: process.log for process in processes})
    # Tries once: asking again is the waiting's business, which also sees the process die.
    async with EngineClient(retry=RetryPolicy(attempts=1)) as client, beside(_watch(logs, show or in_lines(report))):

        async def wait(launch: EngineLaunch, process: RunningProcess) -> EngineEndpoint:
            probe = _Probe(client, launch, process, await asyncio.to_thread(gpu_uuids, launch.gpus))
            endpoint = await wait_until_ready(process, probe, timeout=launch.ready_timeout, probe_timeout=PROBE_SECONDS)
            logs.serves(process.role)
            report(
                f"{process.role} ready: {endpoint.url}, world size {launch.world_size}, "
                + (f"weights over {endpoint.weight_backend}" if launch.update_weights else "weights not updated")
            )
            return endpoint

        return await all_of(wait(launch, process) for launch, process in zip(launches, processes, strict=True))


async def _watch(logs: StartupLogs, show: Show) -> None:
    while True:
        with suppress(OSError):  # of a log, or a terminal that is closed: nothing depends on what is shown
            show(logs.phases())
        await asyncio.sleep(LOG_SECONDS)


class _Probe:
    """Ready means: healthy, the right server and model, its control routes there, the world size as ordered, and it
    generates or classifies."""

    def __init__(
        self, client: EngineClient, launch: EngineLaunch, process: RunningProcess, gpu_uuids: tuple[str, ...]
    ) -> None:
        self.client, self.launch, self.process = client, launch, process
        self.endpoint = EngineEndpoint(
            url=url_of(launch),
            dialect=launch.engine,
            group=launch.group,
            role="regular" if launch.role == "placeholder" else launch.role,
            bootstrap_port=launch.bootstrap_port,
            tp=launch.tp,
            pp=launch.pp,
            dp=launch.dp,
            weight_backend=launch.weight_backend,
            boot_id=launch.boot_id,
            gpus=launch.gpus,
            gpu_uuids=gpu_uuids,
            key_file=launch.key_file,
            log=process.log,
        )

    async def __call__(self) -> EngineEndpoint:
        try:
            return await self._serves()
        except EngineRejected as error:
            # 503 while it loads is a 5xx; a 4xx of a server that we have just started will not go away by waiting.
            raise self.process.failure(f"refuses what a ready engine must answer: {error}") from error
        except MissingLogprobs as error:
            raise self.process.failure(f"generates without log-probabilities: {error}") from error
        except EngineError as error:
            raise NotReady(str(error)) from error

    async def _serves(self) -> EngineEndpoint:
        await self.client.health(self.endpoint)
        info = await self.client.probe(self.endpoint, timeout=PROBE_SECONDS)
        check_identity(self.process.role, self.launch, info)
        check_version(self.process, info)
        await canary(self.client, self.endpoint, self.launch.task, timeout=PROBE_SECONDS)
        update = {
            "plugin": info.plugin,
            "weight_backend": info.weight_backend or self.launch.weight_backend,
            "boot_id": info.boot_id or self.launch.boot_id,
        }
        return self.endpoint.model_copy(update=update)


def check_version(process: RunningProcess, info: EngineInfo) -> None:
    """Raises ProcessFailed for an engine that is too old: it would not be taken by train."""
    why = refusal(info.dialect, info.engine_version, newer=True)
    why = why or training_refusal(info.dialect, info.engine_version, pause_mode="abort")
    if why is not None:
        raise process.failure(why)


def check_identity(role: str, launch: EngineLaunch, info: EngineInfo) -> None:
    """Raises UsageError if another server than the one just started answers on its port,
    or one with another world size."""
    # SGLang begins with it as its weight version, and before 0.5.18 has no other place for it.
    ours = info.boot_id in (None, launch.boot_id) or info.weight_version == f"boot-{launch.boot_id}"
    if not ours:
        raise UsageError(
            f"{role}: another server answers on port {launch.port} (boot id {info.boot_id}); choose another --port"
        )
    if info.model_id not in (launch.served_name, str(launch.model)):
        raise UsageError(
            f"{role}: the server on port {launch.port} serves {info.model_id!r} instead of {launch.served_name!r}; "
            "choose another --port"
        )
    if info.world_size != launch.world_size:
        raise RltoolError(
            f"{role} reports world size {info.world_size}, planned was {launch.world_size} (tp {launch.tp} x pp "
            f"{launch.pp} x dp {launch.dp}): its flags change its parallelism in a way that rltool does not read; "
            "set tp, and write the others as --pipeline-parallel-size N and --data-parallel-size N"
        )


def process_role(launch: EngineLaunch) -> str:
    return role_of(launch.index, launch.node_rank)
