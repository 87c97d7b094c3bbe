"""`rltool diff-dumps`: where two recordings of rollouts differ."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rltool.terminal import Console

if TYPE_CHECKING:
    from rltool.rollout.measure.dump_diff import Comparison


def diff_dumps(
    left: Annotated[Path, typer.Argument(metavar="A", help="Directory of recorded rollouts, or a run's.")],
    right: Annotated[Path, typer.Argument(metavar="B", help="The other one.")],
    step: Annotated[
        int | None, typer.Option(min=0, help="Only this step, counted from 0 as in the files' names.")
    ] = None,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Rewards and log-probabilities no further apart than this count as equal.")
    ] = 0.0,
) -> None:
    """Compare two recordings sample by sample and token by token: exit code 1 where they differ."""
    from rltool.rollout.measure.dump_diff import compare_dumps

    found = compare_dumps(_rollouts(left), _rollouts(right), step=step, tolerance=tolerance)
    console = Console()
    for line in summary(found):
        console.print(line)
    raise typer.Exit(0 if found.equal else 1)


def _rollouts(directory: Path) -> Path:
    """runs/NAME means runs/NAME/rollouts."""
    inside = directory / "rollouts"
    return inside if inside.is_dir() else directory


def summary(found: Comparison) -> list[str]:
    """What a person reads: the first difference, then the counts."""
    compared = f"{found.samples} samples of {found.steps} steps"
    if found.equal:
        return [f"equal: {compared}"]
    lines = []
    if found.first is not None:
        lines.append(f"first difference: {found.first}")
    lines.append(f"{found.differing} of {compared} differ")
    lines += [f"  {name}: {count}" for name, count in found.by_field.most_common()]
    if found.largest_logprob:
        lines.append(f"largest difference of two log-probabilities: {found.largest_logprob:.2e}")
    for which, steps in (("A", found.only_left), ("B", found.only_right)):
        if steps:
            lines.append(f"only in {which}: steps {', '.join(map(str, steps))}")
    return lines
