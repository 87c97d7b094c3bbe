"""Which recorded steps, and which of their prompt groups, a replay takes. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from rltool.errors import UsageError
from rltool.rollout.sample import Sample
from rltool.rollout.seeds import hash31

_RANGE = re.compile(r"(\d+):(\d+)")


def chosen_steps(text: str, recorded: Sequence[int]) -> list[int]:
    """Of the recorded steps those of "A:B", A to B - 1, or of "3,7,9", in this order. UsageError for another text, and
    for a step that is not there."""
    if match := _RANGE.fullmatch(text):
        wanted = list(range(int(match[1]), int(match[2])))
    elif all(part.strip().isdigit() for part in text.split(",")):
        wanted = [int(part) for part in text.split(",")]
    else:
        raise UsageError(f"--recorded-steps {text!r}: A:B is steps A to B - 1, 3,7,9 are these; counted from 0")
    missing = [step for step in wanted if step not in recorded]
    if missing or not wanted:
        have = f"{recorded[0]} to {recorded[-1]}" if recorded else "none"
        raise UsageError(f"--recorded-steps {text}: step {missing[0] if missing else text} is not there; have {have}")
    return wanted


def subsample(samples: Sequence[Sample], share: float, *, seed: int) -> list[Sample]:
    """Whole prompt groups, ceil(share x groups) of them, in the order that they had. Which ones depends on the seed and
    their ids alone, so a larger share has all groups of a smaller one. ValueError unless 0 < share <= 1."""
    if not 0 < share <= 1:
        raise ValueError(f"share {share} is not above 0 and at most 1")
    groups = sorted(
        {sample.group_id for sample in samples}, key=lambda group: (hash31("subsample", seed, group), group)
    )
    kept = set(groups[: math.ceil(share * len(groups))])
    return [sample for sample in samples if sample.group_id in kept]
