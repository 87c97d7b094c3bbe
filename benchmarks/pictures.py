"""A chart of `rltool report` as an SVG file of its own, for the documentation."""

from __future__ import annotations

STYLE = (
    "<style>svg{background:#fff;--c0:#1f77b4;--c1:#d62728;font:12px sans-serif}.line,.faint{fill:none;stroke-width:1.5}"
    ".faint{opacity:.45}.grid{stroke:#ddd}.hit{opacity:0}</style>"
)


def standalone(chart: str) -> str:
    """chart: of rltool.report.charts, whose colours a page gives."""
    head, body = chart.split(">", 1)
    return head.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"') + ">" + STYLE + body + "\n"
