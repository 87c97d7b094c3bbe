"""From a ServeConfig to running engines: who gets which GPUs and ports, what is checked before,
and when an engine counts as ready."""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rltool.config.serve import EngineLaunch, ServeConfig
from rltool.engines.client import EngineClient, RetryPolicy
from rltool.engines.dialects import dialect
from rltool.engines.endpoints import Endpoints, EngineEndpoint, ModelEndpoints, edit_endpoints
from rltool.engines.interpreter import check_engine_python, default_engine_python
from rltool.engines.liveness import Liveness
from rltool.engines.run_client import DRIVER_ROLE, driver_of
from rltool.engines.types import EngineInfo, GenerateRequest, SamplingParams
from rltool.errors import EngineError, EngineRejected, MissingLogprobs, RltoolError, UsageError
from rltool.models.weight_files import INDEX, SINGLE, check_weight_files
from rltool.processes.gpus import gpus_in_use, visible_gpus
from rltool.processes.hosts import http_url
from rltool.processes.keys import read_key
from rltool.processes.ports import reserved_ports
from rltool.processes.readiness import NotReady, wait_until_ready
from rltool.processes.run_directory import RunDirectory
from rltool.processes.spawn import ProcessSpec, RunningProcess
from rltool.processes.state import is_alive, read_state, read_states
from rltool.processes.supervise import ProcessGroup

PROBE_SECONDS = 60.0
WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
"""Files of weights that an engine reads."""
"""For all probes of one engine and its first generation, which compiles or warms up things."""


_ROLE = re.compile(r"engine-\d+")


def role_of(index: int) -> str:
    return f"engine-{index}"


# -- planning: pure


def parse_gpus(text: str) -> tuple[int, ...]:
    """`0,1,2,3` or `0-3`. Raises UsageError."""
    gpus: list[int] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise UsageError(
                f"--gpus {text!r}: {part!r} is no GPU index; expected a list like 0,1,2,3 or a range like 0-3"
            )
        gpus.extend(range(int(first), int(last if dash else first) + 1))
    return tuple(gpus)


def engine_flags(words: Sequence[str]) -> tuple[str, ...]:
    """What stood after `--`. Raises UsageError if it does not begin with a flag:
    then the `--` was forgotten, or a word is stray."""
    if words and not words[0].startswith("-"):
        raise UsageError(
            f"unexpected argument {words[0]!r}; flags for the engine itself go after --, for example: -- --swap-space 0"
        )
    return tuple(words)


def wanted_gpus(config: ServeConfig) -> tuple[int, ...]:
    """The GPUs that the engines get, in order: those named, or the first of the host; none on the CPU.

    Raises UsageError for the wrong number, one named twice, or GPUs named with --device cpu.
    """
    needed = config.num_engines * config.tp
    if config.device == "cpu":
        if config.gpus:
            raise UsageError("--gpus with --device cpu: engines on the CPU take no GPU; leave one of the two out")
        return ()
    gpus = config.gpus or tuple(range(needed))
    twice = sorted({gpu for gpu in gpus if gpus.count(gpu) > 1})
    if twice:
        raise UsageError(f"--gpus names GPU {', '.join(map(str, twice))} twice; every GPU serves one engine")
    if len(gpus) != needed:
        named = ",".join(map(str, gpus))
        raise UsageError(
            f"--num-engines {config.num_engines} x --tp {config.tp} takes {needed} GPUs, "
            f"--gpus names {len(gpus)} ({named}): "
            + ("name more, or start fewer engines" if len(gpus) < needed else "name fewer, or start more engines")
        )
    return gpus


