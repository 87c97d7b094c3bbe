"""Small charts as inline SVG: lines, dots and stacked bars over steps. Pure text; colours come from the page's CSS
variables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Literal

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 40
NUM_COLORS = 6
"""The page defines --c0 ... --c5."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """points: (step, value), ascending. faint: thin and pale, for raw values behind their mean; dots: few points that
    matter, each with its interval. intervals: step -> (low, high)."""

    name: str
    points: Sequence[Point]
    style: Literal["line", "faint", "dots"] = "line"
    color: int = 0
    intervals: Mapping[float, tuple[float, float]] = field(default_factory=dict)

    @property
    def is_line(self) -> bool:
        """Two dots are not joined: nothing is known between two evaluations."""
        return self.style != "dots" or len(self.points) > 2

    @property
    def extent(self) -> list[float]:
        """All values that have to fit on the axis."""
        return [value for _, value in self.points] + [end for interval in self.intervals.values() for end in interval]


@dataclass(frozen=True)
class _Scale:
    """Maps values to pixels; `log` maps exponents instead."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    ticks: tuple[float, ...] = ()

    def __call__(self, value: float) -> float:
        if self.log:
            value = math.log10(value) if value > 0 else self.low
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + min(max(share, 0.0), 1.0) * (self.end - self.start), 1)


def line_chart(
    series: Sequence[Series], *, label: str, log: bool = False, y_range: tuple[float, float] | None = None
) -> str:
    """One SVG. label: what the y axis shows, with its unit. log: decades; values of 0 lie on the lower edge. A linear
    axis without y_range begins (or ends) at 0, so that noise around a large value looks as small as it is."""
    points = [point for item in series for point in item.points]
    if not points:
        return _empty(label)
    values = [value for item in series for value in item.extent]
    y = _log_scale(points) if log else _linear_scale([0.0, *values], y_range)
    x = _step_scale([step for step, _ in points])
    body = [_frame(x, y, label)]
    for item in series:
        color = f"var(--c{item.color % NUM_COLORS})"
        if item.is_line:
            path = " ".join(f"{x(step)},{y(value)}" for step, value in item.points)
            css = "faint" if item.style == "faint" else "line"
            body.append(f'<polyline class="{css}" points="{path}" stroke="{color}"/>')
        body += [_error_bar(x(step), y(low), y(high), color) for step, (low, high) in item.intervals.items()]
        dots = item.points if item.style == "dots" or len(item.points) == 1 else ()
        for step, value in dots:
            body.append(f'<circle cx="{x(step)}" cy="{y(value)}" r="4.5" fill="{color}"/>')
        for step, value in item.points:
            tip = escape(f"{item.name}, step {step:g}: {format_number(value)}{_interval(item, step)}")
            body.append(f'<circle class="hit" cx="{x(step)}" cy="{y(value)}" r="6"><title>{tip}</title></circle>')
    return _svg(label, body)


def _error_bar(x: float, low: float, high: float, color: str) -> str:
    """A vertical line with a cap at each end."""
    path = f"M{x - 4:.1f} {low}H{x + 4:.1f}M{x} {low}V{high}M{x - 4:.1f} {high}H{x + 4:.1f}"
    return f'<path class="error" d="{path}" stroke="{color}" fill="none"/>'


def _interval(item: Series, step: float) -> str:
    if step not in item.intervals:
        return ""
    low, high = item.intervals[step]
    return f" ({format_number(low)} to {format_number(high)})"


