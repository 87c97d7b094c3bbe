"""`rltool serve-engines`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from rltool.config.loader import load_config
from rltool.config.serve import POLICY, EngineLaunch, ServeConfig
from rltool.config.train import TrainConfig
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet.joining import join, leave, users_of_engines
from rltool.engines.launch.engine_process import engine_spec
from rltool.engines.launch.plan import describe_copies, describe_plan
from rltool.engines.launch.start import (
    Order,
    check_order,
    check_processes,
    dry_run,
    engine_flags,
    launch_engines,
    order_of_file,
    order_of_flags,
    parse_gpus,
)
from rltool.engines.launch.startup import Phase, Show, in_lines
from rltool.errors import UsageError
from rltool.masking import masked
from rltool.models.hub import local_model, with_local_models
from rltool.processes.hosts import is_loopback
from rltool.processes.run_choice import train_command
from rltool.processes.run_directory import RunDirectory, check_writable, open_run, plan_run
from rltool.processes.state import free_role
from rltool.processes.supervise import ProcessGroup, run_command
from rltool.router.planned import start_planned_routers
from rltool.terminal import Console

console = Console()

ORDERLY_SECONDS = 300.0
"""`rltool stop` waits so long for a run that trains to let go of the engines (its deadlines.close), and for their
end."""


def serve_engines(
    model: Annotated[
        Path | None, typer.Argument(help="Hugging Face model directory; with --config the file names it.")
    ] = None,
    engine_args: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ENGINE FLAGS]", help="Passed to each engine untouched.")
    ] = None,
    config: Annotated[
        list[Path] | None,
        typer.Option(
            "--config", "-c", help="TOML file of a run: start its [[engines.groups]], of all its models; repeatable."
        ),
    ] = None,
    engine: Annotated[str | None, typer.Option(help="vllm or sglang (default: vllm).")] = None,
    num_engines: Annotated[int | None, typer.Option(help="How many engines (default: 1).")] = None,
    gpus: Annotated[
        str | None, typer.Option(help="GPUs of this host, given to engines in order: 0,1,2,3 or 0-3 (default: from 0).")
    ] = None,
    engines_per_gpu: Annotated[
        int | None, typer.Option(help="So many engines share the same GPUs and their memory (default: 1).")
    ] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel size: GPUs per engine (default: 1).")] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu (default: cuda).")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on (default: 127.0.0.1).")] = None,
    port: Annotated[
        int | None, typer.Option(help="Port of the first engine, the others follow (default: free ones).")
    ] = None,
    engine_python: Annotated[
        Path | None, typer.Option(help="Python of the environment that has the engine (default: this one).")
    ] = None,
    served_name: Annotated[
        str | None, typer.Option(help="Name of the model in endpoints.json and on /v1/models (default: policy).")
    ] = None,
    update_weights: Annotated[
        bool | None,
        typer.Option(
            "--update-weights/--no-update-weights",
            help="Whether trainers update its weights (default); a judge's or a reward model's they leave alone.",
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(help="generate (default) or classify: a model with a classification head (a reward model)."),
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest sequence in tokens (default: the model's).")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Engine dtype (default: the model's; float32 on the CPU).")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the first engine; the others count up (default: 0).")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
    ] = False,
    weight_backend: Annotated[
        str | None,
        typer.Option(help="rltool (the plugin's: nccl, ipc, gloo, disk or delta; the default) or nccl (vLLM's own)."),
    ] = None,
    return_routed_experts: Annotated[
        bool, typer.Option("--return-routed-experts", help="Replies can carry the experts that the router chose.")
    ] = False,
    lora_rank: Annotated[
        int | None, typer.Option(help="Largest rank of adapters that they take under names (default: they take none).")
    ] = None,
    lora_slots: Annotated[int | None, typer.Option(help="Adapters that each holds at a time (default: 4).")] = None,
    quantization: Annotated[
        Literal["none", "fp8"] | None,
        typer.Option(help="fp8: linear layers are quantised, SGLang's in a copy, for engines.quantization = fp8."),
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="vLLM's batch-invariant kernels, for runs with algorithm.exact.")
    ] = False,
    ready_timeout: Annotated[float | None, typer.Option(help="Seconds for each to serve (default: 600).")] = None,
    max_restarts: Annotated[
        int | None,
        typer.Option(help="How often an engine that dies is started again (default: 5)."),
    ] = None,
    run: Annotated[str | None, typer.Option(help="Name of the run (default: a new one).")] = None,
    detach: Annotated[
        bool,
        typer.Option("--detach", help="Return when they serve; they live on, and are watched, until `rltool stop`."),
    ] = False,
    no_join: Annotated[
        bool, typer.Option("--no-join", help="Do not join a run that is training with this run's engines.")
    ] = False,
    dry: Annotated[bool, typer.Option("--dry-run", help="Show what would be started, and start nothing.")] = False,
) -> None:
    """Start inference engines, wait until each one serves, and write their addresses to the run's endpoints.json."""
    flags = {
        "model": ("MODEL", model),
        "engine": ("--engine", engine),
        "num_engines": ("--num-engines", num_engines),
        "engines_per_gpu": ("--engines-per-gpu", engines_per_gpu),
        "gpus": ("--gpus", None if gpus is None else parse_gpus(gpus)),
        "tp": ("--tp", tp),
        "device": ("--device", device),
        "host": ("--host", host),
        "port": ("--port", port),
        "engine_python": ("--engine-python", engine_python),
        "served_name": ("--served-name", served_name),
        "update_weights": ("--update-weights", update_weights),
        "task": ("--task", task),
        "max_model_len": ("--max-model-len", max_model_len),
        "dtype": ("--dtype", dtype),
        "seed": ("--seed", seed),
        "trust_remote_code": ("--trust-remote-code", trust_remote_code or None),
        "weight_backend": ("--weight-backend", weight_backend),
        "return_routed_experts": ("--return-routed-experts", return_routed_experts or None),
        "lora_rank": ("--lora-rank", lora_rank),
        "lora_slots": ("--lora-slots", lora_slots),
        "quantization": ("--quantization", quantization),
        "exact": ("--exact", exact or None),
        "ready_timeout": ("--ready-timeout", ready_timeout),
        "max_restarts": ("--max-restarts", max_restarts),
        "extra_args": ("--", engine_flags(engine_args or []) or None),
    }
    order, in_fp8 = _order(config or [], flags)
    if dry:
        directory = plan_run("NEW-RUN" if run is None else run)
        check_writable(directory)
        _print_dry_run(order, directory)
        return
    check_order(order)
    directory = open_run(run, create=True)
    if in_fp8 is not None:
        order = in_fp8.order(order, directory)

    def bring_up(group: ProcessGroup) -> None:
        _announce(order, directory)
        with _startup() as show:
            found = launch_engines(order, group, report=console.print, show=show)
        console.print(_table(found))
        start_planned_routers(order, found, group, report=console.print)
        trained = [engine for name, engines in found.items() for engine in engines if order.models[name].update_weights]
        if not no_join and trained:
            join(users_of_engines(directory), trained, _log)
            group.before_stop = lambda: leave(users_of_engines(directory), [e.url for e in trained], _log)
        console.print(train_command(directory.endpoints_file))
        console.print(f"detached; end them with: rltool stop --run {directory.name}" if detach else "Ctrl-C ends them")

    role = free_role("serve-engines", directory)
    code = run_command(
        role, directory, bring_up, detach=detach, note=console.print, orderly_seconds=ORDERLY_SECONDS
    )
    raise typer.Exit(code)


