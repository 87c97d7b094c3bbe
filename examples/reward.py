"""A reward: right answers pay, short ones more."""

from rltool.api import Sample


def brevity(sample: Sample, text: str) -> float:
    """reward.function = "examples.reward:brevity"."""
    return float((sample.label or "") in text) / (1 + len(sample.response_ids) / 100)
