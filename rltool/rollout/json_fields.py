"""The fields of a sample that users' functions and rows fill: what of them no dump and no checkpoint could hold."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rltool.rollout.sample import Sample

FREE_FIELDS = ("metadata", "train_metadata", "multimodal_inputs")


def unwritable(sample: Sample, names: Sequence[str] = FREE_FIELDS) -> str | None:
    """Sample, field and key of the first value that is no JSON (a set, a tensor, NaN), and why; None: all are."""
    for name in names:
        for key, value in getattr(sample, name).items():
            place = f"sample {sample.group_id}/{sample.index}: {name}[{key!r}]"
            if not isinstance(key, str):
                return f"{place} has a key that is no text"
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                return f"{place} cannot be written as JSON ({error})"
    return None