def check_gpus(gpus: Sequence[int], present: Sequence[int], held: Mapping[int, str]) -> None:
    """Raises UsageError if one is not on this host, or is held by a living process of some run
    (held: index -> by whom)."""
    absent = [gpu for gpu in gpus if gpu not in present]
    if absent:
        have = ",".join(map(str, present)) or "none"
        raise UsageError(
            f"--gpus: not on this host: GPU {', '.join(map(str, absent))}; it has: {have} "
            "(less those that CUDA_VISIBLE_DEVICES hides). Engines on the CPU: --device cpu"
        )
    taken = [f"GPU {gpu} by {held[gpu]}" for gpu in gpus if gpu in held]
    if taken:
        raise UsageError(f"--gpus: held by a live run: {'; '.join(taken)}. `rltool stop --run NAME` frees them")


def living_engines(run: RunDirectory) -> dict[int, str | None]:
    """Number -> URL of the engines of this run that live."""
    states = [state for state in read_states(run) if _ROLE.fullmatch(state.role) and is_alive(state)]
    return {int(state.role.rpartition("-")[2]): state.url for state in states}


def plan_launch(
    config: ServeConfig, run: RunDirectory, *, ports: Sequence[int], python: Path, first: int = 0
) -> list[EngineLaunch]:
    """One launch per engine: GPUs in order, tp at a time; a seed of its own each, or replicas would sample the same
    responses.

    ports: one per engine; first: number of the first one. Raises UsageError as wanted_gpus and check_model do.
    """
    check_model(config.model, tp=config.tp)
    gpus = wanted_gpus(config)
    return [
        EngineLaunch(
            index=first + index,
            model=config.model.absolute(),
            host=config.host,
            port=ports[index],
            gpus=gpus[index * config.tp : (index + 1) * config.tp],
            tp=config.tp,
            device=config.device,
            served_name=config.served_name,
            dtype=config.dtype,
            max_model_len=config.max_model_len,
            seed=config.seed + first + index,
            trust_remote_code=config.trust_remote_code,
            python=python,
            key_file=run.key_file,
            boot_id=uuid.uuid4().hex,
            weight_backend=config.weight_backend,
            work_dir=run.state_dir / role_of(first + index),
            extra_args=config.extra_args,
        )
        for index in range(config.num_engines)
    ]


def check_model(model: Path, *, tp: int = 1) -> None:
    """Raises UsageError unless it is a Hugging Face directory, config.json with "architectures", whose attention heads
    can be shared by `tp` GPUs."""
    file = model / "config.json"
    if not model.is_dir():
        raise UsageError(f"MODEL {model}: no such directory; it must be a Hugging Face model on this host's disk")
    try:
        config = json.loads(file.read_text())
    except OSError as error:
        raise UsageError(
            f"MODEL {model}: {file} cannot be read ({error.strerror}); is this a Hugging Face model directory?"
        ) from error
    except ValueError as error:
        raise UsageError(f"MODEL {model}: {file} is not JSON: {error}") from error
    if not isinstance(config, dict) or not config.get("architectures"):
        raise UsageError(f'MODEL {model}: {file} names no "architectures", so no engine knows what to build from it')
    text = config.get("text_config")  # of a model that sees pictures as well
    heads = (text if isinstance(text, dict) else config).get("num_attention_heads")
    if isinstance(heads, int) and heads % tp:
        raise UsageError(f"--tp {tp}: the {heads} attention heads of {model} are no multiple of it; choose a divisor")


def check_weights(model: Path) -> None:
    """UsageError for a directory without weights, and for safetensors files that are missing or cut off. Engines read
    other formats as well; what is in those is for them to judge."""
    if (model / INDEX).exists() or (model / SINGLE).exists():
        check_weight_files(model)
    elif not any(found for pattern in WEIGHT_PATTERNS for found in model.glob(pattern)):
        raise UsageError(
            f"MODEL {model}: no weights there ({', '.join(WEIGHT_PATTERNS)}); copy them beside config.json, or let the "
            "engine make some up: -- --load-format dummy"
        )


# -- starting


