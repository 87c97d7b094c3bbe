"""Metrics: what right and wrong answers cost in tokens."""

from rltool.api import Sample


def by_length(samples: list[Sample]) -> dict[str, float]:
    """monitor.metrics = "examples.metrics:by_length"; recorded as own/tokens_right and own/tokens_wrong."""
    lengths: dict[str, list[int]] = {"right": [], "wrong": []}
    for sample in samples:
        lengths["right" if (sample.reward or 0.0) > 0.5 else "wrong"].append(sum(sample.response_mask))
    return {f"tokens_{name}": sum(found) / len(found) for name, found in lengths.items() if found}
