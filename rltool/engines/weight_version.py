"""The name of one state of the policy's weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rltool.errors import RltoolError

_PATTERN = re.compile(r"([0-9a-f]{32}):(0|[1-9][0-9]*):(0|[1-9][0-9]*)")


class BadWeightVersion(RltoolError):
    """A text that no trainer of rltool wrote, such as the "default" of an SGLang server that was never updated."""


@dataclass(frozen=True)
class WeightVersion:
    """`RUN:ATTEMPT:N`: the weights of RUN after N finished training steps, as its ATTEMPT-th start made them.

    A version names weights: sending `RUN:ATTEMPT:N` again, after a failed sync or to an engine that came late, sends
    the same bytes.

    Not a bare number, because engines outlive trainers: another run's version 3 is not ours, and neither is the version
    3 of this run before it crashed, when its resumed self counts from an earlier checkpoint.

    run: uuid4 hex (32 digits); attempt and number: from 0.
    """

    run: str
    attempt: int
    number: int

    def __post_init__(self) -> None:
        if _PATTERN.fullmatch(str(self)) is None:
            raise BadWeightVersion(
                "a weight version is RUN:ATTEMPT:N with a uuid in 32 hex digits and two numbers from 0, "
                f"not {str(self)!r}"
            )

    def __str__(self) -> str:
        return f"{self.run}:{self.attempt}:{self.number}"

    @classmethod
    def parse(cls, text: str) -> WeightVersion:
        """The inverse of str(). Raises BadWeightVersion."""
        found = _PATTERN.fullmatch(text)
        if found is None:
            raise BadWeightVersion(
                f"{text!r} is not a weight version (RUN:ATTEMPT:N): these weights were not sent by rltool's trainer. "
                "A full sync makes them ours."
            )
        return cls(found[1], int(found[2]), int(found[3]))

    def follows(self, other: WeightVersion) -> bool:
        """True if this is a later version of the same run (of a later attempt,
        or of the same attempt and a higher number)."""
        return self.run == other.run and (self.attempt, self.number) > (other.attempt, other.number)


@dataclass(frozen=True)
class Lineage:
    """Which weight versions lie behind a run's present weights: those of this attempt, and of each earlier one up to
    the checkpoint from which the next was resumed. Later versions of an earlier attempt name weights that were
    discarded.

    ancestors: attempt -> the highest training step of it that these weights contain. adapters: engines get each version
    as an adapter under a name of its own, and every request names one (engines/adapters.py).
    """

    run: str
    attempt: int
    ancestors: Mapping[int, int] = field(default_factory=dict)
    adapters: bool = False

    def version(self, step: int) -> WeightVersion:
        """The name of this attempt's weights after `step` finished training steps."""
        return WeightVersion(self.run, self.attempt, step)

    def resumed(self, attempt: int, step: int) -> Lineage:
        """The lineage of `attempt`, which starts from this one's checkpoint after `step` training steps."""
        kept = {earlier: min(last, step) for earlier, last in self.ancestors.items()}
        return Lineage(self.run, attempt, {**kept, self.attempt: step}, self.adapters)

    def refusal(self, version: str, *, published: int) -> str | None:
        """Why tokens of `version` must not be trained on: "foreign", "unpublished", or None where it is known.

        published: highest training step that this attempt has given to an engine, or is giving just now.
        """
        try:
            found = WeightVersion.parse(version)
        except BadWeightVersion:
            return "foreign"
        if found.run != self.run:
            return "foreign"
        if found.attempt == self.attempt:
            return "unpublished" if found.number > published else None
        last = self.ancestors.get(found.attempt)
        return None if last is not None and found.number <= last else "foreign"

    def to_json(self) -> dict[str, Any]:
        ancestors = {str(k): v for k, v in self.ancestors.items()}
        return {"run": self.run, "attempt": self.attempt, "ancestors": ancestors, "adapters": self.adapters}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Lineage:
        """The inverse of `to_json`."""
        ancestors = {int(k): v for k, v in data["ancestors"].items()}
        return cls(data["run"], data["attempt"], ancestors, data.get("adapters", False))
