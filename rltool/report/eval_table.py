"""Results of an evaluation for people and for programs. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table


def by_set(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """{"eval/NAME/accuracy": 0.5} -> {"NAME": {"accuracy": 0.5}}, in the order in which the sets come."""
    found: dict[str, dict[str, float]] = {}
    for key, value in metrics.items():
        room, _, rest = key.partition("/")
        name, _, metric = rest.rpartition("/")
        if room == "eval":
            found.setdefault(name, {})[metric] = value
    return found


def result(metrics: Mapping[str, float], about: Mapping[str, Any]) -> dict[str, Any]:
    """JSON-able. about: what was evaluated."""
    return {**about, "sets": by_set(metrics)}


def result_table(metrics: Mapping[str, float]) -> Table:
    """One row a set; estimates with their 95 % interval."""
    sets = by_set(metrics)
    estimates = ["accuracy", *sorted({m for found in sets.values() for m in found if _is_pass_at(m)}, key=_k)]
    table = Table()
    table.add_column("set", no_wrap=True)
    for name in ("prompts", "samples", *(name.replace("pass_at_", "pass@") for name in estimates)):
        table.add_column(name, justify="right")
    for name in ("tokens", "truncated", "failed", "seconds"):
        table.add_column(name, justify="right")
    for name, found in sets.items():
        table.add_row(
            name, f"{found['prompts']:.0f}", f"{found['samples']:.0f}", *(_estimate(found, e) for e in estimates),
            f"{found['response_length_mean']:.1f}", f"{found['truncated_fraction']:.1%}", f"{found['failed']:.0f}",
            f"{found['seconds']:.1f}",
        )  # fmt: skip
    return table


def _estimate(found: Mapping[str, float], name: str) -> str:
    if name not in found:
        return "-"
    return f"{found[name]:.3f} ({found[f'{name}_low']:.3f} to {found[f'{name}_high']:.3f})"


def _is_pass_at(metric: str) -> bool:
    return metric.startswith("pass_at_") and metric.removeprefix("pass_at_").isdigit()


def _k(metric: str) -> int:
    return int(metric.removeprefix("pass_at_"))
