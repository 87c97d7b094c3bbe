"""The parts of the report that are no charts: tiles, tables, samples. HTML; everything of the user's is escaped."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from rltool.report.charts import format_number
from rltool.report.run_files import RunFiles
from rltool.report.samples import SampleRecord, median, ordered

SMOOTHED_STEPS = 10
FIRST_STEPS = 3
"""What "at the beginning" means for the reward: a single step of a few hundred samples is noisy."""
LONGEST_TEXT = 4000
"""Characters of a prompt or an answer on the page; the rest is in `rltool samples`."""

FACTS = {
    "started": "started", "host": "host", "device": "trainer", "engines": "engines", "model": "model",
    "parameters": "parameters", "steps": "steps",
}  # fmt: skip
"""Fact of a run's start -> its name on the page."""


def header(title: str, note: str, made: str, runs: Sequence[RunFiles]) -> str:
    """Title, what it is about, when the page was made, and what each run ran on."""
    lines = [f"<h1>{escape(title)}</h1>"]
    if note:
        lines.append(f"<p>{escape(note)}</p>")
    for run in runs:
        known = [f"{name} {_fact(run.facts[key])}" for key, name in FACTS.items() if run.facts.get(key) is not None]
        prefix = f"{run.name}: " if len(runs) > 1 else ""
        if known:
            lines.append(f"<p>{escape(prefix + ', '.join(known))}</p>")
    lines.append(f"<p>rltool training report of {escape(made)}</p>")
    return f"<header>{''.join(lines)}</header>"


def _fact(value: Any) -> str:
    if isinstance(value, int):
        return f"{value / 1e9:.2f} B" if value >= 1e9 else f"{value / 1e6:.2f} M" if value >= 1e5 else str(value)
    return str(value)


def tiles(run: RunFiles, *, several: bool) -> str:
    """The main numbers of a run."""
    found, metrics = [], run.metrics
    reward = [value for _, value in metrics.get("rollout/reward_mean", [])]
    if reward:
        first, last = mean(reward[:FIRST_STEPS]), mean(reward[-SMOOTHED_STEPS:])
        note = f"first {min(FIRST_STEPS, len(reward))} steps, last {min(SMOOTHED_STEPS, len(reward))}"
        found.append(("Reward", f"{first:.2f} → {last:.2f}", note))
    for name, points in run.evaluations.items():
        (first_step, before), (last_step, after) = points[0], points[-1]
        change = f"{before:.2f} → {after:.2f}" if len(points) > 1 else f"{before:.2f}"
        found.append((f"Accuracy, {name}", change, f"step {first_step:g}, step {last_step:g}"))
    if difference := metrics.get("train/logprob_abs_diff_mean"):
        largest = format_number(max(value for _, value in difference))
        found.append(("Log-probability difference", largest, "largest mean of any step"))
    if rank := run.config.get("lora.rank"):
        named = run.config.get("lora.targets", "all-linear")
        targets = named if isinstance(named, str) else ", ".join(named)
        sent = {"adapter": "sent alone"}.get(str(run.config.get("weights.lora_sync")), "sent merged")
        alpha = run.config.get("lora.alpha", 32)
        found.append(("Adapters (LoRA)", f"rank {rank}", f"alpha {alpha}, {targets}, {sent}"))
    if seconds := metrics.get("time/step_seconds"):
        total = math.fsum(value for _, value in seconds)
        found.append(("Steps", f"{len(seconds)}", f"{total:.0f} s in all, {total / len(seconds):.2f} s each"))
    cells = "".join(
        f'<div class="tile"><b>{escape(title)}</b><strong>{escape(value)}</strong><small>{escape(note)}</small></div>'
        for title, value, note in found
    )
    heading = f"<h3>{escape(run.name)}</h3>" if several else ""
    return f'{heading}<section class="tiles">{cells}</section>'


def metric_tables(runs: Sequence[RunFiles]) -> str:
    """All metrics by their first word. One run: first, last, least, most, mean; several: the mean of the last steps of
    each. What never changes, in any of the runs, stands apart and folded."""
    names = sorted({name for run in runs for name in run.metrics})
    constant = {name: value for name in names if (value := _constant(runs, name)) is not None}
    parts = []
    for group in sorted({name.partition("/")[0] for name in names}):
        rows = [
            f"<tr><th>{escape(name)}</th>{_cells(runs, name)}</tr>"
            for name in names
            if name.partition("/")[0] == group and name not in constant
        ]
        if rows:
            parts.append(_details(group, _numbers(runs, rows), opened=group in ("rollout", "eval", "train")))
    if constant:
        shown = {name: format_number(value) for name, value in constant.items()}
        parts.append(_details("constant in all steps", _rows(shown, {}), opened=False))
    return f"<section><h2>Metrics</h2>{''.join(parts)}</section>"


def _constant(runs: Sequence[RunFiles], name: str) -> float | None:
    values = {value for run in runs for _, value in run.metrics.get(name, [])}
    steps = sum(len(run.metrics.get(name, [])) for run in runs)
    return values.pop() if len(values) == 1 and steps > 1 else None


