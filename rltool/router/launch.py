"""Starting sglang-router for the engines of one model, and recording it in endpoints.json."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rltool.config.router import RouterConfig
from rltool.config.serve import POLICY
from rltool.engines.dialects.table import ROUTER, dialect
from rltool.engines.endpoints import Endpoints, EngineEndpoint, ModelEndpoints, edit_endpoints, files_in, resolve
from rltool.engines.launch.plan import router_role
from rltool.engines.sync_client import probe, send
from rltool.engines.types import EngineInfo, HttpRequest
from rltool.errors import EngineError, EngineUnreachable, UsageError
from rltool.processes.hosts import http_url
from rltool.processes.keys import read_key
from rltool.processes.ports import reserved_ports
from rltool.processes.run_directory import RunDirectory, list_runs, open_run
from rltool.processes.spawn import ProcessSpec, RunningProcess, describe_exit
from rltool.processes.state import is_alive, read_state
from rltool.processes.supervise import ProcessGroup
from rltool.processes.waiting import waiting
from rltool.router.workers import add_worker, wait_ready

_POLL_SECONDS = 0.05
_CALL_SECONDS = 5.0
_PROBES_SIDE_BY_SIDE = 32


@dataclass(frozen=True)
class RouterPlan:
    """What to start a router for. The router's URL is written to `endpoints_file`; None: to none. name: the
    model's."""

    run: RunDirectory
    model: ModelEndpoints
    endpoints_file: Path | None
    name: str = POLICY


def plan_router(addresses: Sequence[str], run_name: str | None, name: str = POLICY) -> RouterPlan:
    """Engines and run that a command line means; of a file, those of model `name`.

    Without addresses: the endpoints.json of the run. With @FILE of a run directory and no run name, that run. Bare URLs
    go to the named or newest run, or to a new one, and are written to its endpoints.json if it has none yet.
    """
    files = files_in(addresses)
    if not addresses:
        run = open_run(run_name, create=False)
        files = [run.endpoints_file]
        addresses = [f"@{run.endpoints_file}"]
    elif run_name is None and files and (of_file := RunDirectory(files[0].absolute().parent)).is_made:
        run = of_file
    else:
        run = open_run(run_name, create=run_name is not None or not list_runs())
    model = resolve(addresses, name)
    if len(files) == 1 and all(text.startswith("@") for text in addresses):
        return RouterPlan(run, model, files[0].absolute(), name)
    if not files and not run.endpoints_file.exists():
        return RouterPlan(run, model, run.endpoints_file, name)
    return RouterPlan(run, model, None, name)


def router_key_file(config: RouterConfig, engines: Sequence[EngineEndpoint], run: RunDirectory) -> Path:
    """The key that the router will demand: given, or that of the engines, or the run's own.

    Raises UsageError if two of them differ: the router forwards the client's key to the engines, so there can be but
    one.
    """
    files = [config.key_file, *(engine.key_file for engine in engines)]
    chosen: Path | None = None
    key: str | None = None
    for file in files:
        if file is None:
            continue
        found = read_key(file, "the router or its engines")
        if key is not None and found != key:
            raise UsageError(
                f"{chosen} and {file} hold different keys; a router passes its clients' key on to all engines, so they "
                "must share one"
            )
        chosen, key = chosen or file, found
    if chosen is None:
        chosen = run.ensure_key()
        read_key(chosen, f"run {run.name}")
    return chosen.absolute()


def router_argv(
    config: RouterConfig, *, port: int, prometheus_port: int, key_file: Path, disaggregated: bool = False
) -> tuple[str, ...]:
    """disaggregated: its workers are prefill and decode engines."""
    flags = {
        "--host": config.host,
        "--port": port,
        "--prometheus-port": prometheus_port,
        "--policy": config.policy,
        "--key-file": key_file,
        "--request-timeout": config.request_timeout,
        "--health-check-interval": config.health_check_interval,
        "--worker-startup-timeout": config.ready_timeout,
    }
    # -P: the router runs in the user's directory, whose modules it must not pick up.
    argv = (sys.executable, "-P", "-m", "rltool.router.main", *(str(part) for pair in flags.items() for part in pair))
    return (*argv, "--pd-disaggregation") if disaggregated else argv


@dataclass(frozen=True)
class RouterLaunch:
    """One router, as often as it is started. name: the model's; config: with its port; key_file: with the key that it
    demands; disaggregated: see router_argv."""

    name: str
    config: RouterConfig
    key_file: Path
    disaggregated: bool

    @property
    def endpoint(self) -> EngineEndpoint:
        url = http_url(self.config.host, self.config.port)
        return EngineEndpoint(url=url, dialect=ROUTER, key_file=self.key_file)

    def start(self, group: ProcessGroup, *, log: Path | None = None) -> RunningProcess:
        """It knows no worker yet. log: see spawn.start."""
        with reserved_ports(1) as metrics:
            argv = router_argv(
                self.config, port=self.config.port, prometheus_port=metrics.ports[0], key_file=self.key_file,
                disaggregated=self.disaggregated,
            )  # fmt: skip
            metrics.release()
            return group.start(ProcessSpec(router_role(self.name), argv, url=self.endpoint.url), log=log)


