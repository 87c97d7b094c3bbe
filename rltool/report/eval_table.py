"""Results of an evaluation for people and for programs. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

_BUILT_IN = {
    "accuracy", "accuracy_low", "accuracy_high", "prompts", "samples", "failed", "seconds", "response_length_mean",
    "response_length_max", "truncated_fraction",
}  # fmt: skip
"""Measures of every set; others are of eval.function."""


def by_set(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """{"eval/NAME/accuracy": 0.5} -> {"NAME": {"accuracy": 0.5}}, in the order in which the sets come. What is not of
    one set (eval/version_min) is left out."""
    found: dict[str, dict[str, float]] = {}
    for key, value in metrics.items():
        room, _, rest = key.partition("/")
        name, _, metric = rest.rpartition("/")
        if room == "eval" and name:
            found.setdefault(name, {})[metric] = value
    return found


def result(metrics: Mapping[str, float], about: Mapping[str, Any]) -> dict[str, Any]:
    """JSON-able. about: what was evaluated."""
    return {**about, "sets": by_set(metrics)}


def result_table(metrics: Mapping[str, float]) -> Table:
    """One row a measure, so that it fits on 80 columns; estimates with their 95 % interval."""
    table = Table()
    for name, justify in (("set", "left"), ("measure", "left"), ("value", "right"), ("95 % interval", "left")):
        table.add_column(name, justify=justify, no_wrap=True)  # pyright: ignore[reportArgumentType]
    for name, found in by_set(metrics).items():
        rows = [("accuracy", *_estimate(found, "accuracy"))]
        rows += [(f"pass@{_k(m)}", *_estimate(found, m)) for m in sorted(filter(_is_pass_at, found), key=_k)]
        rows += [(m, *_estimate(found, m)) for m in found if not _is_built_in(m) and not _is_an_end(m, found)]
        if "samples" in found:  # eval.function may have none
            rows.append(("prompts, samples", f"{found['prompts']:.0f}, {found['samples']:.0f}", ""))
            rows.append(("tokens per response", f"{found['response_length_mean']:.1f}", ""))
            rows.append(("truncated", f"{found['truncated_fraction']:.1%}", ""))
            rows.append(("rewards that failed", f"{found['failed']:.0f}", ""))
        rows.append(("seconds", f"{found['seconds']:.1f}", ""))
        for number, row in enumerate(rows):
            table.add_row(name if number == 0 else "", *row, end_section=number == len(rows) - 1)
    return table


def _estimate(found: Mapping[str, float], name: str) -> tuple[str, str]:
    low, high = found.get(f"{name}_low"), found.get(f"{name}_high")
    return f"{found[name]:.3f}", f"{low:.3f} to {high:.3f}" if low is not None and high is not None else ""


def _is_built_in(metric: str) -> bool:
    return metric.startswith("pass_at_") or metric in _BUILT_IN


def _is_an_end(metric: str, found: Mapping[str, float]) -> bool:
    """Of the interval of another one."""
    base, _, end = metric.rpartition("_")
    return end in ("low", "high") and base in found


def _is_pass_at(metric: str) -> bool:
    return metric.startswith("pass_at_") and metric.removeprefix("pass_at_").isdigit()


def _k(metric: str) -> int:
    return int(metric.removeprefix("pass_at_"))
