"""Starting planned engines on this host: what is checked before, and what is written when they serve.

`serve-engines` starts engines here, and so does the actor that a run with managed engines has on each host
(rltool/training/cluster/engine_host.py). Which processes these are is planned in rltool/engines/launch/plan.py.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rltool.config.serve import POLICY, EngineGroup, EngineLaunch, ServeConfig
from rltool.config.train import TrainConfig
from rltool.engines.adapters import EXTRA_SLOTS
from rltool.engines.dialects.classification import check_head
from rltool.engines.dialects.table import launches as dialect_of
from rltool.engines.endpoints import Endpoints, EngineEndpoint, ModelEndpoints, edit_endpoints
from rltool.engines.fleet.liveness import Liveness
from rltool.engines.launch.engine_process import EngineRelaunch, engine_spec
from rltool.engines.launch.interpreter import check_engine_python
from rltool.engines.launch.plan import (
    EnginePlan,
    Host,
    Model,
    PortNeeds,
    Ports,
    Settings,
    engine_slots,
    handed_out,
    plan_engines,
    port_needs,
    ports_of,
    seat_slots,
    start_order,
)
from rltool.engines.launch.ready import wait_for_all
from rltool.engines.launch.startup import Show
from rltool.engines.run_client import DRIVER_ROLE, driver_of
from rltool.errors import UsageError
from rltool.models.weight_files import INDEX, SINGLE, check_tokenizer_files, check_weight_files
from rltool.processes.gpus import gpus_in_use, visible_gpus
from rltool.processes.keys import read_key
from rltool.processes.ports import reserved_ports
from rltool.processes.restarts import RestartPolicy
from rltool.processes.run_directory import RunDirectory
from rltool.processes.spawn import RunningProcess, describe_exit
from rltool.processes.state import is_alive, is_elsewhere, read_state, read_states
from rltool.processes.supervise import ProcessGroup

WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
"""Files of weights that an engine reads."""

THIS_HOST = "this host"

NO_RESTARTS = RestartPolicy(0)

_ROLE = re.compile(r"engine-\d+")


@dataclass(frozen=True)
class Order:
    """Groups of engines and the models that they serve, by name. restarts: of engines that are watched."""

    groups: tuple[EngineGroup, ...]
    models: Mapping[str, Model]
    restarts: RestartPolicy = NO_RESTARTS

    def quantized(self, name: str, config: dict[str, Any], directory: Path | None = None) -> Order:
        """The same with engines of that model that quantise what they load; config: a quantization_config. directory:
        of the model as it is then, for those of them that read it so."""
        model = replace(self.models[name], quantization=config, quantized_copy=directory)
        return replace(self, models={**self.models, name: model})

    def reads_quantized(self, name: str) -> bool:
        """Whether an engine of that model is of a kind that quantises nothing itself."""
        groups = (group for group in self.groups if group.model == name and group.role != "placeholder")
        return any(not dialect_of(group.engine).quantizes for group in groups)


def order_of_flags(config: ServeConfig) -> Order:
    """What the command line of serve-engines asks for."""
    model = Model(config.model, config.update_weights, task=config.task, exact=config.exact)
    return Order((config.group,), {config.served_name: model}, RestartPolicy(config.max_restarts))


def order_of_file(config: TrainConfig) -> Order:
    """The groups and models of a run's configuration. Raises UsageError where there is no group."""
    groups = config.engines.groups
    if not any(group.role != "placeholder" for group in groups):
        raise UsageError("no engine to start: the configuration has no [[engines.groups]]; see docs/engines.md")
    policy = Model(
        config.model.path, start_router=config.engines.start_router,
        return_routed_experts=config.algorithm.routing_replay,
        lora_rank=config.lora.rank if config.weights.lora_sync == "adapter" else 0,
        lora_slots=config.rollout.max_staleness + EXTRA_SLOTS, exact=config.algorithm.exact,
    )  # fmt: skip
    models = {POLICY: policy}
    models |= {
        name: Model(model.path, model.update_weights, model.start_router, model.task)
        for name, model in config.models.items()
        if model.path is not None
    }
    engines = config.engines
    return Order(groups, models, RestartPolicy(engines.max_restarts, engines.restart_backoff))


