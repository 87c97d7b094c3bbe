"""One frame of `rltool top`: the status of a living run or served trainer, as text and tables. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rltool.commands.tables import engine_table, progress_line, short_version

if TYPE_CHECKING:
    from rltool.engines.run_client import History, RunStatus, ServedStatus

BARS = "▁▂▃▄▅▆▇█"
WIDEST_SPARKLINE = 60

NUMBERS = (
    ("reward", "rollout/reward_mean", ".3f"),
    ("response tokens", "rollout/response_length_mean", ".0f"),
    ("truncated", "rollout/truncated_fraction", ".1%"),
    ("sampled tokens/s", "rollout/tokens_per_second", ",.0f"),
    ("trained tokens/s", "train/tokens_per_second", ",.0f"),
    ("staleness, mean", "rollout/staleness_mean", ".2f"),
    ("staleness, oldest", "rollout/staleness_max", ".0f"),
    ("logp difference", "train/logprob_abs_diff_mean", ".1e"),
    ("effective samples", "train/effective_sample_fraction", ".1%"),
    ("gradient norm", "train/grad_norm", ".3f"),
    ("step, s", "time/step_seconds", ".2f"),
    ("waited for samples, s", "time/wait_seconds", ".2f"),
    ("training, s", "time/train_seconds", ".2f"),
    ("sync, s", "time/sync_seconds", ".2f"),
)
"""(label, metric, format) of what is shown beside the sparkline; those that a run does not measure are left out."""


def frame(run: str, status: RunStatus, history: History) -> RenderableType:
    """Everything on one screen: where the run is, its queue, engines, numbers of the newest step, rewards."""
    parts: list[RenderableType] = [
        Text(f"run {run}, weights {short_version(status.get('weight_version'))}", style="bold"),
        *(Text(part) for part in progress_line(status).split("; ")),
    ]
    if engines := status.get("engines"):
        parts.append(engine_table(engines, "engines"))
    records = [record for record in history["records"] if record["step"] >= 0]
    if not records:
        parts.append(Text("no step is done yet"))
        return Group(*parts)
    parts.append(_numbers(records[-1]["step"], records[-1]["metrics"]))
    rewards = [r["metrics"]["rollout/reward_mean"] for r in records if "rollout/reward_mean" in r["metrics"]]
    if rewards:
        shown = rewards[-WIDEST_SPARKLINE:]
        span = f"{min(shown):.3f} to {max(shown):.3f}"
        parts.append(Text(f"reward, last {len(shown)} steps ({span}):\n{sparkline(shown)}"))
    return Group(*parts)


def served_frame(run: str, status: ServedStatus) -> RenderableType:
    """Of a served trainer: its calls by kind, and each client's models, waiting calls and samples in flight."""
    running = status.get("running")
    doing = status.get("stalled") or (f"{running} is running" if running else "waits for calls")
    calls = Table(title="calls that are done", title_justify="left")
    for name in ("kind", "calls", "failed", "seconds", "tokens", "tokens/s"):
        calls.add_column(name, justify="left" if name == "kind" else "right", no_wrap=True)
    for kind, found in sorted(status.get("calls", {}).items()):
        seconds, tokens = found["seconds"], found["tokens"]
        counts = (f"{tokens:,}", f"{tokens / seconds:,.0f}") if tokens and seconds else ("", "")
        calls.add_row(kind, f"{found['calls']:,}", str(found["failed"]), f"{seconds:,.1f}", *counts)
    of_client = {
        "models": status.get("models", {}),
        "calls that wait": status.get("waiting", {}),
        "samples in flight": status.get("samples_in_flight", {}),
        "bytes of both": status.get("queued_bytes", {}),
        "of results": status.get("result_bytes", {}),
    }
    clients = Table(title="clients", title_justify="left")
    clients.add_column("client")
    for name in of_client:
        clients.add_column(name, justify="right", no_wrap=True)
    for client in sorted(set().union(*of_client.values())):
        clients.add_row(client, *(str(counts.get(client, 0)) for counts in of_client.values()))
    parts: list[RenderableType] = [Text(f"served trainer {run}: {doing}", style="bold"), calls, clients]
    if "samples" in status:
        parts.append(Text(f"{status['samples']:,} samples done with {status.get('sampled_tokens', 0):,} tokens"))
    return Group(*parts)


def sparkline(values: Sequence[float]) -> str:
    """One character a value, between 0 (or the least, if that is below) and the largest: noise on top of a high mean
    stays a flat line."""
    low, high = min(0.0, *values), max(values)
    if high <= low:
        return BARS[0] * len(values)
    return "".join(BARS[min(int((value - low) / (high - low) * len(BARS)), len(BARS) - 1)] for value in values)


def _numbers(step: int, metrics: Mapping[str, float]) -> Table:
    """Two columns of label and value."""
    table = Table(title=f"step {step + 1}", title_justify="left", show_header=False, box=None, pad_edge=False)
    for _ in range(2):
        table.add_column(style="dim", no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
    evaluations = [
        (f"{name.split('/')[1]} accuracy", name, ".3f")
        for name in metrics
        if name.startswith("eval/") and name.endswith("/accuracy")
    ]
    shown = [(label, format(metrics[name], form)) for label, name, form in (*NUMBERS, *evaluations) if name in metrics]
    half = (len(shown) + 1) // 2
    for left, right in zip(shown[:half], [*shown[half:], ("", "")], strict=False):
        table.add_row(*left, *right)
    return table
