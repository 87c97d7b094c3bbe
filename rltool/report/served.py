"""The report of a served trainer: its models, their losses and steps, its clients; from the history that it leaves."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

from rltool.errors import RltoolError
from rltool.report.charts import NUM_COLORS, Point, Series, format_number, legend, line_chart

HISTORY = Path("served") / "history.jsonl"
KEPT_POINTS = 400
"""Of each line of a chart, where a history was folded: every second goes until there are no more."""


@dataclass
class ServedModel:
    """losses, norms: by step, from 1; a step's loss is the sum of those of its backward passes. calls, seconds: of all
    kinds; tokens: of forward and backward passes; failed: calls that the trainer refused, with the last reason."""

    client: str
    losses: list[Point] = field(default_factory=list)
    norms: list[Point] = field(default_factory=list)
    calls: int = 0
    seconds: float = 0.0
    tokens: int = 0
    failed: int = 0
    last_error: str = ""
    last: float = 0.0
    pending: list[float] = field(default_factory=list)
    steps: int = 0

    def add(self, line: dict[str, Any]) -> None:
        self.calls += 1
        self.seconds += line["seconds"]
        self.tokens += line["tokens"]
        self.last = line["time"]
        if "error" in line:
            self.failed, self.last_error = self.failed + 1, line["error"]
        elif line["kind"] == "optim_step":
            self.steps += 1
            if self.pending:
                self.losses.append((self.steps, math.fsum(self.pending)))
            if "grad_norm" in line:
                self.norms.append((self.steps, line["grad_norm"]))
            self.pending = []
        elif line["kind"] == "load_weights":
            self.pending = []
        elif line.get("backward"):
            self.pending.append(line["loss"])


@dataclass
class History:
    """clients: of each start of the server, name -> counts, as rltool.tinker.journal.History; starts: how many of them
    an entry stands for."""

    models: dict[str, ServedModel] = field(default_factory=dict[str, ServedModel])
    clients: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict[str, dict[str, dict[str, Any]]])
    starts: dict[str, int] = field(default_factory=dict[str, int])

    def add(self, line: dict[str, Any]) -> None:
        if "boot" in line:
            self.clients[line["boot"]], self.starts[line["boot"]] = line["clients"], line.get("starts", 1)
        elif "folded" in line:
            model = self.models[line["model"]] = ServedModel(**line["folded"])
            model.losses, model.norms = ([(x, y) for x, y in points] for points in (model.losses, model.norms))
        else:
            self.models.setdefault(line["model"], ServedModel(line["client"])).add(line)

    def folded(self, boot: str) -> list[dict[str, Any]]:
        """Lines that say the same, but for points of charts: one for each model, one for this start, one for all starts
        before."""
        lines: list[dict[str, Any]] = []
        for name, model in self.models.items():
            kept = {"losses": _thinned(model.losses), "norms": _thinned(model.norms)}
            lines.append({"model": name, "folded": asdict(model) | kept})
        before = sum(count for each, count in self.starts.items() if each != boot)
        if before:
            lines.append({"boot": "before", "clients": self.tallies(without=boot), "starts": before})
        return [*lines, {"boot": boot, "clients": self.clients.get(boot, {})}]

    def tallies(self, without: str | None = None) -> dict[str, dict[str, Any]]:
        """Client -> counts of all starts."""
        found: dict[str, dict[str, Any]] = {}
        for boot, clients in self.clients.items():
            for client, counts in clients.items() if boot != without else ():
                sums = found.setdefault(client, {})
                for name, value in counts.items():
                    sums[name] = value if isinstance(value, str) else sums.get(name, 0) + value
        return found


def _thinned(points: list[Point]) -> list[Point]:
    """The newest stays."""
    while len(points) > KEPT_POINTS:
        points = points[::-2][::-1]
    return points


@dataclass
class Served:
    """What a history says. clients: name -> counts; starts: of the server."""

    name: str
    models: dict[str, ServedModel]
    clients: dict[str, dict[str, Any]]
    starts: int


def is_served(directory: Path) -> bool:
    return (directory / HISTORY).exists() and not (directory / "metrics.jsonl").exists()


def read_history(file: Path) -> History:
    """The server may go on meanwhile. RltoolError for a damaged one."""
    found, lines = History(), file.read_text(encoding="utf-8").splitlines()
    for number, text in enumerate(lines, 1):
        try:
            found.add(json.loads(text))
        except (ValueError, KeyError, TypeError) as error:
            if number < len(lines):  # else it was killed, or is writing this line
                raise RltoolError(f"{file}, line {number}: no record ({error})") from error
    return found


def read_served(directory: Path) -> Served:
    """Errors of `read_history`."""
    history = read_history(directory / HISTORY)
    return Served(directory.name, history.models, history.tallies(), sum(history.starts.values()))


def served_body(runs: Sequence[Served], title: str, note: str, made: str) -> str:
    """HTML, for the page."""
    lines = [f"<h1>{escape(title)}</h1>", *([f"<p>{escape(note)}</p>"] if note else [])]
    parts = [f"<header>{''.join(lines)}<p>rltool report of {escape(made)}</p></header>"]
    for run in runs:
        prefix = f"{run.name}: " if len(runs) > 1 else ""
        parts += [_tiles(run), '<main class="charts">', *_charts(run, prefix), "</main>"]
        parts += [_table(f"{prefix}models", _MODEL_COLUMNS, _model_rows(run))]
        parts += [_table(f"{prefix}clients", _CLIENT_COLUMNS, _client_rows(run))]
    return "\n".join(parts)


def _tiles(run: Served) -> str:
    models = run.models.values()
    found = {
        "Models": len(run.models), "Clients": len({*run.clients, *(each.client for each in models)}),
        "Optimizer steps": sum(each.steps for each in models), "Trained tokens": sum(each.tokens for each in models),
        "Samples": sum(each.get("samples", 0) for each in run.clients.values()),
        "Refused": sum(each.get("refused", 0) for each in run.clients.values()) + sum(each.failed for each in models),
        "Starts of the server": run.starts,
    }  # fmt: skip
    tiles = "".join(f'<div class="tile"><b>{name}</b><strong>{value:,}</strong></div>' for name, value in found.items())
    return f'<section class="tiles">{tiles}</section>'


def _charts(run: Served, prefix: str) -> list[str]:
    """Of the models that were used last, as many as there are colors."""
    shown = sorted(run.models, key=lambda name: run.models[name].last)[-NUM_COLORS:]
    shown = [name for name in run.models if name in shown]

    def chart(what: str, label: str, points: dict[str, list[Point]], note: str) -> str:
        series = [Series(name, points[name], "line", i) for i, name in enumerate(shown)]
        content = line_chart(series, label=label) + legend([(each.name, each.color) for each in series])
        caption = f"<figcaption><h2>{escape(prefix + what)}</h2><p>{escape(note)}</p></figcaption>"
        return f"<figure>{caption}{content}</figure>"

    losses, norms = ({name: getattr(run.models[name], kind) for name in shown} for kind in ("losses", "norms"))
    some = "" if len(shown) == len(run.models) else f" The {len(shown)} models that were used last."
    return [
        chart("Loss", "loss", losses, f"Sum over what was added up for each optimizer step, as clients get it.{some}"),
        chart("Gradient norm", "norm", norms, f"Before clipping.{some}"),
    ]


_MODEL_COLUMNS = ("client", "steps", "calls", "seconds", "tokens", "first loss", "last loss", "refused", "last call")


def _model_rows(run: Served) -> dict[str, tuple[str, ...]]:
    rows: dict[str, tuple[str, ...]] = {}
    for name, each in run.models.items():
        ends = [format_number(each.losses[i][1]) for i in (0, -1)] if each.losses else ["-", "-"]
        failed = f"{each.failed}: {each.last_error}" if each.failed else "0"
        last = datetime.fromtimestamp(each.last).astimezone().strftime("%Y-%m-%d %H:%M:%S")
        rows[name] = (
            each.client, str(each.steps), str(each.calls), f"{each.seconds:.1f}", f"{each.tokens:,}", *ends, failed,
            last,
        )  # fmt: skip
    return rows


_CLIENT_COLUMNS = ("models", "trainer's seconds", "samples", "sampled tokens", "refused", "last refusal")


def _client_rows(run: Served) -> dict[str, tuple[str, ...]]:
    rows: dict[str, tuple[str, ...]] = {}
    for client in sorted({*run.clients, *(each.client for each in run.models.values())}):
        own = [each for each in run.models.values() if each.client == client]
        counts = run.clients.get(client, {})
        numbers = (f"{counts.get(name, 0):,}" for name in ("samples", "sampled_tokens", "refused"))
        seconds = f"{sum(each.seconds for each in own):.1f}"
        rows[client] = (str(len(own)), seconds, *numbers, counts.get("last_refusal", "-"))
    return rows


def _table(title: str, columns: Sequence[str], rows: dict[str, tuple[str, ...]]) -> str:
    head = "".join(f"<td>{escape(column)}</td>" for column in columns)
    body = "".join(
        f"<tr><th>{escape(name)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
        for name, cells in rows.items()
    )
    return (
        f'<section><details open><summary><h2>{escape(title)}</h2></summary><div class="scroll"><table class="numbers">'
        f"<thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table></div></details></section>"
    )
