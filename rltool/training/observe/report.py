"""What train prints beside its step lines: the plan of a dry run, and how it ended."""

from __future__ import annotations

import socket
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from rltool.config.train import TrainConfig
from rltool.engines.dialects.memory_flags import memory_flag, shares_memory
from rltool.engines.launch.plan import describe_copies, describe_plan
from rltool.models.memory import parameters_of
from rltool.models.registry import family_for, read_hf_config
from rltool.report.page import installed_versions
from rltool.terminal import Console
from rltool.training.checks.preflight import ProbedFleet, describe_engines, describe_fleet
from rltool.training.checks.weight_routes import describe_routes, idle_rules

if TYPE_CHECKING:  # they import this module
    from rltool.training.cluster.placement import PlacementPlan
    from rltool.training.prepare import Prepared
    from rltool.training.session import Outcome


def print_plan(prepared: Prepared, console: Console) -> None:
    """What was set and where, the data, the placement and the engines found. Nothing was started."""
    name = f"run {prepared.run.name}" if prepared.run.is_made else "a run to be made"
    table = Table("setting", "value", "from", title=f"{name} (dry run)", title_justify="left")
    origins, defaults = prepared.loaded.origins, 0

    def rows(section: dict, prefix: str = "") -> None:
        nonlocal defaults
        for key, value in section.items():
            name = prefix + key
            if name in origins:
                table.add_row(name, str(value), origins[name])
            elif isinstance(value, dict):
                rows(value, f"{name}.")
            else:
                defaults += 1

    rows(prepared.config.shown())
    console.print(table)
    console.print(f"{defaults} other settings have their defaults (docs/configuration.md)")
    if prepared.data:
        console.print(prepared.data)
    console.print(f"device: {prepared.device}")
    console.print(f"placement: {prepared.plan.describe()}")
    for index, bundle in enumerate(prepared.plan.bundles):
        console.print(f"  bundle {index}: {bundle}")
    if prepared.gpus:
        ranks = prepared.gpus[: len(prepared.plan.trainer)]
        rest = prepared.gpus[len(ranks) :]
        line = f"GPUs of this host: {','.join(map(str, ranks))} for the trainer"
        console.print(line + (f", {','.join(map(str, rest))} for engines" if rest else ""))
    if prepared.expected is not None:
        console.print("engines that train starts (ports are found then):")
        several = len({launch.node for launch in prepared.expected.launches}) > 1
        copies = describe_copies(prepared.expected, prepared.run.quantized_dir)
        for line in (
            *describe_plan(prepared.expected, name_hosts=several), *copies, *describe_colocated(prepared.plan)
        ):
            console.print(f"  {line}")
    if prepared.fleet is not None:
        for line in describe_engines(prepared.fleet, prepared.config):
            console.print(line)
        console.print(describe_routes(prepared.fleets, prepared.config, prepared.device))
        for line in idle_rules(prepared.fleets, prepared.config.weights):
            console.print(line, style="yellow")
    if prepared.evaluation is not None:
        console.print(f"engines for evaluation alone: {describe_fleet(prepared.evaluation)}")
    if prepared.resume_from is not None:
        console.print(f"resumes from {prepared.resume_from}")


def describe_colocated(plan: PlacementPlan) -> list[str]:
    """Of colocated engines: what they take of the GPUs' memory."""
    if not plan.shares_gpus or plan.device == "cpu":
        return []
    groups = {slot.group.name: slot.group for slot in plan.slots if slot.group.role != "placeholder"}
    lines = [
        f"group {name}: on the trainer's GPUs, asleep while it trains; awake "
        f"{memory_flag(shares_memory(group, 0, colocated=True))} (engines.groups: flags), beside the trainer's "
        "parameters"
        + (f"; {group.engines_per_gpu} engines on each GPU" if group.engines_per_gpu > 1 else "")
        for name, group in groups.items()
    ]
    return [*lines, *plan.memory]


def print_outcome(prepared: Prepared, outcome: Outcome, console: Console) -> None:
    """Where everything is, and what to do next."""
    run = prepared.run
    console.print(_how_it_ended(outcome))
    rows: list[tuple[str, Path | None]] = [
        ("checkpoint", outcome.checkpoint),
        ("metrics", run.metrics_file if run.metrics_file.exists() else None),
        ("logs", run.logs_dir / "latest"),
    ]
    for label, path in rows:
        if path is not None:
            console.print(f"  {label}: {path}")
    if outcome.step < prepared.config.steps:
        resume = " --resume" if outcome.checkpoint is not None else ""
        console.print(f"  go on with: rltool train --run {run.name}{resume} ...")


def _how_it_ended(outcome: Outcome) -> str:
    if outcome.gave_up:
        return (
            f"stopped by {outcome.stopped_by} after step {outcome.step}; the training on the next rollout was dropped"
        )
    if outcome.parameter_hash is None:
        saved = "no checkpoint was written" if outcome.checkpoint is None else "its newest checkpoint stands"
        return f"stopped by {outcome.stopped_by} before a step was done: nothing was trained, {saved}"
    parameters = f"parameters sha256:{outcome.parameter_hash[:16]}"
    if outcome.stopped_by is not None:
        return f"stopped by {outcome.stopped_by} after step {outcome.step}; {parameters}"
    return f"done after step {outcome.step}; {parameters}"


def run_facts(config: TrainConfig, devices: str, fleet: ProbedFleet | None) -> dict[str, Any]:
    """JSON-able. devices: of the trainer's ranks, in words; fleet: None where no engine was probed at the start."""
    family = family_for(read_hf_config(config.model.path), config.model.family)
    engines = Counter(f"{info.dialect} {info.engine_version}" for info in fleet.infos.values()) if fleet else Counter()
    return {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "device": devices,
        "engines": ", ".join(f"{count} {name}" for name, count in engines.items()) or None,
        "model": f"{family.architecture} {config.model.path}",
        "parameters": parameters_of(family).total,
        "steps": config.steps,
        "versions": installed_versions(),
    }