def dry_run(config: ServeConfig, run: RunDirectory) -> tuple[list[EngineLaunch], list[str]]:
    """The launches that launch_engines would make, and warnings for what would make it refuse here.
    Starts and writes nothing."""
    warnings = []
    with reserved_ports(config.num_engines, host=config.host, first=config.port) as reservation:
        launches = plan_launch(config, run, ports=reservation.ports, python=engine_python(config))
    gpus = wanted_gpus(config)
    try:
        check_gpus(gpus, [gpu.index for gpu in visible_gpus()], gpus_in_use())
    except UsageError as error:
        warnings.append(str(error))
    return launches, warnings


def engine_python(config: ServeConfig) -> Path:
    """Absolute, because engines run in another directory; not resolved,
    for the reason given at default_engine_python."""
    return config.engine_python.absolute() if config.engine_python else default_engine_python()


def check_launch(config: ServeConfig, *, root: Path | None = None) -> None:
    """Everything that can be refused before a run directory is made or a process started. Raises UsageError.

    root: where the runs are whose GPUs are taken; None: where they usually are.
    """
    check_model(config.model, tp=config.tp)
    if not any(flag.startswith("--load-format") for flag in config.extra_args):  # "dummy" needs no weights
        check_weights(config.model)
    gpus = wanted_gpus(config)
    if gpus:
        check_gpus(gpus, [gpu.index for gpu in visible_gpus()], gpus_in_use(root))
    check_engine_python(engine_python(config), config.engine)
    with reserved_ports(config.num_engines, host=config.host, first=config.port):
        pass


def engine_spec(config: ServeConfig, launch: EngineLaunch) -> ProcessSpec:
    speaks = dialect(config.engine)
    return ProcessSpec(
        role=role_of(launch.index),
        argv=tuple(speaks.argv(launch)),
        environment=speaks.environment(launch),
        url=http_url(launch.host, launch.port),
        gpus=launch.gpus,
        # Not the user's directory: a folder called "vllm" or "tokenizers" there would be imported instead of the
        # package.
        cwd=launch.work_dir,
    )


def launch_engines(
    config: ServeConfig, group: ProcessGroup, *, report: Callable[[str], None] = lambda _: None
) -> list[EngineEndpoint]:
    """Start all engines in `group`, wait until all serve, write the run's endpoints.json; the endpoints, in order.

    Beside engines of the run that live already, they are numbered from there on, and written beside them.
    `report` gets one line per step. Raises UsageError before anything is started, ProcessFailed when an engine dies or
    is late: leaving the group's block then stops the others.
    """
    run = group.run
    check_launch(config, root=run.path.parent)
    read_key(run.ensure_key(), f"run {run.name}")  # of an older run, it may have been edited
    living = living_engines(run)
    with reserved_ports(config.num_engines, host=config.host, first=config.port) as reservation:
        launches = plan_launch(
            config, run, ports=reservation.ports, python=engine_python(config), first=max(living, default=-1) + 1
        )
        for launch in launches:
            launch.work_dir.mkdir(mode=0o700, exist_ok=True)
        specs = [engine_spec(config, launch) for launch in launches]
        reservation.release()
        processes = [group.start(spec) for spec in specs]
    for process in processes:
        report(f"{process.role} started: pid {process.state.pid}, {process.state.url}")
    endpoints = asyncio.run(_wait_for_all(config, launches, processes, report))
    group.checks |= {
        process.role: Liveness(process.state.pid, endpoint.url)
        for process, endpoint in zip(processes, endpoints, strict=True)
    }
    edit_endpoints(run.endpoints_file, lambda file: _beside(file, config.served_name, endpoints, run, living))
    return endpoints


def _beside(
    file: Endpoints,
    model: str,
    endpoints: Sequence[EngineEndpoint],
    run: RunDirectory,
    living: Mapping[int, str | None],
) -> Endpoints:
    """These engines beside those of the file that live, or that a run which trains uses: there it is the fleet's list.
    What else stands there is of an earlier start."""
    trains = driver_of(run, read_state(run, DRIVER_ROLE)) is not None
    entry = file.models.get(model, ModelEndpoints())
    new = {engine.url for engine in endpoints}
    kept = [e for e in entry.engines if e.url not in new and (trains or e.url in living.values())]
    if not kept:
        return Endpoints(models={model: ModelEndpoints(engines=tuple(endpoints))})
    return file.with_engines(model, [*kept, *endpoints], entry.data_url)


