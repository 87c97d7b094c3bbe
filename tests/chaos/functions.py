"""The reward and the filter of a chaos run, named by import path as a user's are."""

from __future__ import annotations

from rltool.rollout.sample import Sample


async def length(sample: Sample, text: str) -> float:
    return float(len(sample.response_ids))


def one_in_eight(group: list[Sample]) -> str | None:
    return "unlucky" if group[0].group_id % 8 == 5 else None