@dataclass(frozen=True)
class _InFp8:
    """The model that is served in FP8. own: its family, where that is the user's."""

    model: str
    own: str | None

    def order(self, order: Order, run: RunDirectory | None = None) -> Order:
        """run: as for `order_in_fp8`; the copy is written."""
        from rltool.checkpoints.hf_export import order_in_fp8
        from rltool.models.quantized import AS_BFLOAT16, format_of
        from rltool.models.registry import read_hf_config

        path = order.models[self.model].path
        if (found := format_of(read_hf_config(path))) is not None:
            raise UsageError(f"--quantization fp8: {path} is in {found} already; {AS_BFLOAT16}, or leave the flag out")
        order = order_in_fp8(order, self.model, self.own, run)
        if (copy := order.models[self.model].quantized_copy) is not None:
            from rltool.checkpoints.convert import write_fp8_copy  # needs Megatron-core, which vLLM's host may lack

            write_fp8_copy(path, copy, own=self.own, report=_log)
        return order


def _order(files: list[Path], flags: Mapping[str, tuple[str, Any]]) -> tuple[Order, _InFp8 | None]:
    """The engines of the files' groups, or those that the flags describe; and what of them is in FP8."""
    given = [flag for flag, value in flags.values() if value is not None]
    if files:
        if given:
            raise UsageError(f"--config and {', '.join(given)}: set that in the file, for each group")
        found = with_local_models(load_config(TrainConfig, files, rules=()).config)
        order = order_of_file(found)
        in_fp8 = _InFp8(POLICY, found.model.family) if found.engines.quantization == "fp8" else None
        return (order if in_fp8 is None else in_fp8.order(order)), in_fp8
    if flags["model"][1] is None:
        raise UsageError(
            "give MODEL, a Hugging Face model directory or a name of the hub, or --config FILE with [[engines.groups]]"
        )
    config = load_config(ServeConfig, flags=flags).config
    order = order_of_flags(config.model_copy(update={"model": local_model(config.model, setting="MODEL")}))
    in_fp8 = None if config.quantization == "none" else _InFp8(config.served_name, None)
    return (order if in_fp8 is None else in_fp8.order(order)), in_fp8


