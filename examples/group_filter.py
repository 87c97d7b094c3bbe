"""A filter: prompts that nearly every sample gets right teach nothing any more."""

from rltool.api import Sample


def too_easy(group: list[Sample]) -> str | None:
    """rollout.group_filter = "examples.group_filter:too_easy"; counted as rollout/dropped_groups_too_easy."""
    return "too_easy" if min(sample.reward or 0.0 for sample in group) > 0.9 else None
