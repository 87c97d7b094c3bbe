"""The reward of this recipe."""

from __future__ import annotations

import re

from rltool.api import Sample


def is_last_number(text: str, label: str) -> bool:
    """Whether the last whole number in `text` is `label`."""
    found = re.findall(r"-?\d+", text.replace(",", ""))
    return bool(found) and int(found[-1]) == int(label)


def last_number(sample: Sample, text: str) -> float:
    """1.0 if the last whole number of the response is the label, else 0.0."""
    return float(is_last_number(text, sample.label or ""))
