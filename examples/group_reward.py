"""A reward of the whole group: of the right answers to a prompt the shortest gets one, the others a half."""

from rltool.api import Sample


def short_among_right(group: list[Sample], texts: list[str]) -> list[float]:
    """reward.group = "examples.group_reward:short_among_right"; the samples' rewards are those of reward.function."""
    right = [len(text) for sample, text in zip(group, texts, strict=True) if (sample.reward or 0.0) > 0]
    shortest = min(right, default=0)
    return [
        0.0 if not sample.reward else 1.0 if len(text) == shortest else 0.5
        for sample, text in zip(group, texts, strict=True)
    ]
