"""Where two recordings of rollouts differ: the first place, and how much in all. Pure but for reading them."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from rltool.errors import UsageError
from rltool.rollout.measure.dump import dumped_steps, read_dump
from rltool.rollout.sample import Sample

LONGEST_VALUE = 80


@dataclass(frozen=True)
class Difference:
    """sample: its place in the step; field "samples": their number differs. position: in a list, None for other
    fields."""

    step: int
    sample: int
    field: str
    position: int | None
    left: Any
    right: Any

    def __str__(self) -> str:
        if self.field == "samples":
            return f"step {self.step}: {self.left} samples against {self.right}"
        place = "" if self.position is None else f", token {self.position}"
        values = f"{_short(self.left)} against {_short(self.right)}"
        return f"step {self.step}, sample {self.sample}{place}: {self.field} {values}"


@dataclass
class Comparison:
    """first: the first difference, None where there is none. only_left, only_right: steps that one alone has. samples:
    compared ones; differing: those with a difference; by_field: field -> samples in which it differs."""

    first: Difference | None = None
    only_left: list[int] = field(default_factory=list)
    only_right: list[int] = field(default_factory=list)
    steps: int = 0
    samples: int = 0
    differing: int = 0
    by_field: Counter[str] = field(default_factory=Counter)
    largest_logprob: float = 0.0

    @property
    def equal(self) -> bool:
        return self.first is None and not self.only_left and not self.only_right


def compare_dumps(left: Path, right: Path, *, step: int | None = None, tolerance: float = 0.0) -> Comparison:
    """step None: every step that either has. tolerance: largest difference of two rewards or log-probabilities that
    count as equal. UsageError where a directory has no recorded step, or not this one; DumpError for a broken file."""
    ours, theirs = ([s for s in _steps(directory) if step in (None, s)] for directory in (left, right))
    if step is not None and not (ours and theirs):
        lacking = left if not ours else right
        raise UsageError(f"--step {step}: {lacking} has no recording of it")
    result = Comparison(only_left=sorted({*ours} - {*theirs}), only_right=sorted({*theirs} - {*ours}))
    for number in sorted({*ours} & {*theirs}):
        result.steps += 1
        _compare_step(
            result, number, read_dump(left, number).samples, read_dump(right, number).samples, tolerance=tolerance
        )
    return result


def _steps(directory: Path) -> list[int]:
    found = dumped_steps(directory)
    if not found:
        raise UsageError(
            f"{directory} holds no recorded rollout (step_*.json): `rltool debug rollout-only` and rollout.dump = true "
            "write them"
        )
    return found


def _compare_step(
    result: Comparison, step: int, left: Sequence[Sample], right: Sequence[Sample], *, tolerance: float
) -> None:
    for place, (ours, theirs) in enumerate(zip(left, right, strict=False)):
        found = list(differences(ours, theirs, step=step, place=place, tolerance=tolerance))
        result.samples += 1
        result.differing += bool(found)
        result.by_field.update(difference.field for difference in found)
        result.first = result.first or next(iter(found), None)
        pairs = zip(ours.response_logprobs, theirs.response_logprobs, strict=False)
        result.largest_logprob = max([result.largest_logprob, *(abs(a - b) for a, b in pairs)])
    if len(left) != len(right):
        result.by_field["samples"] += 1
        result.first = result.first or Difference(
            step, min(len(left), len(right)), "samples", None, len(left), len(right)
        )


def differences(left: Sample, right: Sample, *, step: int, place: int, tolerance: float) -> Iterator[Difference]:
    """One for each field that differs, with its first token where it is a list; in the order of Sample's fields, which
    is that in which they come about."""
    for item in fields(Sample):
        ours, theirs = getattr(left, item.name), getattr(right, item.name)
        if isinstance(ours, list | array) and isinstance(theirs, list | array):
            position = _first_difference(ours, theirs, tolerance)
            if position is not None:
                yield Difference(step, place, item.name, position, _at(ours, position), _at(theirs, position))
        elif not _same(ours, theirs, tolerance):
            yield Difference(step, place, item.name, None, ours, theirs)


def _first_difference(left: Sequence[Any], right: Sequence[Any], tolerance: float) -> int | None:
    for position, (ours, theirs) in enumerate(zip(left, right, strict=False)):
        if not _same(ours, theirs, tolerance):
            return position
    return None if len(left) == len(right) else min(len(left), len(right))


def _same(left: Any, right: Any, tolerance: float) -> bool:
    if isinstance(left, float) and isinstance(right, float):
        return left == right or abs(left - right) <= tolerance
    return left == right


def _at(values: Sequence[Any], position: int) -> Any:
    return values[position] if position < len(values) else "nothing"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else text[:LONGEST_VALUE] + "..."
