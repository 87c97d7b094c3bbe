"""`rltool plan`: what a run takes on a cluster, from a configuration and a config.json alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from rltool.commands.options import Config, Sets
from rltool.errors import UsageError
from rltool.terminal import Console, write_line

if TYPE_CHECKING:
    from rltool.models.base import Family
    from rltool.training.cluster.cluster_plan import ClusterPlan, Engines

GIB = 1 << 30


def plan(
    model: Annotated[
        Path | None,
        typer.Argument(help="Directory with a config.json, or a name of the Hugging Face hub; default: model.path."),
    ] = None,
    config: Config = None,
    set_: Sets = None,
    hosts: Annotated[str, typer.Option(help="How many; several (2,8,32) are compared, a line each.")] = "2",
    gpus_per_host: Annotated[int, typer.Option(min=1, help="GPUs of each host.")] = 8,
    gpu_memory: Annotated[float, typer.Option(min=1, help="GiB of each GPU.")] = 80,
    trainer_hosts: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Hosts of ranks alone, the first ones. Default: what trainer.world_size takes, else half of them; all "
            "where engines share the ranks' GPUs.",
        ),
    ] = None,
    sample_tokens: Annotated[
        int, typer.Option(min=1, help="Average tokens of a sample, prompt and response.")
    ] = 4096,
    rate: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE in place of an assumed rate (they are listed with what they limit); repeatable."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs: one JSON object for each number of hosts.")]
    = False,
) -> None:  # fmt: skip
    """Plan a run for hosts that need not be there: who is where, a layout that fits, memory, connections, what the
    links carry and for how long at given rates, and what limits it. Without a layout in [trainer] and engines in
    [[engines.groups]] it looks for them. Exit code 1: it does not fit."""
    from rltool.models.hub import local_model
    from rltool.models.registry import family_for, read_hf_config
    from rltool.training.cluster.cluster_plan import Cluster, configured, plan_cluster, rates_of

    clusters = [Cluster(number, gpus_per_host, int(gpu_memory * GIB)) for number in _numbers(hosts)]
    rates = rates_of(rate or [])
    loaded = [configured(config or [], set_ or [], model, cluster, trainer_hosts) for cluster in clusters]
    settings = loaded[0].config.model
    family = family_for(read_hf_config(local_model(settings.path, files=("config.json",))), settings.family)
    plans = [
        plan_cluster(one, family, cluster, rates, sample_tokens=sample_tokens)
        for one, cluster in zip(loaded, clusters, strict=True)
    ]
    console = Console()
    if as_json:
        for found in plans:
            write_line(json.dumps({"architecture": family.architecture, "rates": rates} | found.as_json()))
    elif len(plans) == 1:
        for label, text in lines(plans[0], family):
            console.print(Text.assemble((f"{label:<12}", "bold"), text))
        for text in rate_lines(rates):
            console.print(Text(f"{'rate':<12}{text}", style="dim"))
    else:
        console.print(comparison(plans))
        for found in plans:
            console.print(f"{found.cluster.hosts} hosts: {found.bottleneck}")
    raise typer.Exit(1 if any(found.problems for found in plans) else 0)


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise UsageError(f"--hosts {text!r}: expected a number of hosts, or several: 2,8,32")
    return numbers


def lines(plan: ClusterPlan, family: Family) -> Iterator[tuple[str, str]]:
    """(label, text) for one cluster."""
    from rltool.models.memory import parameters_of
    from rltool.training.cluster.cluster_plan import seconds_text

    cluster, size = plan.cluster, parameters_of(family)
    room = f"{cluster.gpu_bytes / GIB:.0f} GiB"
    billions = f"{size.total / 1e9:.4g} B parameters, a token meets {size.active / 1e9:.3g} B"
    yield "model", f"{family.architecture}, {billions}"
    yield "cluster", f"{cluster.hosts} hosts x {cluster.gpus_per_host} GPUs of {room}"
    for hosts, holds in plan.on_hosts:
        yield f"host {hosts}", holds
    if plan.idle:
        yield "idle", f"{plan.idle} GPUs"
    if plan.trainer is not None and plan.memory is not None:
        layout, memory = plan.trainer.layout, plan.memory
        yield "layout", (
            f"tp {layout.tp}, pp {layout.pp}, cp {layout.cp}, ep {layout.ep}, dp {layout.dp}; "
            f"sequence_parallel = {str(plan.trainer.sequence_parallel).lower()}, "
            f"distributed_optimizer = {str(plan.trainer.distributed_optimizer).lower()}, "
            f'recompute = "{plan.trainer.recompute}"'
        )
        parts = ("weights", "gradients", "optimizer", "activations", "head")
        yield "a rank", (
            f"{memory.total / GIB:.1f} of {room}: "
            + ", ".join(f"{part} {getattr(memory, part) / GIB:.1f}" for part in parts)
        )
    if plan.engines is not None:
        yield "an engine", _engine_text(plan.engines)
    for what, number in plan.connections:
        yield "connections", f"{number:,} {what}"
    for link in plan.sync:
        yield "sync", f"{link.what}: {link.carried / 1e9:,.1f} GB, {seconds_text(link.seconds)}"
    if plan.sync:
        yield "sync", f"by {plan.transport}: {seconds_text(plan.sync_seconds)} at least"
    for link in plan.step:
        yield "step", f"{link.what}: {link.carried / 1e9:,.1f} GB, {seconds_text(link.seconds)}"
    if plan.training:
        yield "step", f"{plan.tokens:,} tokens: {seconds_text(plan.training)} of floating-point operations at least"
    if plan.training and plan.engines is not None:
        each = plan.tokens / plan.training / (plan.engines.count * plan.engines.gpus)
        yield "step", f"engines keep up where each of their GPUs samples {each:,.0f} tokens/s"
    for note in plan.notes:
        yield "note", note
    for problem in plan.problems:
        yield "does not fit", problem
    yield "bottleneck", plan.bottleneck


def _engine_text(engines: Engines) -> str:
    many = f"{engines.gpus} GPU{'s' * (engines.gpus > 1)}"
    weights = engines.bytes.weights / engines.gpus / GIB
    cache = f"a cache of {engines.cache_tokens:,} tokens" if engines.cache_tokens > 0 else "no room for a cache"
    return f"{engines.count} of {many}: weights {weights:.1f} GiB on each, {cache} an engine"


def rate_lines(rates: dict[str, float]) -> Iterator[str]:
    """What the seconds rest on."""
    from rltool.training.cluster.cluster_plan import RATES

    for name, value in rates.items():
        known = RATES[name]
        source = known.source if value == known.value else f"given; else {known.value:g}"
        yield f"{name} = {value:g} {known.unit} ({source})"


def comparison(plans: list[ClusterPlan]) -> Table:
    from rltool.training.cluster.cluster_plan import seconds_text

    names = ("hosts", "ranks", "tp/pp/cp/ep/dp", "GiB", "engines", "idle", "sync", "training")
    table = Table(*names)
    for found in plans:
        layout = found.trainer.layout if found.trainer is not None else None
        sizes = f"{layout.tp}/{layout.pp}/{layout.cp}/{layout.ep}/{layout.dp}" if layout is not None else "none fits"
        engines = found.engines
        table.add_row(
            str(found.cluster.hosts), str(layout.world_size) if layout is not None else "-", sizes,
            f"{found.memory.total / GIB:.1f}" if found.memory is not None else "-",
            f"{engines.count} x {engines.gpus}" if engines is not None else "-", str(found.idle),
            *(seconds_text(seconds) if seconds else "-" for seconds in (found.sync_seconds, found.training)),
        )  # fmt: skip
    return table
