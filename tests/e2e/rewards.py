"""The share of lower-case letters: a random model earns a part of it, so that a few steps have something to learn."""

from __future__ import annotations

from rltool.rollout.sample import Sample


def lower_case_share(sample: Sample, text: str) -> float:
    return sum(c.islower() for c in text) / max(1, len(text))


def raises_on_most(sample: Sample, text: str) -> float:
    if sample.index % 4:
        raise RuntimeError("this reward is broken")
    return 1.0