# -- the command line


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


# -- checks


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


def check_processes(launches: Sequence[EngineLaunch]) -> None:
    """What can be known to be wrong before any of them is started here: models, weights, interpreters. UsageError."""
    for model, tp in dict.fromkeys((launch.model, launch.tp) for launch in launches):
        check_model(model, tp=tp)
    loaded = [x for x in launches if not any(flag.startswith("--load-format") for flag in x.extra_args)]
    for model in dict.fromkeys(launch.model for launch in loaded):  # "dummy" needs no weights
        check_weights(model)
    for launch in loaded:
        check_head(launch)
        if not any(flag.startswith(dialect_of(launch.engine).tokenizer_flags) for flag in launch.extra_args):
            check_tokenizer_files(launch.model)
    for launch in {(launch.python, launch.engine): launch for launch in launches}.values():
        check_engine_python(launch.python, launch.engine)


def too_long(launch: EngineLaunch) -> str | None:
    """Why the engine will refuse its max_model_len; None where it will not, or cannot be known to."""
    try:
        config = json.loads((launch.model / "config.json").read_text())
    except (OSError, ValueError):
        return None
    return dialect_of(launch.engine).too_long(launch, config)


def check_order(order: Order, *, root: Path | None = None) -> None:
    """Everything that can be refused before a run directory is made or a process started. Raises UsageError.

    root: where the runs are whose GPUs are taken; None: where they usually are.
    """
    with _planned(order, RunDirectory(root or Path("/")), first=0) as (plan, _):
        check_processes(plan.launches)
        _check_plan_gpus(plan, root)


def _check_plan_gpus(plan: EnginePlan, root: Path | None = None) -> None:
    gpus = [gpu for launch in plan.launches for gpu in launch.gpus]
    gpus += [gpu for kept in plan.kept for gpu in kept.seat.gpus]
    if gpus:
        check_gpus(list(dict.fromkeys(gpus)), [gpu.index for gpu in visible_gpus()], gpus_in_use(root))


# -- the plan on this host


Release = Callable[[Sequence[EngineLaunch]], None]
"""Lets go of the ports of processes that start now."""


@contextmanager
def held_ports(needs: PortNeeds) -> Iterator[tuple[Ports, Release]]:
    """Ports of this host that cover the needs of a plan, held open until the second of the pair lets go of them, or the
    block ends. Raises UsageError for a fixed one that cannot be bound."""
    with ExitStack() as stack:
        reservations = [
            stack.enter_context(reserved_ports(1, host=address, first=port)) for _, address, port in needs.fixed
        ]
        found = {}
        for (node, address), count in needs.free.items():
            reservation = stack.enter_context(reserved_ports(count, host=address))
            found[node, address] = reservation.ports
            reservations.append(reservation)

        def release(launches: Sequence[EngineLaunch]) -> None:
            ports = {port for launch in launches for port in ports_of(launch)}
            for reservation in reservations:
                reservation.release(ports)

        yield handed_out(found), release


@contextmanager
def _planned(order: Order, run: RunDirectory, *, first: int) -> Iterator[tuple[EnginePlan, Release]]:
    """The plan on this host with ports that are held; the second of the pair lets go of them."""
    slots = engine_slots(order.groups)
    wanted = sum(share for slot in slots for share in slot.shares)
    named = {gpu for group in order.groups for gpu in group.gpus}
    counted = [gpu for gpu in range(wanted + len(named)) if gpu not in named]
    seats = seat_slots(slots, [Host(THIS_HOST, gpus=(*named, *counted))])
    settings = Settings(order.models, run.key_file, run.state_dir, first=first)
    with held_ports(port_needs(slots, seats, settings)) as (ports, release):
        yield plan_engines(slots, seats, settings, ports), release


def dry_run(order: Order, run: RunDirectory) -> tuple[EnginePlan, list[str]]:
    """The plan that launch_engines would carry out, and warnings: of GPUs that this host lacks or that are taken, for
    the plan may be meant for another one, and of lengths that an engine will not serve. Starts and writes nothing.

    UsageError for a model that is none; what else a start refuses is check_processes' to find.
    """
    with _planned(order, run, first=0) as (plan, _):
        pass
    for model, tp in dict.fromkeys((launch.model, launch.tp) for launch in plan.launches):
        check_model(model, tp=tp)
    warnings = list(dict.fromkeys(filter(None, map(too_long, plan.launches))))
    try:
        _check_plan_gpus(plan)
    except UsageError as error:
        warnings.append(str(error))
    return plan, warnings