def _log(line: str) -> None:
    with suppress(OSError):  # the terminal is gone: engines join and leave all the same
        console.print(line)


@contextmanager
def _startup() -> Iterator[Show]:
    """On a terminal a bar for each engine that does not serve yet, else lines."""
    if not console.is_terminal:
        yield in_lines(_log)
        return
    columns = (
        SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(bar_width=24), TimeElapsedColumn(),
        TextColumn("{task.fields[what]}", markup=False),
    )  # fmt: skip
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console, transient=True) as bars:

        def show(phases: Mapping[str, Phase]) -> None:
            for role in [role for role in tasks if role not in phases]:
                bars.remove_task(tasks.pop(role))
            for role, phase in phases.items():
                if role not in tasks:
                    tasks[role] = bars.add_task(role, total=None, what="")
                known = phase.done is not None
                bars.update(tasks[role], total=1.0 if known else None, completed=phase.done or 0.0, what=phase.what)

        yield show


def _announce(order: Order, directory: RunDirectory) -> None:
    """What is started, and which of it others can reach."""
    started = [group for group in order.groups if group.role != "placeholder"]
    parts = ", ".join(f"{group.count} x {group.engine} on {group.device or 'cuda'}" for group in started)
    console.print(f"run {directory.name}: {parts}, logs in {directory.logs_dir}/latest")
    for host in dict.fromkeys(group.host for group in started if group.host is not None):
        if not is_loopback(host):
            console.print(
                f"listening on {host}: reachable from other hosts, guarded by the key, not encrypted", style="yellow"
            )


def _table(found: Mapping[str, list[EngineEndpoint]]) -> Table:
    table = Table("model", "group", "url", "GPUs", "world size", "weights")
    for name, engines in found.items():
        for engine in engines:
            size = str(engine.tp * engine.pp * engine.dp)
            gpus = ",".join(map(str, engine.gpus)) or "cpu"
            table.add_row(name, engine.group, engine.url, gpus, size, engine.weight_backend)
    return table


def _print_dry_run(order: Order, run: RunDirectory) -> None:
    plan, warnings = dry_run(order, run)
    check_processes(plan.launches)
    for line in (*describe_plan(plan), *describe_copies(plan, run.quantized_dir)):
        _log(line)
    for launch in plan.launches:
        _print_launch(launch)
    for warning in warnings:
        console.print(f"warning: {warning}", style="yellow")
    console.print("dry run: nothing was started")


def _print_launch(launch: EngineLaunch) -> None:
    spec = engine_spec(launch)
    console.print(spec.role, style="bold")
    for name, value in sorted(spec.environment.items()):
        console.print(f"  {name}={shlex.quote(value)}")
    console.print(f"  {shlex.join(masked(spec.argv))}")
