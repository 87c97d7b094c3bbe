"""Tables that several verbs print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from rltool.processes.run_directory import runs_root
from rltool.terminal import Console

if TYPE_CHECKING:
    from rltool.engines.run_client import EngineStatus, RunStatus, ServedStatus

_SERVING = "ready"


def log_no_run() -> None:
    """Of --all, where there is none: silence would pass for success."""
    Console().print(f"no run in {runs_root()}")


def engine_table(engines: Sequence[EngineStatus], title: str) -> Table:
    """Each engine's state in the fleet of a living run, and for how long it has been in it."""
    table = Table(title=title, title_justify="left")
    for name in ("engine", "state", "for"):
        table.add_column(name, no_wrap=True)
    for name in ("weight version", "reason"):
        table.add_column(name, overflow="fold")
    for engine in engines:
        state = engine.get("state", "?")
        version = short_version(engine.get("weight_version"))
        table.add_row(
            engine.get("url", "?"),
            state if state == _SERVING else Text(state, "yellow"),
            duration(engine.get("since_seconds")),
            version if engine.get("takes_weights", True) else "takes none",
            engine.get("reason") or "-",
        )
    return table


def progress_line(status: RunStatus) -> str:
    """`step 12 of 100; 4 of 5 engines serve; prompt groups: ...`; what the driver did not report is left out."""
    parts = []
    if "step" in status:
        parts.append(f"step {status['step']}" + (f" of {status['steps']}" if "steps" in status else ""))
    engines = status.get("engines")
    if engines:
        parts.append(f"{sum(engine.get('state') == _SERVING for engine in engines)} of {len(engines)} engines serve")
    groups = status.get("groups")
    if groups:
        counts = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in groups.items())
        parts.append(f"prompt groups: {counts}")
    if "requests_in_flight" in status:
        parts.append(f"{status['requests_in_flight']} requests in flight")
    progress = status.get("progress")
    if progress:
        parts.append(str(progress))
    return "; ".join(parts)


def served_line(status: ServedStatus) -> str:
    """`12 calls done (forward_backward 8 in 3.2 s with 1,024 tokens, ...); 2 models of 1 client; ...`"""
    kinds = [
        f"{kind} {found['calls']} in {found['seconds']:.1f} s"
        + (f" with {found['tokens']:,} tokens" if found["tokens"] else "")
        + (f", {found['failed']} failed" if found["failed"] else "")
        for kind, found in sorted(status.get("calls", {}).items())
    ]
    calls = sum(found["calls"] for found in status.get("calls", {}).values())
    models, waiting = status.get("models", {}), status.get("waiting", {})
    parts = [f"{calls} calls done" + (f" ({'; '.join(kinds)})" if kinds else "")]
    if running := status.get("running"):
        parts.append(f"{running} is running")
    if stalled := status.get("stalled"):
        parts.append(stalled)
    parts.append(f"{sum(waiting.values())} wait" + (f" ({_by_client(waiting)})" if waiting else ""))
    if queued := status.get("queued_bytes"):
        parts.append(f"{sum(queued.values()):,} bytes have not ended ({_by_client(queued)})")
    parts.append(f"{sum(models.values())} models" + (f" ({_by_client(models)})" if models else ""))
    if refused := status.get("refused"):
        parts.append(f"{sum(refused.values())} refused ({_by_client(refused)})")
    if "samples" in status:
        in_flight = sum(status.get("samples_in_flight", {}).values())
        parts.append(
            f"{status['samples']} samples done with {status.get('sampled_tokens', 0):,} tokens, {in_flight} in flight"
        )
    return "; ".join(parts)


def _by_client(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{client} {count}" for client, count in sorted(counts.items()))


def short_version(version: str | None) -> str:
    """RUN:ATTEMPT:N with the first eight characters of the run's id, which has 32: enough to distinguish runs, and
    short enough for a table. Other versions as they are."""
    if not version:
        return "-"
    run, colon, rest = version.partition(":")
    return f"{run[:8]}{colon}{rest}" if colon and rest else version


def duration(seconds: float | None) -> str:
    """`7 s`, `3 min`, `2.5 h`."""
    if seconds is None:
        return "-"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 2 * 3600 else f"{seconds / 3600:.1f} h"
