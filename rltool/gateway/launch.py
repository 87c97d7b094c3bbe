"""Starting the gateway's process: which engines or router, which model, and that it serves."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rltool.config.gateway import GatewayConfig
from rltool.engines.endpoints import EngineEndpoint, ModelEndpoints, files_in, parse_address, resolve
from rltool.engines.fleet.disaggregation import samples_alone
from rltool.engines.sync_client import probe, send
from rltool.engines.types import EngineInfo, HttpRequest
from rltool.errors import EngineError, UsageError
from rltool.gateway.parts import Parts
from rltool.models.pictures import Pictures
from rltool.processes.hosts import http_url
from rltool.processes.keys import make_key, read_key
from rltool.processes.ports import reserved_ports
from rltool.processes.readiness import NotReady, wait_until_ready
from rltool.processes.relaunch import Relaunch
from rltool.processes.restarts import RestartPolicy
from rltool.processes.run_directory import RunDirectory, list_runs, open_run
from rltool.processes.spawn import ProcessSpec, RunningProcess
from rltool.processes.supervise import ProcessGroup
from rltool.processes.waiting import waiting
from rltool.rollout.pictures import PROCESSORS

ROLE = "gateway"

_PROBES_SIDE_BY_SIDE = 32
_CALL_SECONDS = 5.0


@dataclass(frozen=True)
class GatewayPlan:
    """What a command line means. router_url: where turns go; None: to the engines, each by itself."""

    run: RunDirectory
    engines: tuple[EngineEndpoint, ...]
    router_url: str | None


def plan_gateway(addresses: Sequence[str], router: str | None, run_name: str | None) -> GatewayPlan:
    """Engines, router and run. Without addresses and router: the endpoints.json of the run. With @FILE of a run
    directory and no run name, that run; else the named or newest run, or a new one. Raises UsageError."""
    files = files_in(addresses)
    if not addresses and router is None:
        run = open_run(run_name, create=False)
        addresses = [f"@{run.endpoints_file}"]
    elif run_name is None and files and (of_file := RunDirectory(files[0].absolute().parent)).is_made:
        run = of_file
    else:
        run = open_run(run_name, create=run_name is not None or not list_runs())
    model = resolve(addresses) if addresses else ModelEndpoints()
    return GatewayPlan(run, model.engines, _router_url(router) if router is not None else model.data_url)


def start_gateway(
    config: GatewayConfig, plan: GatewayPlan, group: ProcessGroup, *, report: Callable[[str], None] = lambda _: None
) -> tuple[str, Parts]:
    """Start the gateway in `group` and wait until it serves; returns its URL and what it serves.

    Raises UsageError for engines or a model that it cannot serve, ProcessFailed if it dies or is not ready in time.
    """
    if config.processes > 1 and sys.platform != "linux":
        raise UsageError(f"--processes {config.processes}: only Linux deals out connections of one port to several")
    engines = [
        engine if engine.key_file else engine.model_copy(update={"key_file": config.engine_key_file})
        for engine in plan.engines
    ]
    infos = _probed(engines, config.ready_timeout, report)
    known = [engine.probed(info) for engine, info in zip(engines, infos, strict=True)]
    model = _tokenizer(config, infos)
    parts = Parts(
        served_name=_served_name(infos),
        max_model_len=_max_model_len(config, infos),
        tokenizer=model,
        endpoints=_data_plane(config, plan, known),
        through_router=plan.router_url is not None,
        sessions=plan.run.sessions_dir,
        key_file=_key_file(config, plan.run),
        pictures=_pictures(model),
    )
    with reserved_ports(1, host=config.host, first=config.port) as reserved:
        port = reserved.ports[0]
        url = http_url(config.host, port)
        own = config.model_copy(update={"port": port}).model_dump_json()
        # -P: it runs in the user's directory, whose modules it must not pick up.
        argv = (sys.executable, "-P", "-m", "rltool.gateway.main", "--config", own, "--parts", parts.model_dump_json())
        reserved.release()
    relaunch = GatewayRelaunch(group, RestartPolicy(config.max_restarts))
    specs = [
        ProcessSpec(role=ROLE if number == 0 else f"{ROLE}-{number}", argv=argv, url=url)
        for number in range(config.processes)
    ]
    processes = [group.start(spec) for spec in specs]
    with waiting(f"starting the gateway (--ready-timeout = {config.ready_timeout:g} s)", report):
        for process, spec in zip(processes, specs, strict=True):
            listens = partial(_serves, url, process, f"serving on {config.host}:{port}")
            asyncio.run(wait_until_ready(process, listens, timeout=config.ready_timeout))
            relaunch.watch(process, spec)
    group.restarts.append(relaunch)
    return url, parts


class GatewayRelaunch(Relaunch[ProcessSpec]):
    """`Restarts` of the gateway's processes: their sessions lie on disk, and their port stays."""

    vital = True

    def start(self, process: RunningProcess) -> RunningProcess:
        self.end(process)
        started = self._group.start(self._launches[process.role], log=process.log)
        self._budget.started(process.role)
        return started