def start_router(
    config: RouterConfig,
    model: ModelEndpoints,
    group: ProcessGroup,
    *,
    name: str = POLICY,
    endpoints_file: Path | None = None,
    started: Callable[[RunningProcess, RouterLaunch], None] = lambda *_: None,
    report: Callable[[str], None] = lambda _: None,
) -> str:
    """Start a router for the model called `name` in `group`, register every engine, wait until it serves, write
    data_url; returns the router's URL. started: called when it serves.

    Raises UsageError for an engine that cannot stand behind it, ProcessFailed if the router dies, EngineError if a
    worker is not registered in time.
    """
    if importlib.util.find_spec("sglang_router") is None:
        raise UsageError("the router needs sglang-router, which is not installed here: pip install 'rltool[router]'")
    disaggregated = any(engine.role == "prefill" for engine in model.engines)
    if (given := config.key_file) is not None:
        keyed = [e if e.key_file else e.model_copy(update={"key_file": given.absolute()}) for e in model.engines]
        model = model.model_copy(update={"engines": tuple(keyed)})
    engines = _probed(model.engines, config.ready_timeout, report)
    key_file = router_key_file(config, engines, group.run)
    with reserved_ports(1, host=config.host, first=config.port) as main:
        at_port = config.model_copy(update={"port": main.ports[0]})
        launch = RouterLaunch(name, at_port, key_file, disaggregated)
        main.release()
        process = launch.start(group)
    with waiting(f"registering {_count(engines)} (--ready-timeout = {config.ready_timeout:g} s)", report):
        _register(process, launch.endpoint, engines, config.ready_timeout, report)
    if endpoints_file is not None:
        set_data_url(endpoints_file, model, launch.endpoint.url)
    started(process, launch)
    return launch.endpoint.url


def set_data_url(file: Path, model: ModelEndpoints, url: str | None) -> None:
    """Write the router's address (None: there is none any more) beside the engines in `file`, which is made if
    missing."""
    urls = {engine.url for engine in model.engines}

    def change(endpoints: Endpoints) -> Endpoints:
        models = {
            name: entry.model_copy(update={"data_url": url}) if urls & {e.url for e in entry.engines} else entry
            for name, entry in (endpoints.models or {"policy": model}).items()
        }
        return endpoints.model_copy(update={"models": models})

    edit_endpoints(file, change)


def forget_router(file: Path, url: str) -> None:
    """Take the address of a router that has ended out of `file`, so that no one waits for it."""
    if not file.exists():
        return
    endpoints = Endpoints.load(file)
    for model in endpoints.models.values():
        if model.data_url == url:
            set_data_url(file, model, None)


def running_router(run: RunDirectory, name: str = POLICY) -> EngineEndpoint:
    """The living router of a run, for the model called `name`. Raises UsageError if there is none."""
    state = read_state(run, router_role(name))
    if state is None or state.url is None or not is_alive(state):
        raise UsageError(f"run {run.name} has no running router: start one with `rltool router --run {run.name}`")
    key_file = Path(state.argv[state.argv.index("--key-file") + 1])
    return EngineEndpoint(url=state.url, dialect=ROUTER, key_file=key_file)


def _count(engines: Sequence[EngineEndpoint]) -> str:
    return "1 engine" if len(engines) == 1 else f"{len(engines)} engines"


def _probed(
    engines: Sequence[EngineEndpoint], timeout: float, report: Callable[[str], None] = lambda _: None
) -> list[EngineEndpoint]:
    """The engines with their dialects, each asked; refuses those that do not answer the router's /generate."""
    silent = [engine.url for engine in engines]

    def ask(engine: EngineEndpoint) -> EngineInfo:
        try:
            info = probe(engine, timeout=timeout)
        except EngineUnreachable as error:
            raise error.with_context(
                after=". An engine has --ready-timeout to answer probes; is this the address of one (`rltool status`)?"
            ) from error
        silent.remove(engine.url)
        return info

    what = f"asking {_count(engines)} for model and version (--ready-timeout = {timeout:g} s)"
    with (
        waiting(what, report, still=lambda: f"no answer from {', '.join(silent)}"),
        ThreadPoolExecutor(_PROBES_SIDE_BY_SIDE) as pool,
    ):
        infos = list(pool.map(ask, engines))
    for engine, info in zip(engines, infos, strict=True):
        engine_dialect = dialect(info.dialect, plugin=info.plugin)
        if not engine_dialect.routable:
            plugin = " without rltool's plugin" if engine_dialect.with_plugin and not info.plugin else ""
            raise UsageError(
                f"{engine.url} is a {engine_dialect.label} server{plugin}, so it cannot answer the router's /generate: "
                "give it to train directly (--rollout-external), or start it with `rltool serve-engines`"
            )
    return [engine.model_copy(update={"dialect": info.dialect}) for engine, info in zip(engines, infos, strict=True)]


def _register(
    process: RunningProcess,
    router: EngineEndpoint,
    engines: Sequence[EngineEndpoint],
    timeout: float,
    report: Callable[[str], None],
) -> None:
    """Wait until the router listens, add every engine, wait until it serves. Raises ProcessFailed if it has ended."""
    try:
        _wait_until_listening(process, router.url, timeout)
        for engine in engines:
            worker = add_worker(router, engine, timeout=timeout)
            report(f"worker {worker.url} registered")
        wait_ready(router, [engine.url for engine in engines], timeout=timeout)
    except EngineError as error:
        # What a dead router did not answer is no news; how it ended is. Its exit is seen after its connections break.
        code = process.wait(_POLL_SECONDS)
        if code is not None:
            raise process.failure(f"{describe_exit(code)} while starting") from error
        raise


def _wait_until_listening(process: RunningProcess, url: str, timeout: float) -> None:
    ends = time.monotonic() + timeout
    while True:
        try:
            send(url, HttpRequest("GET", "/liveness"), timeout=_CALL_SECONDS)
        except EngineError as error:
            code = process.wait(_POLL_SECONDS)
            if code is not None:
                raise process.failure(f"{describe_exit(code)} while starting") from error
            if time.monotonic() >= ends:
                raise process.failure(f"was not ready within {timeout:g} s ({error})") from error
        else:
            return