def _numbers(runs: Sequence[RunFiles], rows: Sequence[str]) -> str:
    columns = ["first", "last", "least", "most", "mean"] if len(runs) == 1 else [run.name for run in runs]
    head = "".join(f"<td>{escape(column)}</td>" for column in columns)
    note = "" if len(runs) == 1 else f"<p><small>mean of the last {SMOOTHED_STEPS} values</small></p>"
    return (
        f'{note}<table class="numbers"><thead><tr><th>metric</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def _cells(runs: Sequence[RunFiles], name: str) -> str:
    if len(runs) == 1:
        values = [value for _, value in runs[0].metrics[name]]
        cells = [format_number(cell) for cell in (values[0], values[-1], min(values), max(values), mean(values))]
    else:
        points = [[value for _, value in run.metrics.get(name, [])] for run in runs]
        cells = [format_number(mean(values[-SMOOTHED_STEPS:])) if values else "-" for values in points]
    return "".join(f"<td>{cell}</td>" for cell in cells)


def config_differences(runs: Sequence[RunFiles]) -> str:
    """What is not the same in the configuration of several runs; also that nothing is."""
    keys = sorted({key for run in runs for key in run.config})
    differing = [key for key in keys if len({_json(run.config.get(key, "-")) for run in runs}) > 1]
    rows = "".join(
        f"<tr><th>{escape(key)}</th>"
        + "".join(f"<td>{escape(_json(run.config.get(key, '-')))}</td>" for run in runs)
        + "</tr>"
        for key in differing
    )
    head = "<tr><th>setting</th>" + "".join(f"<td>{escape(run.name)}</td>" for run in runs) + "</tr>"
    content = f"<table><thead>{head}</thead><tbody>{rows}</tbody></table>" if rows else "<p>none</p>"
    return _section("Differences in configuration", content, opened=True)


def pairs_table(title: str, pairs: Mapping[str, Any], origins: Mapping[str, str], *, opened: bool) -> str:
    return _section(title, _rows(pairs, origins), opened=opened)


def samples(runs: Sequence[RunFiles]) -> str:
    """Best, median and worst answer of a few steps of each run; nothing where no run keeps samples."""
    parts = []
    for run in runs:
        prefix = f"{run.name}, " if len(runs) > 1 else ""
        for kept in run.samples:
            if not kept.samples:
                continue
            best_first = ordered(kept.samples, "reward")
            chosen = {"best": best_first[0], "median": median(kept.samples), "worst": best_first[-1]}
            cards = "".join(_answer(name, record) for name, record in chosen.items())
            title = f"{prefix}step {kept.step + 1} ({len(kept.samples)} of {kept.of} samples are kept)"
            parts.append(f'<h3>{escape(title)}</h3><div class="answers">{cards}</div>')
    return f"<section><h2>Answers</h2>{''.join(parts)}</section>" if parts else ""


def _answer(name: str, record: SampleRecord) -> str:
    reward = "no reward" if record.reward is None else f"reward {record.reward:g}"
    label = f"<p><small>label {escape(_cut(record.label))}</small></p>" if record.label is not None else ""
    pictures = ((escape(name), escape(url)) for name, url in record.pictures)
    seen = "".join(f'<img src="{url}" alt="{name}" title="{name}">' for name, url in pictures)
    spans = "".join(_span(record, span.mask, span.start, span.end) for span in record.spans)
    return (
        f'<div class="answer"><b>{name}, {reward}</b> <small>{escape(record.status)}, {len(record.tokens)} tokens'
        f"</small>{seen}<pre>{escape(_cut(record.prompt))}</pre>{label}<pre>{spans}</pre></div>"
    )


def _span(record: SampleRecord, mask: int, start: int, end: int) -> str:
    """Of several turns, the model's are distinguished from inserted text; a single one is the decoded text."""
    text = record.text if len(record.spans) == 1 else "".join(record.tokens[start:end])
    return escape(_cut(text)) if mask else f'<span class="inserted">{escape(_cut(text))}</span>'


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]} ... ({len(text) - LONGEST_TEXT} more)"


def _rows(pairs: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    rows = "".join(
        f"<tr><th>{escape(str(key))}</th><td>{escape(_json(value))}</td>"
        f"<td><small>{escape(str(origins.get(key, '')))}</small></td></tr>"
        for key, value in pairs.items()
    )
    return f"<table>{rows}</table>"


def _section(title: str, content: str, *, opened: bool) -> str:
    head = f"<details{' open' if opened else ''}><summary><h2>{escape(title)}</h2></summary>"
    return f'<section>{head}<div class="scroll">{content}</div></details></section>'


def _details(title: str, content: str, *, opened: bool) -> str:
    head = f"<details{' open' if opened else ''}><summary>{escape(title)}</summary>"
    return f'{head}<div class="scroll">{content}</div></details>'


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