def stacked_bars(steps: Sequence[float], parts: Mapping[str, Sequence[float]], *, label: str) -> str:
    """One bar per step; parts: name -> one value >= 0 per step, drawn from the bottom up in this order."""
    if not steps:
        return _empty(label)
    totals = [sum(values[i] for values in parts.values()) for i in range(len(steps))]
    # a first step that warms everything up must not flatten all the others: the axis ends at twice the 90th percentile
    cap = 2 * sorted(totals)[min(len(totals) - 1, int(0.9 * len(totals)))]
    y = _linear_scale([0.0, min(max(totals), cap) or 1.0], None)
    x = _step_scale(steps, margin=0.5)
    width = max((WIDTH - LEFT - RIGHT) / (max(steps) - min(steps) + 1) * 0.86, 0.8)
    body = [_frame(x, y, label)]
    for i, step in enumerate(steps):
        tip = escape(
            f"step {step:g}: {totals[i]:.2f} s\n"
            + "\n".join(f"{name} {values[i]:.2f} s" for name, values in parts.items())
        )
        bars, base = [], 0.0
        for color, values in enumerate(parts.values()):
            top = y(base + values[i])
            bars.append(
                f'<rect x="{x(step) - width / 2:.1f}" y="{top}" width="{width:.1f}" height="{y(base) - top:.1f}" '
                f'fill="var(--c{color % NUM_COLORS})"/>'
            )
            base += values[i]
        if totals[i] > y.high:
            bars.append(
                f'<text class="tick" text-anchor="start" x="{x(step) + width:.1f}" '
                f'y="{TOP + 10}">{totals[i]:.1f}</text>'
            )
        body.append(f"<g><title>{tip}</title>{''.join(bars)}</g>")
    return _svg(label, body)


def legend(names: Sequence[tuple[str, int]]) -> str:
    """HTML: (name, colour) pairs."""
    items = "".join(
        f'<span><i style="background:var(--c{color % NUM_COLORS})"></i>{escape(name)}</span>' for name, color in names
    )
    return f'<div class="legend">{items}</div>'


def moving_mean(points: Sequence[Point], window: int) -> list[Point]:
    """Mean of each point and up to window - 1 before it."""
    values = [value for _, value in points]
    return [
        (step, math.fsum(values[max(0, i + 1 - window) : i + 1]) / min(i + 1, window))
        for i, (step, _) in enumerate(points)
    ]


def format_number(value: float) -> str:
    """Four significant digits; plain where that is readable."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) >= 1e6 or abs(value) < 1e-3:
        return f"{value:.2e}"
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers that cover [low, high]; the first is <= low, the last >= high."""
    if high <= low:
        low, high = low - (0.1 * abs(low) or 1.0), low + (0.1 * abs(low) or 1.0)
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def _linear_scale(values: Sequence[float], y_range: tuple[float, float] | None) -> _Scale:
    low, high = y_range or (min(values), max(values))
    ticks = nice_ticks(low, high)
    return _Scale(ticks[0], ticks[-1], HEIGHT - BOTTOM, TOP, ticks=tuple(ticks))


def _log_scale(points: Sequence[Point]) -> _Scale:
    positive = [value for _, value in points if value > 0] or [1.0]
    low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
    high = max(high, low + 1)
    return _Scale(low, high, HEIGHT - BOTTOM, TOP, log=True, ticks=tuple(range(low, high + 1)))


def _step_scale(steps: Sequence[float], margin: float = 0.0) -> _Scale:
    low, high = min(steps) - margin, max(steps) + margin
    return _Scale(low, high if high > low else low + 1, LEFT, WIDTH - RIGHT)


def _frame(x: _Scale, y: _Scale, label: str) -> str:
    out = []
    for tick in y.ticks:
        value = 10.0**tick if y.log else tick
        text = f"1e{tick}" if y.log else f"{tick:g}"
        out.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value)}" y2="{y(value)}"/>')
        out.append(f'<text class="tick" text-anchor="end" x="{LEFT - 8}" y="{y(value) + 4}">{text}</text>')
    out += [
        f'<text class="tick" text-anchor="middle" x="{x(tick)}" y="{HEIGHT - BOTTOM + 18}">{tick:g}</text>'
        for tick in nice_ticks(x.low, x.high, 6)
        if x.low <= tick <= x.high and tick == int(tick)
    ]
    middle = (TOP + HEIGHT - BOTTOM) / 2
    out.append(
        f'<text class="axis" text-anchor="middle" transform="translate(14 {middle}) rotate(-90)">{escape(label)}</text>'
    )
    out.append(f'<text class="axis" text-anchor="end" x="{WIDTH - RIGHT}" y="{HEIGHT - 6}">step</text>')
    return "".join(out)


def _svg(label: str, body: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">{"".join(body)}</svg>'


def _empty(label: str) -> str:
    return _svg(
        label,
        [f'<text class="axis" text-anchor="middle" x="{WIDTH / 2}" y="{HEIGHT / 2}">not measured in this run</text>'],
    )