async def _wait_for_all(
    config: ServeConfig,
    launches: Sequence[EngineLaunch],
    processes: Sequence[RunningProcess],
    report: Callable[[str], None],
) -> list[EngineEndpoint]:
    # Tries once: asking again is the waiting's business, which also sees the process die.
    async with EngineClient(retry=RetryPolicy(attempts=1)) as client:

        async def wait(launch: EngineLaunch, process: RunningProcess) -> EngineEndpoint:
            probe = _Probe(client, config, launch, process)
            endpoint = await wait_until_ready(process, probe, timeout=config.ready_timeout, probe_timeout=PROBE_SECONDS)
            report(
                f"{process.role} ready: {endpoint.url}, world size {endpoint.tp}, "
                f"weights over {endpoint.weight_backend}"
            )
            return endpoint

        try:
            async with asyncio.TaskGroup() as tasks:
                waiting = [
                    tasks.create_task(wait(launch, process))
                    for launch, process in zip(launches, processes, strict=True)
                ]
        except* RltoolError as errors:
            raise errors.exceptions[0] from None  # the first failure wins; the others follow from being stopped
        return [task.result() for task in waiting]


class _Probe:
    """Ready means: healthy, the right server and model, its control routes there, the world size as ordered,
    and it generates."""

    def __init__(
        self, client: EngineClient, config: ServeConfig, launch: EngineLaunch, process: RunningProcess
    ) -> None:
        self.client, self.config, self.launch, self.process = client, config, launch, process
        self.endpoint = EngineEndpoint(
            url=http_url(launch.host, launch.port),
            dialect=config.engine,
            tp=launch.tp,
            weight_backend=launch.weight_backend,
            boot_id=launch.boot_id,
            gpus=launch.gpus,
            key_file=launch.key_file,
            log=process.log,
        )

    async def __call__(self) -> EngineEndpoint:
        try:
            await self.client.health(self.endpoint)
            info = await self.client.probe(self.endpoint, timeout=PROBE_SECONDS)
            check_identity(self.process.role, self.launch, info)
            one_token = GenerateRequest(
                prompt_ids=(1,), sampling=SamplingParams(max_tokens=1), request_id=uuid.uuid4().hex, seed=0
            )
            await self.client.generate(self.endpoint, one_token, timeout=PROBE_SECONDS)
        except EngineRejected as error:
            # 503 while it loads is a 5xx; a 4xx of a server that we have just started will not go away by waiting.
            raise self.process.failure(f"refuses what a ready engine must answer: {error}") from error
        except MissingLogprobs as error:
            raise self.process.failure(f"generates without log-probabilities: {error}") from error
        except EngineError as error:
            raise NotReady(str(error)) from error
        update = {"plugin": info.plugin, "weight_backend": info.weight_backend or self.launch.weight_backend}
        return self.endpoint.model_copy(update=update)


def check_identity(role: str, launch: EngineLaunch, info: EngineInfo) -> None:
    """Raises UsageError if another server than the one just started answers on its port,
    or one with another world size."""
    if info.boot_id is not None and info.boot_id != launch.boot_id:
        raise UsageError(
            f"{role}: another server answers on port {launch.port} (boot id {info.boot_id}); choose another --port"
        )
    if info.model_id not in (launch.served_name, str(launch.model)):
        raise UsageError(
            f"{role}: the server on port {launch.port} serves {info.model_id!r} instead of {launch.served_name!r}; "
            "choose another --port"
        )
    if info.world_size != launch.tp:
        raise RltoolError(
            f"{role} reports world size {info.world_size}, ordered was {launch.tp}: "
            "engine flags after -- change its parallelism, which rltool does not pass on; use --tp"
        )
