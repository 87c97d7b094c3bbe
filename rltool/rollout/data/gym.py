"""Tasks of reasoning-gym by name. Its item number i is made from seed + i, so two sets of one task whose ranges of
seeds overlap hold the same items."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rltool.errors import UsageError
from rltool.rollout.data.spec import DataSpec

DEFAULT_SIZE = 1000
DEFAULT_SEED = 0


def gym_rows(spec: DataSpec) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, row) of each item: `prompt` is the question, `label` the answer, `metadata` what the task's score needs.

    Options beside size and seed are the task's own. UsageError without the package, for an unknown task or option.
    """
    dataset = _create(spec)
    for number in item_range(spec):
        entry = dataset[number]
        row = {"prompt": entry["question"], "label": entry["answer"], "metadata": entry["metadata"]}
        yield f"{spec.text}, item {number}", row


def item_range(spec: DataSpec) -> range:
    """Numbers of the items that are taken, slice applied."""
    size = _whole_number(spec, "size", DEFAULT_SIZE)
    return range(spec.start, size if spec.stop is None else min(spec.stop, size))


def seeds(spec: DataSpec) -> range:
    """What the items are made from."""
    seed, items = _whole_number(spec, "seed", DEFAULT_SEED), item_range(spec)
    return range(seed + items.start, seed + items.stop)


def check_held_out(train: Sequence[DataSpec], evaluation: Mapping[str, DataSpec]) -> None:
    """UsageError where an evaluation set of a task is made from seeds that training's set of that task has as well.

    Other options of the task make other items from the same seed, but not reliably; another seed costs nothing.
    """
    for name, held_out in evaluation.items():
        for trained in train:
            if held_out.kind != "reasoning-gym" or trained.kind != "reasoning-gym" or held_out.name != trained.name:
                continue
            theirs, ours = seeds(trained), seeds(held_out)
            if theirs.start < ours.stop and ours.start < theirs.stop:
                raise UsageError(
                    f"eval.sets.{name}: {held_out.text} and data.train's {trained.text} hold the same items: "
                    f"reasoning-gym makes item i from seed + i, and seeds {max(theirs.start, ours.start)} to "
                    f"{min(theirs.stop, ours.stop) - 1} are in both; give the evaluation seed={theirs.stop} or higher"
                )


def _create(spec: DataSpec) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise UsageError(
            f"data set {spec.text!r} needs the package reasoning-gym: pip install 'rltool[quickstart]'"
        ) from error
    if spec.name not in DATASETS:
        near = difflib.get_close_matches(spec.name, DATASETS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"data set {spec.text!r}: reasoning-gym has no task {spec.name!r}{hint}")
    own = {name: _value(value) for name, value in spec.options.items() if name not in ("size", "seed")}
    size = _whole_number(spec, "size", DEFAULT_SIZE)
    try:
        return reasoning_gym.create_dataset(spec.name, size=size, seed=_whole_number(spec, "seed", DEFAULT_SEED), **own)
    except (TypeError, ValueError, AssertionError) as error:
        raise UsageError(f"data set {spec.text!r}: reasoning-gym refuses these options: {error}") from error


def _whole_number(spec: DataSpec, option: str, default: int) -> int:
    text = spec.options.get(option, str(default))
    if not text.isdigit():
        raise UsageError(f"data set {spec.text!r}: {option} must be a whole number, found {text!r}")
    return int(text)


def _value(text: str) -> Any:
    """A number, true or false where it is one, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