# -- starting


def living_engines(run: RunDirectory) -> dict[int, str | None]:
    """Number -> URL of the engines of this run that live; None for one of another host, of which that is not known:
    its number is taken."""
    states = [state for state in read_states(run) if _ROLE.fullmatch(state.role)]
    return {
        int(state.role.rpartition("-")[2]): None if is_elsewhere(state) else state.url
        for state in states
        if is_alive(state) or is_elsewhere(state)
    }


def start_here(
    launches: Sequence[EngineLaunch], group: ProcessGroup, *, release: Release = lambda _: None
) -> list[RunningProcess]:
    """Start these processes on this host, in order, in `group`. release: lets go of their ports, at the last moment."""
    for launch in launches:
        launch.work_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    specs = [engine_spec(launch) for launch in launches]
    release(launches)
    return [group.start(spec) for spec in specs]


def launch_engines(
    order: Order, group: ProcessGroup, *, report: Callable[[str], None] = lambda _: None, show: Show | None = None
) -> dict[str, list[EngineEndpoint]]:
    """Start all engines in `group`, wait until all serve, write the run's endpoints.json; the endpoints by model.

    Beside engines of the run that live already, they are numbered from there on, and written beside them.
    `report` gets one line per step; show: see wait_for_all. Raises UsageError before anything is started, ProcessFailed
    when an engine dies or is late: leaving the group's block then stops the others.
    """
    run = group.run
    check_order(order, root=run.path.parent)
    read_key(run.ensure_key(), f"run {run.name}")  # of an older run, it may have been edited
    living = living_engines(run)
    serve: dict[int, EngineEndpoint] = {}
    relaunch = EngineRelaunch(group, order.restarts)
    group.restarts.append(relaunch)
    with _planned(order, run, first=max(living, default=-1) + 1) as (plan, release):
        for launches in start_order(plan.launches):
            processes = start_here(launches, group, release=release)
            for process in processes:
                report(f"{process.role} started: pid {process.state.pid}, {process.state.url}")
            # Each of them serves: on one host no engine has a second part.
            endpoints = asyncio.run(wait_for_all(launches, processes, report, show))
            for launch, process, endpoint in zip(launches, processes, endpoints, strict=True):
                group.checks[process.role] = Liveness(process.state.pid, endpoint.url)
                relaunch.watch(process, launch)
                serve[launch.index] = endpoint
            for earlier in group.processes:  # one may have died while others on its GPU were loading
                if (code := earlier.exit_code()) is not None:
                    raise earlier.failure(f"{describe_exit(code)} while others were starting")
    found: dict[str, list[EngineEndpoint]] = {}
    for launch in plan.launches:
        found.setdefault(launch.model_name, []).append(serve[launch.index])
    entries = {
        name: ModelEndpoints(update_weights=order.models[name].update_weights, engines=tuple(engines))
        for name, engines in found.items()
    }
    edit_endpoints(run.endpoints_file, lambda file: _beside(file, entries, run, living))
    return found


def _beside(
    file: Endpoints, new: Mapping[str, ModelEndpoints], run: RunDirectory, living: Mapping[int, str | None]
) -> Endpoints:
    """These engines beside those of the file that live, or that a run which trains uses: there it is the fleet's list.
    What else stands there is of an earlier start."""
    trains = driver_of(run, read_state(run, DRIVER_ROLE)) is not None
    started = {engine.url for entry in new.values() for engine in entry.engines}
    models = {}
    for name, entry in file.models.items():
        kept = tuple(e for e in entry.engines if e.url not in started and (trains or e.url in living.values()))
        if kept:
            models[name] = entry.model_copy(update={"engines": kept})
    for name, entry in new.items():
        before = models.get(name, ModelEndpoints())
        update = {"engines": (*before.engines, *entry.engines), "data_url": before.data_url}
        models[name] = entry.model_copy(update=update)
    return Endpoints(models=models)
