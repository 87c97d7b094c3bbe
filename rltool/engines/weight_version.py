"""The name of one state of the policy's weights."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from rltool.errors import RltoolError

_PATTERN = re.compile(r"([0-9a-f]{32}):(0|[1-9][0-9]*):(0|[1-9][0-9]*)")


class BadWeightVersion(RltoolError):
    """A text that no trainer of rltool wrote, such as the "default" of an SGLang server that was never updated."""


@dataclass(frozen=True)
class WeightVersion:
    """`RUN:ATTEMPT:N`: the N-th weights that the ATTEMPT-th start of the trainer of RUN sent.

    Not a bare number, because engines outlive trainers: another run's version 3 is not ours, and neither is the version 3
    of this run before it crashed, when its resumed self counts from an earlier checkpoint.

    run: uuid4 hex (32 digits); attempt and number: from 0.
    """

    run: str
    attempt: int
    number: int

    def __post_init__(self) -> None:
        if _PATTERN.fullmatch(str(self)) is None:
            raise BadWeightVersion(
                f"a weight version is RUN:ATTEMPT:N with a uuid in 32 hex digits and two numbers from 0, not {str(self)!r}"
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

    def next(self) -> WeightVersion:
        """The version that the trainer's next push carries."""
        return replace(self, number=self.number + 1)

    def follows(self, other: WeightVersion) -> bool:
        """True if this is a later version of the same run (of a later attempt, or of the same attempt and a higher number)."""
        return self.run == other.run and (self.attempt, self.number) > (other.attempt, other.number)