async def _serves(url: str, process: RunningProcess, says: str) -> None:
    """Each of several processes by its log: at their address any of them answers."""
    if says not in process.log.read_text(errors="replace"):
        raise NotReady(f"{process.role} does not listen yet")
    try:
        await asyncio.to_thread(send, url, HttpRequest("GET", "/health"), timeout=_CALL_SECONDS)
    except EngineError as error:
        raise NotReady(str(error)) from error


def _router_url(text: str) -> str:
    addresses = parse_address(text)
    if len(addresses) != 1 or addresses[0].url is None:
        raise UsageError(f"--router is one URL, not {text!r}")
    return addresses[0].url


def _probed(engines: Sequence[EngineEndpoint], timeout: float, report: Callable[[str], None]) -> list[EngineInfo]:
    if not engines:
        return []
    with (
        waiting(f"asking {len(engines)} engine(s) for their model (--ready-timeout = {timeout:g} s)", report),
        ThreadPoolExecutor(_PROBES_SIDE_BY_SIDE) as pool,
    ):
        return list(pool.map(lambda engine: probe(engine, timeout=timeout), engines))


def _served_name(infos: Sequence[EngineInfo]) -> str:
    """The engines' own name of the model, which serve-engines makes `policy`."""
    names = sorted({info.model_id for info in infos})
    if len(names) > 1:
        raise UsageError(f"the engines serve different models: {', '.join(names)}; one gateway serves one")
    return names[0] if names else "policy"


def _max_model_len(config: GatewayConfig, infos: Sequence[EngineInfo]) -> int:
    limits = [info.max_model_len for info in infos if info.max_model_len is not None]
    if config.max_model_len is None and not limits:
        raise UsageError("the longest sequence is unknown (a router does not report it): give --max-model-len TOKENS")
    return min([*limits, *([config.max_model_len] if config.max_model_len is not None else [])])


def _tokenizer(config: GatewayConfig, infos: Sequence[EngineInfo]) -> Path:
    if config.model is not None:
        found = config.model.absolute()
    else:
        path = next((info.model_path for info in infos if info.model_path), None)
        if path is None:
            raise UsageError("no engine names the directory of its model: give --model DIRECTORY")
        found = Path(path)
    if not found.is_dir():
        raise UsageError(
            f"the model directory {found} is not on this host: give --model DIRECTORY, one with the tokenizer and its "
            "chat template"
        )
    return found


def _pictures(model: Path) -> Pictures | str:
    if not any((model / name).is_file() for name in PROCESSORS):
        return f"{model} has no image processor ({PROCESSORS[0]})"
    from rltool.models.registry import family_for, read_hf_config  # needs torch

    try:
        found = family_for(read_hf_config(model)).pictures
    except UsageError as error:
        return f"rltool trains no such model: {error}"
    return "the trainer takes text alone of this model" if found is None else found


def _data_plane(
    config: GatewayConfig, plan: GatewayPlan, engines: Sequence[EngineEndpoint]
) -> tuple[EngineEndpoint, ...]:
    if plan.router_url is None:
        halves = [engine.url for engine in engines if not samples_alone(engine)]
        if halves:
            raise UsageError(
                f"{', '.join(halves)}: SGLang's prefill and decode engines answer together; give the gateway their "
                "router (--router)"
            )
        return tuple(engines)
    router = ModelEndpoints(engines=tuple(engines), data_url=plan.router_url).data_endpoint()
    assert router is not None  # it has a URL
    if router.key_file is None:
        router = router.model_copy(update={"key_file": config.engine_key_file})
    return (router,)


def _key_file(config: GatewayConfig, run: RunDirectory) -> Path:
    file = config.key_file.absolute() if config.key_file is not None else make_key(run.gateway_key_file)
    read_key(file, "the gateway")
    return file
