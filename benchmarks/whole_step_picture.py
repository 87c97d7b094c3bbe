"""Where the seconds of a whole RL step go, as bars: an SVG of what whole_step and whole_step_trl printed.

    python -m benchmarks.whole_step_picture rltool.log trl.log --out docs/whole_step.svg

Each file's last line of JSON has the medians of its runs, a bar each. What the trainer waits for generation, its
log-probabilities, training, the weight sync and the rest are one after the other in a step, and add up to it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path

PARTS = {
    "waiting for generation": "#1f77b4", "log-probabilities": "#ff7f0e", "training": "#2ca02c",
    "weight sync": "#d62728", "other": "#bbbbbb",
}  # fmt: skip
WIDTH, LEFT, RIGHT, ROW, TOP = 720, 190, 60, 26, 34
STYLE = "<style>svg{background:#fff;font:12px sans-serif}</style>"


def parts(seconds: Mapping[str, float]) -> dict[str, float]:
    """Of one run of either benchmark; `wait` is rltool's, whose time/train_seconds has its log-probabilities in it."""
    is_rltool = "wait" in seconds
    found = {
        "waiting for generation": seconds["wait"] if is_rltool else seconds["generate"],
        "log-probabilities": seconds["logprobs"],
        "training": seconds["train"] - seconds["logprobs"] * is_rltool,
        "weight sync": seconds["sync"],
    }
    return found | {"other": max(seconds["step"] - sum(found.values()), 0.0)}


def bars(text: str) -> Iterator[tuple[str, dict[str, float]]]:
    """(label, seconds by part) of each run in a benchmark's output. ValueError where it has no result."""
    lines = [line for line in text.splitlines() if line.startswith('{"shape"')]
    if not lines:
        raise ValueError("no line of JSON with a shape: the benchmark did not end")
    found = json.loads(lines[-1])
    shape = found.pop("shape")
    who = "TRL" if found.pop("mode", None) is not None else "rltool"
    for run, seconds in found.items():
        yield f"{shape}, {who}, {run.replace('max_staleness', 'staleness')}", parts(seconds)


def picture(rows: list[tuple[str, dict[str, float]]]) -> str:
    longest = max(sum(values.values()) for _, values in rows)
    scale = (WIDTH - LEFT - RIGHT) / longest
    height = TOP + ROW * len(rows) + 8
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="seconds of a step">{STYLE}'
    ]
    for i, (name, color) in enumerate(PARTS.items()):
        x = 10 + i * 142 + 20 * bool(i)
        out.append(f'<rect x="{x}" y="8" width="12" height="12" fill="{color}"/>')
        out.append(f'<text x="{x + 18}" y="18">{name}</text>')
    for i, (label, values) in enumerate(rows):
        y, x = TOP + i * ROW, float(LEFT)
        out.append(f'<text text-anchor="end" x="{LEFT - 8}" y="{y + 14}">{escape(label)}</text>')
        for name, color in PARTS.items():
            width = values[name] * scale
            out.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 8}" fill="{color}">'
                f"<title>{name} {values[name]:.2f} s</title></rect>"
            )
            x += width
        out.append(f'<text x="{x + 6:.1f}" y="{y + 14}">{sum(values.values()):.1f} s</text>')
    return "".join(out) + "</svg>\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path, help="output of whole_step or whole_step_trl")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.write_text(picture([bar for path in args.results for bar in bars(path.read_text())]))


if __name__ == "__main__":
    main()
